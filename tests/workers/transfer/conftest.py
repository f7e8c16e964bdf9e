"""Settings of all tests of transfers."""

import pytest

from tandem.workers.transfer import connections


@pytest.fixture(autouse=True)
def _patient_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits longer for first connections: after half a second on a busy machine, a transfer would
    go over gRPC. gloo opens a group in threads, and NIXL needs a second to start.
    """
    monkeypatch.setattr(connections, "CONNECT_WAIT_SECONDS", 8.0)
