"""Tests the memory of the sweep; tests/workers and tests/router test the connections."""

import asyncio

import psutil
import pytest

from tandem.proto import strangers
from tandem.proto.strangers import StrangerSweep
from tandem.tests.waits import WAIT


@pytest.mark.io
async def test_peers_that_have_left_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while there are few connections."""
    monkeypatch.setattr(strangers, "_SWEEP_SECONDS", 0.01)
    most = psutil.Process().num_fds() + 100
    sweep = StrangerSweep(4 * most)
    for port in range(most + 1):
        sweep.admit(f"ipv4:192.0.2.1:{port}")
    sweep.start()
    async with asyncio.timeout(WAIT):
        while sweep._known:
            await asyncio.sleep(0.005)
    sweep.stop()
