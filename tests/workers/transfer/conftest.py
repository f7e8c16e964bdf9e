"""Settings of all tests of transfers."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _patient_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits longer for first connections: after half a second on a busy machine, a transfer would
    go over gRPC. gloo opens a group in threads, and NIXL needs a second to start.

    The quick tier does not load the module, which imports torch.
    """
    connections = sys.modules.get("tandem.workers.transfer.connections")
    if connections is not None:
        monkeypatch.setattr(connections, "CONNECT_WAIT_SECONDS", 8.0)
