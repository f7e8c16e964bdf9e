"""Starts a recording server for the tests of the clients."""

from collections.abc import AsyncIterator

import pytest

from tandem.tests.router.client.recording_server import RecordingServer, recording_server


@pytest.fixture
async def server() -> AsyncIterator[RecordingServer]:
    async with recording_server() as running:
        yield running
