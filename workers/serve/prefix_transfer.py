"""Moves cached prefixes to the worker that computes the rest of a prompt.

When a conversation continues, the KV cache of its last answer is at the decode worker that has
generated it. The prefill worker asks that worker for a lease of the prefix and fetches the blocks,
in the same way as a decode worker fetches blocks of a prefill. It computes the blocks that it does
not get, so no failure here fails a request.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Final

import grpc.aio

from ...proto import worker_pb2, worker_pb2_grpc
from ...proto.channel import PeerStream
from ...proto.hashing import hash_chain
from ...proto.limits import PREFIX_FETCH_SECONDS
from ..engine.engine import Engine
from ..engine.events import Admitted
from ..engine.plan import FirstTokens
from ..engine.resume import LeasedPrefix
from ..engine.sequence import SequenceSpec
from ..kv_cache.tables import SequenceKv
from ..tp.kv_group import KvGroup
from ..transfer.frames import FetchTarget, TransferError
from .cache_reset import CacheAge
from .disk_tier import DiskTier
from .engine_thread import EngineRunner

logger = logging.getLogger(__name__)

_LEASE_SECONDS: Final = 2 * PREFIX_FETCH_SECONDS  # then a lease ends by itself
_FIRST_ID: Final = 1 << 62  # of leases; far from the ids of sequences
# The protocol ends a transfer with first tokens; nobody uses these.
_NO_FIRST_TOKENS: Final = FirstTokens(tokens=(0,))


class PrefixLender:
    """Leases cached prefixes to other workers; lives in one event loop."""

    def __init__(
        self,
        thread: EngineRunner,
        kv: KvGroup,
        kv_handle: Callable[[int], worker_pb2.KvHandle],
        block_size: int,
        load_changed: Callable[[], None],
    ) -> None:
        """Makes a lender.

        `kv_handle` returns the handle of a transfer of a number of tokens. `load_changed` is called
        when a lease begins or ends, because the engine has no event of that.
        """
        self._thread = thread
        self._kv = kv
        self._kv_handle = kv_handle
        self._block_size = block_size
        self._load_changed = load_changed
        self._ids = itertools.count(_FIRST_ID)

    async def serve(
        self,
        requests: AsyncIterator[worker_pb2.LeasePrefixRequest],
        send: Callable[[worker_pb2.LeasePrefixResponse], Awaitable[None]],
    ) -> None:
        """Answers one LeasePrefix stream; the lease ends with the stream in all cases."""
        number = next(self._ids)
        # Before the lease: a reset in between must not make older KV cache look newer.
        handle = self._kv_handle(0)
        leased: list[LeasedPrefix] = []
        try:
            async with asyncio.timeout(_LEASE_SECONDS):
                chain = list((await anext(requests)).hashes)
                await self._thread.call(
                    lambda engine: leased.append(engine.lease_prefix(chain)), PREFIX_FETCH_SECONDS
                )
                self._load_changed()
                await self._thread.settle(PREFIX_FETCH_SECONDS)
                (prefix,) = leased
                self._offer(number, handle, prefix, chain)
                await send(worker_pb2.LeasePrefixResponse(kv=handle))
                async for _ in requests:  # until the other side has the blocks or gives up
                    pass
        # A RuntimeError comes from an engine that has ended.
        except (TimeoutError, StopAsyncIteration, RuntimeError) as error:
            logger.warning("the lease of a prefix has ended early: %s", type(error).__name__)
        finally:
            self._kv.stop(number, partial(self._end, leased))

    def _end(self, leased: list[LeasedPrefix]) -> None:
        """Ends a lease, unless it has not begun."""
        self._thread.post(partial(_unlease, leased))
        self._load_changed()

    def _offer(
        self, number: int, handle: worker_pb2.KvHandle, leased: LeasedPrefix, chain: list[bytes]
    ) -> None:
        """Offers a leased prefix, which is all computed, by `handle`."""
        handle.num_tokens = leased.num_tokens
        if leased.num_tokens:
            place = SequenceKv(leased.tables, leased.state)
            self._kv.offer(number, handle, place, chain[leased.num_tokens // self._block_size - 1])
            self._kv.progress(number, handle.num_tokens)
            self._kv.complete(number, _NO_FIRST_TOKENS)


def _unlease(leased: list[LeasedPrefix], engine: Engine) -> None:
    for prefix in leased:
        engine.unlease_prefix(prefix)


class PrefixImporter:
    """Imports prefixes from other workers or from disk; lives in one event loop."""

    def __init__(
        self,
        kv: KvGroup,
        block_size: int,
        disk: DiskTier | None,
        age: CacheAge,
        *,
        is_whole: bool = False,
    ) -> None:
        """Makes an importer, which fetches nothing that is older than `age` allows.

        If `is_whole`, a sequence cannot continue from an earlier position than the end of the
        blocks that it imports, because the blocks of its windows and its state belong there.
        """
        self._kv = kv
        self._block_size = block_size
        self._disk = disk
        self._age = age
        self._is_whole = is_whole

    async def load(
        self, event: Admitted, spec: SequenceSpec, holder: worker_pb2.PrefixHolder
    ) -> int:
        """Fills the blocks that a sequence imports, from the holder or from disk.

        Returns the number of tokens that are there, counted from the first block. Returns 0 if the
        holder fails. After a failure, other ranks may still write to the blocks until
        `KvGroup.stop`.
        """
        if event.prefix_source != "remote":
            return await self._disk.load(event, self._kv) if self._disk is not None else 0
        try:
            # From the request for the lease; the engine computes the tokens that are missing.
            async with asyncio.timeout(PREFIX_FETCH_SECONDS):
                return await self._fetch(event, spec, holder)
        except (
            TransferError,
            TimeoutError,
            grpc.aio.AioRpcError,
            asyncio.InvalidStateError,
        ) as error:
            reason = str(error) if isinstance(error, TransferError) else type(error).__name__
            logger.warning(
                "a cached prefix could not be fetched from %s: %s", holder.address, reason
            )
            return 0

    async def _fetch(
        self, event: Admitted, spec: SequenceSpec, holder: worker_pb2.PrefixHolder
    ) -> int:
        end = event.num_cached + len(event.import_hashes) * self._block_size
        chain = hash_chain(spec.tokens[:end], holder.block_size, spec.salt)
        stub = worker_pb2_grpc.WorkerStub(self._kv.channel(holder.address))  # type: ignore[no-untyped-call]
        call: PeerStream[worker_pb2.LeasePrefixRequest, worker_pb2.LeasePrefixResponse] = (
            stub.LeasePrefix()
        )
        try:
            await call.write(worker_pb2.LeasePrefixRequest(hashes=chain))
            response = await call.read()
            if not isinstance(response, worker_pb2.LeasePrefixResponse):
                raise TransferError("the holder granted no lease")
            handle = response.kv
            if handle.num_tokens <= event.num_cached:
                return 0  # the blocks have left its KV cache meanwhile
            if not self._age.allows(handle):
                return 0  # the holder has not been reset yet
            if self._is_whole and handle.num_tokens != end:
                return 0  # the parts of this point have left its KV cache, or it never had them
            num_blocks, rest = divmod(handle.num_tokens, holder.block_size)
            if rest or num_blocks > len(chain) or not handle.endpoints:
                raise TransferError("the lease does not match the requested prefix")
            target = FetchTarget(
                SequenceKv(event.import_tables, event.import_state), event.num_cached
            )
            await self._kv.fetch_now(event.id, handle, chain[num_blocks - 1], target)
        finally:
            call.cancel()
        return handle.num_tokens // self._block_size * self._block_size - event.num_cached
