"""Tests the guard of the quick tier, see conftest.py: these tests belong to it and try what it
forbids.
"""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.tests.conftest import IO_PATHS, TESTS, is_below

refused = pytest.raises(pytest.fail.Exception, match="is in the quick tier, but causes")


def test_a_connection_is_refused() -> None:
    with socket.socket() as client, refused:
        client.connect(("127.0.0.1", 9))


def test_a_server_is_refused() -> None:
    with refused:
        socket.create_server(("127.0.0.1", 0))


def test_a_process_is_refused() -> None:
    with refused:
        subprocess.run([sys.executable, "-c", ""], check=True)


async def test_an_event_loop_and_a_file_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    assert await asyncio.to_thread((tmp_path / "file").read_text) == "text"


@pytest.mark.io
def test_a_marked_test_may_connect() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()


def test_a_file_belongs_to_a_tier_by_its_path() -> None:
    assert is_below(TESTS / "e2e" / "test_cluster.py", IO_PATHS)
    assert is_below(TESTS / IO_PATHS[-1], IO_PATHS)
    assert not is_below(TESTS / "test_tiers.py", IO_PATHS)
    assert not is_below(TESTS / "e2e_like.py", IO_PATHS)


@pytest.mark.parametrize("entry", IO_PATHS)
def test_the_paths_of_the_tiers_exist(entry: str) -> None:
    assert (TESTS / entry).exists()
