"""A transport added from outside, in this one file: it keeps spans in a dictionary of the process."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tandem.tests.workers.transfer.test_connections import two, until
from tandem.workers.kv_cache.layout import KvSpan
from tandem.workers.transfer.connector import KvConnector, TransferContext, checked
from tandem.workers.transfer.frames import Announce, Data, TransportError
from tandem.workers.transfer.registry import connector_class, register_connector, unregister_connector

SPANS: dict[tuple[bytes, int, int, int], memoryview] = {}
"""By connection, stream, first layer and first token."""


class DictConnector(KvConnector):
    """Both sides of a connection within one process."""

    token = b""

    @classmethod
    async def listen(cls, context: TransferContext, name: str, announce: Callable[[Announce], None]) -> "DictConnector":
        """Opens the sender's side."""
        connector = cls(context, name)
        connector.token = secrets.token_bytes(16)
        return connector

    def description(self) -> dict[str, Any]:
        """Returns where the spans of this connection are kept."""
        return {"token": self.token}

    @classmethod
    async def connect(cls, context: TransferContext, name: str, description: dict[str, Any]) -> "DictConnector":
        """Opens the receiver's side."""
        connector = cls(context, name)
        connector.token = checked(description, {"token": bytes})["token"]
        return connector

    def offer(self, stream: int, blocks: Sequence[int], span: KvSpan) -> bytes:
        """Puts the span into the dictionary."""
        SPANS[self.token, stream, span.first_layer, span.first_token] = self.context.kv.read(blocks, span)
        return b""

    async def fetch(self, stream: int, blocks: Sequence[int], data: Data, payload: memoryview) -> memoryview:
        """Takes the span out of the dictionary."""
        try:
            return SPANS.pop((self.token, stream, data.first_layer, data.first_token))
        except KeyError as error:
            raise TransportError("KV span not in the dictionary") from error


@contextmanager
def registered() -> Iterator[None]:
    register_connector("dict", DictConnector)
    try:
        yield
    finally:
        unregister_connector("dict")


async def test_kv_cache_moves_by_a_transport_from_outside() -> None:
    with registered():
        async with two(transports=("dict", "shared")) as pair:
            for number in range(3):
                fetched = await pair.move(number)  # which checks the bytes
                assert (fetched.transport, fetched.transfer_bytes) == ("dict", len(pair.whole(number)))
            assert pair.used == ["dict"]
    assert not SPANS


async def test_it_falls_back_to_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    with registered():
        async with two(transports=("dict",)) as pair:
            monkeypatch.setattr(DictConnector, "offer", lambda *args: b"")
            assert (await pair.move()).transport == "grpc"
            monkeypatch.undo()
            monkeypatch.setattr("tandem.workers.transfer.connections.RETRY_SECONDS", 0.0)
            await pair.move(1)
            await until(lambda: pair.used == ["dict"])
            assert (await pair.move(2)).transport == "dict"


async def test_a_rank_that_does_not_know_it_takes_the_next() -> None:
    async with two(transports=("dict", "shared")) as pair:
        assert (await pair.move()).transport == "shared"


@pytest.mark.parametrize("name", ["grpc", "shared", "nccl"])
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"KV transport {name}: registered already"):
        register_connector(name, DictConnector)


def test_an_unregistered_name_is_unknown() -> None:
    with registered():
        assert connector_class("dict") is DictConnector
    with pytest.raises(KeyError):
        connector_class("dict")
