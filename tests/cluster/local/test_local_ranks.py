"""Tests which configurations a group's other ranks get, and that their processes end with it."""

from collections import UserDict
from typing import Any

import psutil
import pytest
import torch

from tandem.cluster.local.ranks import _rank_configs, local_ranks
from tandem.proto.errors import Unavailable
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


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RankConfig(model="m", identity=PeerIdentity.generate(), device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert [each.device for each in _rank_configs(config, 2)] == ["cuda:1", "cuda:2"]
    assert _rank_configs(config, 0) == []
    with pytest.raises(Unavailable, match=r"needs a GPU for each rank, 4 in all, and .* sees 3 "):
        _rank_configs(config, 3)


@pytest.mark.parametrize("count", [0, 1])
def test_without_a_gpu_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    config = RankConfig(model="m", identity=PeerIdentity.generate(), device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^device: cuda cannot be used: torch "):
        _rank_configs(config, count)


def test_ranks_on_cpus_have_one_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = RankConfig(model="m", identity=PeerIdentity.generate())
    assert _rank_configs(config, 2) == [config, config]
