"""The processes of a group's other ranks end with it, however it ends."""

from collections import UserDict
from typing import Any

import psutil
import pytest

from tandem.cluster.local.ranks import local_ranks
from tandem.proto.identity import PeerIdentity
from tandem.workers.tp.rank import RankConfig


class Once(UserDict[str, str]):
    """An environment that can be read once."""

    def keys(self) -> Any:
        if self.pop("read", None):
            raise OSError("no more processes")
        self["read"] = "1"
        return super().keys()


async def test_a_rank_whose_neighbour_does_not_start_ends() -> None:
    before = set(psutil.Process().children())
    config = RankConfig(model="never loaded", identity=PeerIdentity.generate())
    with pytest.raises(OSError, match="no more processes"):
        async with local_ranks(config, 2, Once()):
            pass
    assert set(psutil.Process().children()) <= before
