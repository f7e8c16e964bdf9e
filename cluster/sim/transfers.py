"""Simulates KV transfers between workers: offers, leases and fetches that take time.

Does the work of `KvEndpoint` for the real KvGroup. No data exists, so none is checked.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from ...proto import worker_pb2
from ...proto.costs import KvCost
from ...workers.engine.plan import FirstTokens
from ...workers.kv_cache.tables import SequenceKv
from ...workers.transfer.frames import FetchResult, FetchTarget, TransferError
from .links import Flow, Link

NUM_LAYERS: Final = 4
"""The layers of a simulated model: a fetch may continue after each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCosts:
    """Holds what decides the time of a transfer."""

    kv: KvCost
    fixed_seconds: float
    bytes_per_second: float
    lease_seconds: float


@dataclass(slots=True, eq=False)
class Offer:
    """Holds the offer of a sequence's KV cache, and the flows of its fetches."""

    sequence_id: int
    transfer_id: bytes
    num_tokens: int
    prefix_hash: bytes
    num_ready: float = 0.0  # tokens; a share of the layers counts as a share of the tokens
    first_tokens: FirstTokens | None = None  # set when the prefill is done
    is_withdrawn: bool = False
    num_streams: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # the prefill or the offer
    flows: dict[Flow, int] = field(default_factory=dict)  # with their cached tokens
    expiry: asyncio.TimerHandle | None = None

    def check(self) -> None:
        """Raises TransferError if the offer has ended."""
        if self.is_withdrawn:
            raise TransferError("KV cache withdrawn")


class KvOffers:
    """Offers the KV cache of one worker, as KvSender does."""

    def __init__(self, costs: TransferCosts, on_release: Callable[[int], None]) -> None:
        self.link = Link()
        self._costs = costs
        self._on_release = on_release
        self._offers: dict[bytes, Offer] = {}
        self._by_sequence: dict[int, Offer] = {}

    @property
    def num_offers(self) -> int:
        return len(self._offers)

    @property
    def num_streams(self) -> int:
        return sum(offer.num_streams for offer in self._offers.values())

    def offer(
        self,
        sequence_id: int,
        transfer_id: bytes,
        place: SequenceKv | None,
        num_tokens: int,
        prefix_hash: bytes,
    ) -> None:
        """Opens an offer."""
        offer = Offer(sequence_id, transfer_id, num_tokens, prefix_hash)
        self._offers[transfer_id] = self._by_sequence[sequence_id] = offer

    def progress(
        self, sequence_id: int, num_ready: int, num_ahead: int = 0, num_layers: int = 0
    ) -> None:
        """Reports the tokens that are computed."""
        if offer := self._by_sequence.get(sequence_id):
            ahead = max(num_ahead - num_ready, 0) * num_layers / NUM_LAYERS
            self._move(offer, num_ready + ahead)

    def complete(self, sequence_id: int, first_tokens: FirstTokens) -> None:
        """Reports the end of the prefill. If no stream is open, the lease begins."""
        if offer := self._by_sequence.get(sequence_id):
            offer.first_tokens = first_tokens
            offer.ended.set()
            self._move(offer, offer.num_tokens)
            self._start_lease(offer)

    def withdraw(self, sequence_id: int) -> None:
        """Ends an offer; its fetches fail. Idempotent."""
        if offer := self._by_sequence.get(sequence_id):
            self._forget(offer)

    def close(self) -> None:
        """Ends all offers."""
        for offer in list(self._offers.values()):
            self._forget(offer)

    def open(self, handle: worker_pb2.KvHandle, prefix_hash: bytes) -> Offer:
        """Pins an offer for a fetch. Raises TransferError if it does not exist."""
        offer = self._offers.get(handle.transfer_id)
        if offer is None or offer.prefix_hash != prefix_hash:
            raise TransferError("KV cache gone")
        offer.num_streams += 1
        if offer.expiry is not None:
            offer.expiry.cancel()
        return offer

    def start(self, offer: Offer, flow: Flow, num_cached: int) -> None:
        """Lets a fetch move the tokens that are ready, except the first `num_cached`."""
        offer.flows[flow] = num_cached
        self._move(offer, offer.num_ready)

    def end(self, offer: Offer, flow: Flow | None, *, acknowledged: bool) -> None:
        """Ends a fetch; an acknowledged offer ends as well."""
        if flow is not None:
            flow.stop()
            offer.flows.pop(flow, None)
        offer.num_streams -= 1
        if acknowledged and not offer.is_withdrawn:
            self._release(offer)
        else:
            self._start_lease(offer)

    def _move(self, offer: Offer, num_ready: float) -> None:
        offer.num_ready = max(offer.num_ready, num_ready)
        kv = self._costs.kv
        for flow, num_cached in list(offer.flows.items()):
            num_bytes = kv.moved_bytes(offer.num_tokens, num_cached)
            num_missing = kv.moved_bytes(offer.num_tokens, int(offer.num_ready))
            flow.make_ready(num_bytes - num_missing)

    def _start_lease(self, offer: Offer) -> None:
        if offer.first_tokens is None or offer.num_streams or offer.is_withdrawn:
            return
        if offer.expiry is not None:
            offer.expiry.cancel()
        offer.expiry = asyncio.get_running_loop().call_later(
            self._costs.lease_seconds, self._release, offer
        )

    def _release(self, offer: Offer) -> None:
        self._forget(offer)
        self._on_release(offer.sequence_id)

    def _forget(self, offer: Offer) -> None:
        offer.is_withdrawn = True
        offer.ended.set()
        for flow in list(offer.flows):
            flow.fail(TransferError("KV cache withdrawn"))
        if offer.expiry is not None:
            offer.expiry.cancel()
        del self._offers[offer.transfer_id], self._by_sequence[offer.sequence_id]


