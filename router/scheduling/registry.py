"""Tracks the workers for a router and places requests on them.

The registry combines the directory's list, the workers' reports, their observed speeds and the
requests that this router has dispatched. Placements and reports do not scan all workers (pool.py).
It knows of other routers only by the workers' reports.
"""

import math
import random
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Final, NamedTuple

from ...proto import worker_pb2
from ...proto.addresses import host_of
from ...proto.costs import NEUTRAL_COST, KvCost
from ..request import TokenRequest
from .capacity import NO_CAPACITY, required_capacity, used_capacity
from .policy import (
    NEUTRAL_PREFILL,
    Candidate,
    Placement,
    choose_holder,
    place,
)
from .pool import MAX_CANDIDATES
from .pool_capacity import PoolCapacity
from .prefix_index import Matches, Prefix, PrefixIndex
from .speeds import WorkerSpeeds
from .worker_state import WorkerState

_PREFILL: Final = worker_pb2.ROLE_PREFILL
_DECODE: Final = worker_pb2.ROLE_DECODE


class _Lookup(NamedTuple):
    """The prefix of a request, and its cached tokens by worker."""

    request: TokenRequest
    prefix: Prefix
    matched: Matches


class WorkerRegistry:
    """Holds the workers as this router sees them.

    While the directory is unreachable, its last list stays valid. For each attempt of a request,
    call in this order: `place`, `dispatched` for each worker, `prefilled`, `ended` for each worker.
    Code that admits requests before they are placed calls `capacity.reserve`, and
    `capacity.release` when the request is over.
    """

    def __init__(
        self,
        *,
        local_prefill_tokens: int = 0,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts without workers.

        `local_prefill_tokens`: a decode worker may compute a prompt of which it lacks at most this
        number of tokens.
        """
        # Uncached prompt tokens that were sent to workers since the start, and the predicted
        # seconds to compute them.
        self.prefill_tokens = 0
        self.prefill_seconds = 0.0
        # The text of Unavailable if a request finds no worker.
        self.unavailable_message = "no worker is ready"
        # Called when a worker is lost, and when a lost worker reports again.
        self.on_reachability: Callable[[], object] = lambda: None
        self._local_prefill_tokens = local_prefill_tokens
        self._rng = rng or random.Random()
        self._workers: dict[str, WorkerState] = {}
        self._prefixes = PrefixIndex()
        self._speeds = WorkerSpeeds(clock)
        self._clock = clock
        self._last_loss = -math.inf  # when a worker was lost
        self.capacity = PoolCapacity(
            self._workers,
            self._speeds,
            local_prefill_tokens=local_prefill_tokens,
            rng=self._rng,
        )
        # Kept from the last placement, so that a prompt is hashed and looked up once.
        self._last_lookup: _Lookup | None = None

    def update(self, workers: Iterable[worker_pb2.WorkerInfo]) -> None:
        """Applies the directory's whole list; a worker with a new epoch starts empty.

        Skips entries that are the same objects as before, so never change an entry.
        """
        known = self._workers
        listed = set()
        for info in workers:
            if info.role not in (_PREFILL, _DECODE):
                continue
            worker_id = info.worker_id
            listed.add(worker_id)
            worker = known.get(worker_id)
            if worker is not None and worker.info is info:
                continue
            if worker is not None and worker.info.epoch != info.epoch:
                self._remove(worker_id)
                worker = None
            if worker is None:
                worker = known[worker_id] = WorkerState(info)
                worker.report(info.load)
                self._reset_cache(info)
            else:
                worker.info = info
                self._take_load(worker, info.load)
            self.capacity.recount(worker)
            if info.role == _DECODE or self.capacity.cost is NEUTRAL_COST:
                self.capacity.cost = worker.cost
        for worker_id in known.keys() - listed:
            self._remove(worker_id)
        self.capacity.notify()

    def report(self, worker_id: str, epoch: int, message: worker_pb2.SessionResponse) -> None:
        """Applies a session's report of a worker's load and prefix cache.

        Ignores a report from another epoch.
        """
        worker = self._workers.get(worker_id)
        if worker is None or worker.info.epoch != epoch:
            return
        if message.HasField("load"):
            worker.report(message.load)
        if message.HasField("load") or worker.is_lost:
            was_lost = worker.is_lost
            worker.is_lost = False
            self.capacity.recount(worker)
            if was_lost:
                self.on_reachability()
        if message.stored_blocks or message.evicted_blocks:
            self._prefixes.report(worker_id, message.stored_blocks, message.evicted_blocks)

    def session_lost(self, worker_id: str, epoch: int) -> None:
        """Marks a worker as lost until a session reports again, or until it has a new epoch.

        A lost worker gets no requests. Its heartbeats do not count, because the last ones of a dead
        worker arrive after its end. Its prefix cache is forgotten; the next session reports all of
        it.
        """
        worker = self._workers.get(worker_id)
        if worker is not None and worker.info.epoch == epoch:
            worker.is_lost = True
            self._last_loss = self._clock()
            self.capacity.recount(worker)
            self._reset_cache(worker.info)
            self.on_reachability()

    def record_prefill(self, worker_id: str, num_tokens: int, seconds: float) -> None:
        """Records that a worker took `seconds` for a prompt with `num_tokens` uncached tokens."""
        if worker := self._workers.get(worker_id):
            self._speeds.record_prefill(worker, num_tokens, seconds)
            self.capacity.recount(worker)

    def record_transfer(
        self, prefill_worker: str, decode_worker: str, num_bytes: int, seconds: float
    ) -> None:
        """Records a KV transfer for both workers; a pair is as fast as its slower end."""
        for worker_id in (prefill_worker, decode_worker):
            if worker_id in self._workers:
                self._speeds.transfer.observe(worker_id, num_bytes, seconds)

    def workers(self) -> list[worker_pb2.WorkerInfo]:
        """Returns all workers, as the directory last described them."""
        return [worker.info for worker in self._workers.values()]

    def loads(self) -> list[tuple[worker_pb2.WorkerInfo, worker_pb2.WorkerLoad, str]]:
        """Returns all workers with their last load and their state: ready, draining or lost."""
        return [(worker.info, worker.load, worker.state) for worker in self._workers.values()]

    def get(self, worker_id: str) -> worker_pb2.WorkerInfo | None:
        """Returns one worker; None if it is not listed."""
        worker = self._workers.get(worker_id)
        return worker.info if worker else None

    def host(self, worker_id: str) -> str:
        """Returns the host of a worker; "" if the worker is not listed."""
        info = self.get(worker_id)
        return host_of(info.address) if info else ""

    def replaceable(self, hosts: Collection[str]) -> set[str]:
        """Returns the workers on these hosts whose role a worker elsewhere has, which is ready."""
        roles = {
            each.info.role
            for each in self._workers.values()
            if each.takes_requests and host_of(each.info.address) not in hosts
        }
        return {
            worker_id
            for worker_id, each in self._workers.items()
            if each.info.role in roles and host_of(each.info.address) in hosts
        }

    def is_lost(self, worker_id: str, epoch: int) -> bool:
        """Returns True if the worker is listed with this epoch and is lost; see `session_lost`."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.info.epoch == epoch and worker.is_lost

    @property
    def has_lost(self) -> bool:
        """Returns True if a listed worker is lost; see `session_lost`."""
        return any(worker.is_lost for worker in self._workers.values())

    def has_lost_since(self, time: float) -> bool:
        """Returns True if a listed worker is lost, or if any was lost at this time or later."""
        return self._last_loss >= time or self.has_lost

    @property
    def can_reach_worker(self) -> bool:
        """Returns True if a listed worker is not lost; see `session_lost`.

        Its role does not matter: a worker of either pool can prefill and decode.
        """
        return any(not worker.is_lost for worker in self._workers.values())

    def has_other(self, worker_id: str) -> bool:
        """Returns True if a decode worker other than this one takes requests."""
        return self.capacity.pool(_DECODE).free_without(worker_id).workers > 0

    def room_elsewhere(self, worker_id: str) -> int:
        """Returns how many sequences of a worker the other decode workers have room for.

        A sequence is taken to need as much KV cache as the mean of the worker's sequences.
        """
        free = self.capacity.pool(_DECODE).free_without(worker_id)
        worker = self._workers.get(worker_id)
        used = NO_CAPACITY if worker is None else worker.own + worker.others
        if not used.kv_tokens:
            return free.sequences
        return min(free.sequences, free.kv_tokens * used.sequences // used.kv_tokens)

    def place(
        self,
        request: TokenRequest,
        avoid: Collection[str] = (),
        *,
        prefill: str | None = None,
        colocated: bool = False,
        is_recovery: bool = False,
    ) -> Placement | None:
        """Chooses the workers of an attempt, none of them in `avoid`.

        `prefill`: the worker that already holds the KV cache. `colocated`: one worker does prefill
        and decode. `is_recovery`: the worker computes the prompt before all others except prompts
        of other recoveries; so neither its queue nor its estimated speed count, and the worker with
        the most cached tokens wins. Without a decode worker, a prefill worker does both.

        Returns None if there is no worker, or no decode worker that can continue after `prefill`.
        """
        matched = self._look_up(request).matched
        if prefill is not None:  # it may decode by now, and cannot fetch from itself
            avoid = {*avoid, prefill}
        find = partial(self._candidates, matched, request.affinity, avoid, is_recovery=is_recovery)
        sources: list[Candidate] = []
        local_tokens = 0
        if prefill is not None:
            # The worker may have left the directory already, and still hold the KV cache.
            sources = [
                Candidate(worker_id=prefill, pending_tokens=0, num_requests=0, free_tokens=0)
            ]
        elif not colocated:
            sources = find(_PREFILL, computes=True)
            local_tokens = self._local_prefill_tokens
        decode = find(_DECODE, computes=not sources)
        if not decode and prefill is None:
            decode, sources = sources or find(_PREFILL, computes=True), []
        return place(
            required_capacity(request, self.capacity.cost),
            sources,
            decode,
            self._rng,
            local_prefill_tokens=local_tokens,
            affinity=request.affinity,
        )

    def find_holder(self, request: TokenRequest, prefill: str) -> worker_pb2.PrefixHolder | None:
        """Returns the decode worker from which the prefill worker should fetch a cached prefix.

        Returns None if the prefill worker should compute the prompt instead. Call it before
        `dispatched`.
        """
        worker = self._workers.get(prefill)
        if worker is None:
            return None
        matched = self._last_look_up(request).matched
        holders = matched.longest(_DECODE, MAX_CANDIDATES, self._rng)
        decode = self.capacity.pool(_DECODE)
        others = [
            worker_id
            for worker_id, _ in holders
            if (other := self._workers[worker_id]).takes_requests
            and other.info.address
            and other.info.layout == worker.info.layout
        ]
        (own,) = self.capacity.pool(worker.info.role).candidates([prefill], matched)
        chosen = choose_holder(
            len(request.submit.token_ids), own, decode.candidates(others, matched)
        )
        if chosen is None:
            return None
        info = self._workers[chosen.worker_id].info
        return worker_pb2.PrefixHolder(
            address=info.address, num_tokens=chosen.matched_tokens, block_size=info.block_size
        )

    def dispatched(
        self,
        worker_id: str,
        request: TokenRequest,
        num_tokens: int,
        *,
        decodes: bool = False,
        is_recovery: bool = False,
        fetched_tokens: int = 0,
    ) -> None:
        """Counts a request that was sent to a worker.

        The worker computes `num_tokens` of the prompt, except cached ones and the first
        `fetched_tokens`, which it fetches from a holder. `decodes`: a prefill worker also decodes.
        `is_recovery`: as for `place`. Call it for the decode worker last, because that releases the
        reservation of the request.
        """
        worker = self._workers.get(worker_id)
        decodes |= worker is None or worker.info.role == _DECODE
        if worker is not None:
            _, prefix, matched = self._last_look_up(request)
            cached_tokens = matched.num_tokens(worker_id)
            used = used_capacity(
                request,
                num_tokens,
                cached_tokens,
                fetched_tokens,
                decodes=decodes,
                cost=worker.cost,
            )
            worker.add(request.request_id, used, prefix, is_recovery=is_recovery)
            if used.prompt_tokens:
                cost = self._speeds.prefill_cost(worker.info.role, worker_id)
                self.prefill_tokens += used.uncached_tokens
                self.prefill_seconds += cost.seconds(used.uncached_tokens)
            self._prefixes.expect(worker_id, prefix)
            self.capacity.recount(worker)
        if decodes:
            self.capacity.release(request.request_id)
            self.capacity.notify()  # the reservation did not account for cached tokens

    def prefilled(self, worker_id: str, request_id: str) -> None:
        """Counts the prompt of a request as computed; the request is still on the worker."""
        if worker := self._workers.get(worker_id):
            worker.prefilled(request_id)
            self.capacity.recount(worker)

    def ended(self, worker_id: str, request_id: str) -> None:
        """Removes a request from a worker. Idempotent."""
        worker = self._workers.get(worker_id)
        if worker and (prefix := worker.remove(request_id)):
            self._prefixes.settle(worker_id, prefix)
            self.capacity.recount(worker)

    def _take_load(self, worker: WorkerState, load: worker_pb2.WorkerLoad) -> None:
        """Applies a load from the directory, unless the known load is the same or newer."""
        if load.version > worker.load.version:
            worker.report(load)

    def _reset_cache(self, info: worker_pb2.WorkerInfo) -> None:
        cost = KvCost.of(info)
        self._prefixes.add(
            info.worker_id,
            cost.block_size,
            info.load.total_blocks,
            pool=info.role,
            stride=cost.report_blocks,
            is_sparse=cost.has_sparse_points,
        )

    def _remove(self, worker_id: str) -> None:
        worker = self._workers.pop(worker_id)
        self.capacity.remove(worker)
        self._prefixes.remove(worker_id)
        self._speeds.forget(worker)

    def _look_up(self, request: TokenRequest) -> _Lookup:
        prefix = Prefix(request.submit.token_ids[:], request.prefix_salt)
        self._last_lookup = _Lookup(request, prefix, self._prefixes.match(prefix))
        return self._last_lookup

    def _last_look_up(self, request: TokenRequest) -> _Lookup:
        found = self._last_lookup
        return found if found is not None and found.request is request else self._look_up(request)

    def _candidates(
        self,
        matched: Matches,
        affinity: str,
        avoid: Collection[str],
        role: "worker_pb2.Role",
        *,
        computes: bool,
        is_recovery: bool,
    ) -> list[Candidate]:
        pool = self.capacity.pool(role)
        found = pool.select(
            matched, avoid, computes=computes, is_recovery=is_recovery, affinity=affinity
        )
        candidates = pool.candidates(found, matched)
        return [self._ahead(each) for each in candidates] if is_recovery else candidates

    def _ahead(self, candidate: Candidate) -> Candidate:
        """Returns the candidate as seen by a request that jumps its queue."""
        pending = self._workers[candidate.worker_id].ahead_tokens
        return candidate._replace(pending_tokens=pending, num_pending=0, prefill=NEUTRAL_PREFILL)
