"""Calls the store beside the directory, for a router."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final

import ray
from typing_extensions import override

from ....proto.errors import Unavailable
from ....router.storage.interface import (
    Batch,
    BatchLine,
    KeyUsage,
    LineAnswer,
    LineKey,
    Owner,
    Page,
    Storage,
    StoredFile,
    StoredResponse,
)

_LARGE_BYTES: Final = 262_144

CallStore = Callable[..., Awaitable[Any]]
"""Calls a method of the store by its name, with its arguments and `wait` seconds beside the usual
deadline. Raises Unavailable.
"""


class RemoteStorage(Storage):
    """Implements Storage by calls of the actor that holds the store."""

    def __init__(self, call: CallStore) -> None:
        self._call_store = call

    @override
    async def keep_response(self, tenant: str, stored: StoredResponse) -> bool:
        return bool(await self._call("keep_response", tenant, stored))

    @override
    async def find_response(self, tenant: str, response_id: str) -> StoredResponse | None:
        found: StoredResponse | None = await self._call("find_response", tenant, response_id)
        return found

    @override
    async def delete_response(self, tenant: str, response_id: str) -> bool:
        return bool(await self._call("delete_response", tenant, response_id))

    @override
    async def add_file(
        self, tenant: str, name: str, purpose: str, content: bytes, seconds: int | None = None
    ) -> StoredFile | None:
        added: StoredFile | None = await self._call(
            "add_file", tenant, name, purpose, content, seconds
        )
        return added

    @override
    async def find_file(self, tenant: str, file_id: str) -> StoredFile | None:
        found: StoredFile | None = await self._call("find_file", tenant, file_id)
        return found

    @override
    async def list_files(self, tenant: str, page: Page, purpose: str = "") -> list[StoredFile]:
        return list(await self._call("list_files", tenant, page, purpose))

    @override
    async def read_file(self, tenant: str, file_id: str, offset: int, size: int) -> bytes | None:
        read: bytes | None = await self._call("read_file", tenant, file_id, offset, size)
        return read

    @override
    async def delete_file(self, tenant: str, file_id: str) -> bool:
        return bool(await self._call("delete_file", tenant, file_id))

    @override
    async def add_batch(self, batch: Batch, lines: Sequence[bytes]) -> Batch | None:
        added: Batch | None = await self._call("add_batch", batch, lines)
        return added

    @override
    async def find_batch(self, tenant: str, batch_id: str) -> Batch | None:
        found: Batch | None = await self._call("find_batch", tenant, batch_id)
        return found

    @override
    async def list_batches(self, tenant: str, page: Page) -> list[Batch]:
        return list(await self._call("list_batches", tenant, page))

    @override
    async def cancel_batch(self, tenant: str, batch_id: str) -> Batch | None:
        found: Batch | None = await self._call("cancel_batch", tenant, batch_id)
        return found

    @override
    async def claim(
        self, runner: str, holding: Collection[LineKey], most: int, wait: float
    ) -> list[BatchLine]:
        return list(await self._call("claim", runner, list(holding), most, wait, wait=wait))

    @override
    async def answer(self, answer: LineAnswer) -> None:
        await self._call("answer", answer)

    @override
    async def release(self, runner: str) -> None:
        await self._call("release", runner)

    @override
    async def add_usage(self, source: str, number: int, usage: Sequence[KeyUsage]) -> None:
        await self._call("add_usage", source, number, usage)

    @override
    async def find_usage(self, since: str, owner: Owner | None = None) -> list[KeyUsage]:
        return list(await self._call("find_usage", since, owner))

    async def _call(self, method: str, *args: Any, wait: float = 0.0) -> Any:
        try:
            # Ray copies arguments when it is called, which takes a while for a file.
            sent = [
                await asyncio.to_thread(ray.put, each) if _is_large(each) else each for each in args
            ]
            return await self._call_store(method, *sent, wait=wait)
        except (ray.exceptions.RayError, Unavailable) as error:  # the store has logged its own
            raise Unavailable("the store of responses, files and batches does not work") from error


def _is_large(argument: object) -> bool:
    """Returns True for the content of a file, the lines of a batch, a response, or an answer."""
    match argument:
        case bytes():
            return len(argument) > _LARGE_BYTES
        case StoredResponse():
            return len(argument.body) + len(argument.items) > _LARGE_BYTES
        case LineAnswer():
            return len(argument.line) > _LARGE_BYTES
        case list():
            return any(isinstance(each, bytes) for each in argument[:1])
    return False
