"""Settings of all tests of transfers."""

import sys
from typing import Final

import pytest

CONNECT_SECONDS: Final = 20.0
"""Not longer: a thread of gloo may wait so long for a peer that has left."""


@pytest.fixture(autouse=True)
def _patient_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits longer for connections: on a busy machine they would not be there in time, and a
    transfer would go over gRPC. gloo opens a group in threads, and NIXL needs a second to start.

    The quick tier does not load the modules, which import torch.
    """
    connections = sys.modules.get("tandem.workers.transfer.connections")
    if connections is not None:
        monkeypatch.setattr(connections, "CONNECT_WAIT_SECONDS", CONNECT_SECONDS)
        monkeypatch.setattr(connections, "CONNECT_SECONDS", CONNECT_SECONDS)
    collective = sys.modules.get("tandem.workers.transfer.collective")
    if collective is not None:
        monkeypatch.setattr(collective, "CONNECT_SECONDS", CONNECT_SECONDS)
