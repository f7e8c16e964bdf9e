"""A transport of an installed package, in this one file: it keeps spans in a dictionary of the
process.
"""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.config import load_config
from tandem.proto.errors import InvalidArgument
from tandem.tests.workers.transfer.test_connections import two, until
from tandem.workers.kv_cache.layout import KvSpan
from tandem.workers.kv_cache.tables import TableBlocks
from tandem.workers.transfer.connector import KvConnector, TransferContext, checked
from tandem.workers.transfer.frames import Announce, Data, TransportError
from tandem.workers.transfer.registry import KV_CONNECTORS, find_connector

SPANS: dict[tuple[bytes, int, int, int], memoryview] = {}
"""By connection, stream, first layer and first token."""


class DictConnector(KvConnector):
    """Both sides of a connection within one process."""

    token = b""

    @classmethod
    async def listen(
        cls, context: TransferContext, name: str, announce: Callable[[Announce], None]
    ) -> "DictConnector":
        """Opens the sender's side."""
        connector = cls(context, name)
        connector.token = secrets.token_bytes(16)
        return connector

    def description(self) -> dict[str, Any]:
        """Returns where the spans of this connection are kept."""
        return {"token": self.token}

    @classmethod
    async def connect(
        cls, context: TransferContext, name: str, description: dict[str, Any]
    ) -> "DictConnector":
        """Opens the receiver's side."""
        connector = cls(context, name)
        connector.token = checked(description, {"token": bytes})["token"]
        return connector

    async def offer(self, stream: int, table: TableBlocks, span: KvSpan) -> bytes:
        """Puts the span into the dictionary."""
        key = (self.token, stream, span.first_layer, span.first_token)
        SPANS[key] = await self.context.kv.read(table, span)
        return b""

    async def fetch(
        self, stream: int, table: TableBlocks, data: Data, payload: memoryview
    ) -> memoryview:
        """Takes the span out of the dictionary."""
        try:
            return SPANS.pop((self.token, stream, data.first_layer, data.first_token))
        except KeyError as error:
            raise TransportError("KV span not in the dictionary") from error


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The transport as the entry point of an installed package."""
    package = tmp_path / "toy-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        f"[tandem.kv_connectors]\ndict = {__name__}:DictConnector\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    find_connector.cache_clear()
    yield
    find_connector.cache_clear()


@pytest.mark.usefixtures("installed")
async def test_kv_cache_moves_by_a_transport_from_outside() -> None:
    config = load_config(None, {"model": "m", "kv_transports": ["dict", "shared"]})
    async with two(transports=config.transports) as pair:
        for number in range(3):
            fetched = await pair.move(number)  # which checks the bytes
            assert (fetched.transport, fetched.transfer_bytes) == ("dict", len(pair.whole(number)))
        assert pair.used == ["dict"]
    assert not SPANS


@pytest.mark.usefixtures("installed")
async def test_it_falls_back_to_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two(transports=("dict",)) as pair:
        with monkeypatch.context() as patch:
            patch.setattr(DictConnector, "offer", KvConnector.offer)
            assert (await pair.move()).transport == "grpc"
        monkeypatch.setattr("tandem.workers.transfer.connections.RETRY_SECONDS", 0.0)
        await pair.move(1)
        await until(lambda: pair.used == ["dict"])
        assert (await pair.move(2)).transport == "dict"


async def test_a_rank_without_it_takes_the_next() -> None:
    assert find_connector("dict") is None
    async with two(transports=("dict", "shared")) as pair:
        assert (await pair.move()).transport == "shared"


def test_a_service_takes_what_is_built_in_or_installed(request: pytest.FixtureRequest) -> None:
    load_config(None, {"model": "m", "kv_transports": list(KV_CONNECTORS)})
    refused = r"^kv_transports\.1: must be one of shared, ipc, gloo, nccl, nixl, got 'dict'$"
    with pytest.raises(InvalidArgument, match=refused):
        load_config(None, {"model": "m", "kv_transports": ["shared", "dict"]})
    request.getfixturevalue("installed")
    load_config(None, {"model": "m", "kv_transports": ["shared", "dict"]})