class KvFetches:
    """Fetches the KV cache of other workers, as KvReceiver does."""

    num_closing = 0  # an acknowledgement takes no time

    def __init__(self, costs: TransferCosts, find: Callable[[str], KvOffers | None]) -> None:
        """`find` returns the offers of the worker at an address; None: it cannot be reached."""
        self.link = Link()
        self._costs = costs
        self._find = find

    @asynccontextmanager
    async def fetch(
        self, handle: worker_pb2.KvHandle, prefix_hash: bytes, target: asyncio.Future[FetchTarget]
    ) -> AsyncGenerator[FetchResult, None]:
        """Fetches a KV cache in virtual time; see KvReceiver."""
        offers = self._find(handle.endpoints[0])
        if offers is None:
            raise TransferError("KV stream broke")
        offer = offers.open(handle, prefix_hash)
        flow: Flow | None = None
        acknowledged = False
        try:
            num_cached = (await target).num_cached
            flow = self._flow(offers, offer, num_cached)
            offers.start(offer, flow, num_cached)
            await flow.wait()
            await offer.ended.wait()
            offer.check()
            await asyncio.sleep(self._costs.fixed_seconds)
            offer.check()
            assert offer.first_tokens is not None
            yield offer.first_tokens, self._received(offer, flow, num_cached)
            acknowledged = True
        finally:
            offers.end(offer, flow, acknowledged=acknowledged)

    def _flow(self, offers: KvOffers, offer: Offer, num_cached: int) -> Flow:
        offer.check()
        num_bytes = self._costs.kv.moved_bytes(offer.num_tokens, num_cached)
        speed = self._costs.bytes_per_second
        return Flow(
            offers.link,
            self.link,
            num_bytes=num_bytes if math.isfinite(speed) else 0,
            bytes_per_second=speed,
        )

    def _received(self, offer: Offer, flow: Flow, num_cached: int) -> worker_pb2.KvReceived:
        return worker_pb2.KvReceived(
            transfer_bytes=self._costs.kv.moved_bytes(offer.num_tokens, num_cached),
            transfer_active_seconds=self._costs.fixed_seconds + flow.active_seconds,
            transport="simulated",
        )


class SimulatedEndpoint:
    """Combines both sides of one worker's transfers, as KvEndpoint does."""

    def __init__(
        self, sender: KvOffers, receiver: KvFetches, channel: Callable[[str], Any]
    ) -> None:
        """`channel` returns a channel to the worker at an address."""
        self.sender = sender
        self.receiver = receiver
        self.channel = channel

    async def close(self) -> None:
        """Ends all offers."""
        self.sender.close()
