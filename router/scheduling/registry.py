"""Tracks the workers for a router: what the directory lists, what they report, how fast they were
observed to be, and what this router has dispatched since. Other routers are known only by what the
workers report.
"""

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

from ...proto import worker_pb2
from ..request import TokenRequest
from .capacity import (
    NO_CAPACITY,
    UNBOUNDED,
    Capacity,
    PrefillWork,
    required_capacity,
    used_capacity,
)
from .free_capacity import FreeCapacity
from .policy import (
    NEUTRAL_PREFILL,
    NEUTRAL_STEP_SECONDS,
    NEUTRAL_TRANSFER,
    Candidate,
    Placement,
    choose_holder,
    place,
)
from .prefix_index import Prefix, PrefixIndex
from .rates import LinearCost, Rates
from .worker_state import WorkerState

_DEFAULT_TOKEN_BYTES: Final = 32_768
_LEAST_SECONDS: Final = 1e-9
_PREFILL: Final = worker_pb2.ROLE_PREFILL
_DECODE: Final = worker_pb2.ROLE_DECODE
_OTHER: Final = {_PREFILL: _DECODE, _DECODE: _PREFILL}


class WorkerRegistry:
    """Holds the workers as this router sees them. The last snapshot stays when the directory is
    away.

    For each attempt of a request call, in this order: `place`, `dispatched` for each worker,
    `prefilled`, `ended` for each worker. Whoever admits requests before they are placed calls
    `reserve`, and `release` when the request is over.
    """

    def __init__(
        self,
        *,
        local_prefill_tokens: int = 0,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`local_prefill_tokens`: a prompt of which a decode worker lacks no more tokens may be
        computed there.
        """
        self.prefill_work = PrefillWork()
        self.absence = "no worker is ready"  # what a request is told for which there is none
        self.on_reach: Callable[[], object] = lambda: (
            None
        )  # called after a worker was lost, or found again
        self._local_prefill_tokens = local_prefill_tokens
        self._rng = rng or random.Random()
        self._workers: dict[str, WorkerState] = {}
        self._prefixes = PrefixIndex()
        self._prefill_rates = {
            role: Rates(NEUTRAL_PREFILL, typical=512, clock=clock) for role in (_PREFILL, _DECODE)
        }
        self._transfer_rates = Rates(NEUTRAL_TRANSFER, typical=2**24, clock=clock)
        self._free = FreeCapacity((_PREFILL, _DECODE), self._token_seconds)
        self._reserved: dict[str, Capacity] = {}
        self._total_reserved = NO_CAPACITY
        # Of the last placement, so that a prompt is hashed and looked up once: request, prefix,
        # matched tokens by worker.
        self._looked_up: tuple[TokenRequest, Prefix, dict[str, int]] | None = None

    def update(self, workers: Iterable[worker_pb2.WorkerInfo]) -> None:
        """Takes over the directory's whole list. A worker of a new epoch starts empty."""
        known, listed = self._workers, set()
        for info in workers:
            if info.role not in _OTHER:
                continue
            worker_id = info.worker_id
            listed.add(worker_id)
            worker = known.get(worker_id)
            if worker is not None and worker.info.epoch != info.epoch:
                self._remove(worker_id)
                worker = None
            if worker is None:
                worker = known[worker_id] = WorkerState(info)
                worker.report(info.load)
                total_blocks = info.load.total_blocks
                self._prefixes.add(worker_id, max(info.block_size, 1), total_blocks)
            else:
                worker.info = info
                self._take_load(worker, info.load)
            self._free.recount(worker)
        for worker_id in known.keys() - listed:
            self._remove(worker_id)
        self._free.notify()

    def update_loads(self, workers: Iterable[worker_pb2.WorkerInfo]) -> None:
        """Takes over the loads of listed workers from the directory; of each message only id,
        epoch and load count."""
        for info in workers:
            worker = self._workers.get(info.worker_id)
            if worker is not None and worker.info.epoch == info.epoch:
                self._take_load(worker, info.load)
                self._free.recount(worker)

    def _take_load(self, worker: WorkerState, load: worker_pb2.WorkerLoad) -> None:
        """Takes over a load from the directory, unless a session has reported the same or a
        newer one."""
        if load.version > worker.load.version:
            worker.report(load)

    def report(self, worker_id: str, epoch: int, message: worker_pb2.SessionResponse) -> None:
        """Takes over what a worker's session reports of its load and prefix cache; ignored from
        another epoch.
        """
        worker = self._workers.get(worker_id)
        if worker is None or worker.info.epoch != epoch:
            return
        if message.HasField("load"):
            worker.report(message.load)
        if message.HasField("load") or worker.is_lost:
            was_lost, worker.is_lost = worker.is_lost, False
            self._free.recount(worker)
            if was_lost:
                self.on_reach()
        if message.stored_blocks or message.evicted_blocks:
            self._prefixes.report(worker_id, message.stored_blocks, message.evicted_blocks)

    def session_lost(self, worker_id: str, epoch: int) -> None:
        """Places nothing on the worker until a session reports something again, or it comes back in
        another epoch. Its
        heartbeats count for nothing: the last of a dead worker arrive after its end. Empties its
        prefix cache; the next session begins with the whole of it.
        """
        worker = self._workers.get(worker_id)
        if worker is not None and worker.info.epoch == epoch:
            worker.is_lost = True
            self._free.recount(worker)
            self._prefixes.add(
                worker_id, max(worker.info.block_size, 1), worker.info.load.total_blocks
            )
            self.on_reach()

    def record_prefill(self, worker_id: str, num_tokens: int, seconds: float) -> None:
        """Records that a worker computed so many uncached tokens of a prompt in `seconds`."""
        if worker := self._workers.get(worker_id):
            self._prefill_rates[worker.info.role].observe(worker_id, num_tokens, seconds)
            self._free.recount(worker)

    def record_transfer(
        self, prefill_worker: str, decode_worker: str, num_bytes: int, seconds: float
    ) -> None:
        """Records a KV transfer. It counts for both workers: a pair is as fast as its slower end."""
        for worker_id in (prefill_worker, decode_worker):
            if worker_id in self._workers:
                self._transfer_rates.observe(worker_id, num_bytes, seconds)

    def workers(self) -> list[worker_pb2.WorkerInfo]:
        """Returns all workers, as the directory last described them."""
        return [worker.info for worker in self._workers.values()]

    def loads(self) -> list[tuple[worker_pb2.WorkerInfo, worker_pb2.WorkerLoad, str]]:
        """Returns all workers with their last report, and whether they are ready, draining or lost."""
        return [(worker.info, worker.load, worker.state) for worker in self._workers.values()]

    def get(self, worker_id: str) -> worker_pb2.WorkerInfo | None:
        """Returns one worker; None if it is not listed."""
        worker = self._workers.get(worker_id)
        return worker.info if worker else None

    def is_lost(self, worker_id: str, epoch: int) -> bool:
        """Returns whether that worker is listed, and its last session has broken; see
        `session_lost`.
        """
        worker = self._workers.get(worker_id)
        return worker is not None and worker.info.epoch == epoch and worker.is_lost

    @property
    def has_lost(self) -> bool:
        """Whether some worker is listed whose last session has broken; see `session_lost`."""
        return any(worker.is_lost for worker in self._workers.values())

    @property
    def reaches_decode(self) -> bool:
        """Whether a decode worker is listed that is not lost; see `session_lost`."""
        return any(
            worker.info.role == _DECODE and not worker.is_lost for worker in self._workers.values()
        )

    def has_other(self, worker_id: str) -> bool:
        """Returns whether a decode worker other than this one takes requests."""
        return any(
            worker.info.role == _DECODE and worker.takes_requests and other_id != worker_id
            for other_id, worker in self._workers.items()
        )

    def place(
        self,
        request: TokenRequest,
        avoid: Collection[str] = (),
        *,
        prefill: str | None = None,
        whole: bool = False,
        is_resumed: bool = False,
    ) -> Placement | None:
        """Chooses the workers of an attempt, none of those in `avoid`. `prefill`, if given, is the
        worker that holds the KV cache already; `whole` asks for one worker that does all. Without a
        decode worker a prefill worker does
        all. `is_resumed`: no prompt at a worker is computed before it but those of others that go
        ahead, as of streams that were interrupted; so neither the rest of a queue nor what is
        guessed of the worker's speed keeps it from the one that has most of it cached. None if
        there is neither, or if no decode worker can take over from `prefill`.
        """
        _, _, matched = self._look_up(request)
        decode = self._candidates(_DECODE, avoid, matched)
        if prefill is None and (whole or not decode):
            decode, sources = decode or self._candidates(_PREFILL, avoid, matched), []
            local_tokens = 0
        elif prefill is None:
            sources, local_tokens = (
                self._candidates(_PREFILL, avoid, matched),
                self._local_prefill_tokens,
            )
        else:  # it may have left the directory already, and still hold the KV cache
            sources, local_tokens = (
                [Candidate(worker_id=prefill, pending_tokens=0, num_requests=0, free_tokens=0)],
                0,
            )
        if is_resumed:
            sources, decode = list(map(self._ahead, sources)), list(map(self._ahead, decode))
        return place(
            required_capacity(request),
            sources,
            decode,
            self._rng,
            local_prefill_tokens=local_tokens,
        )

    def find_holder(self, request: TokenRequest, prefill: str) -> worker_pb2.PrefixHolder | None:
        """Returns the decode worker that has more of the prompt cached than the prefill worker, if
        that one is to fetch it rather than to compute it. Call it before `dispatched`.
        """
        worker = self._workers.get(prefill)
        if worker is None:
            return None
        _, _, matched = self._last_look_up(request)
        others = [
            self._candidate(other, matched, NEUTRAL_STEP_SECONDS)
            for worker_id in matched
            if (other := self._workers[worker_id]).info.role == _DECODE
            and other.takes_requests
            and other.info.address
            and other.info.layout == worker.info.layout
        ]
        chosen = choose_holder(
            len(request.submit.token_ids),
            self._candidate(worker, matched, NEUTRAL_STEP_SECONDS),
            others,
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
        is_resumed: bool = False,
        fetched_tokens: int = 0,
    ) -> None:
        """Counts a request that is dispatched to the worker, which is to compute `num_tokens` of
        its prompt, less what it has cached or is to fetch from a holder of the first
        `fetched_tokens`; `decodes` says so of a prefill worker, `is_resumed` is as for `place`.
        Call it for the decode worker last: that releases what was reserved for the request.
        """
        worker = self._workers.get(worker_id)
        decodes |= worker is None or worker.info.role == _DECODE
        if worker is not None:
            _, prefix, matched = self._last_look_up(request)
            cached_tokens = matched.get(worker_id, 0)
            used = used_capacity(
                request, num_tokens, cached_tokens, fetched_tokens, decodes=decodes
            )
            worker.add(request.request_id, used, prefix, is_resumed=is_resumed)
            if used.prompt_tokens:
                self.prefill_work.add(
                    used.uncached_tokens, self._prefill_cost(worker).seconds(used.uncached_tokens)
                )
            self._prefixes.expect(worker_id, prefix)
            self._free.recount(worker)
        if decodes:
            self.release(request.request_id)
            self._free.notify()  # what was reserved did not take account of what is cached

    def prefilled(self, worker_id: str, request_id: str) -> None:
        """Counts the prompt of a request as computed; the request is still on the worker."""
        if worker := self._workers.get(worker_id):
            worker.prefilled(request_id)
            self._free.recount(worker)

    def ended(self, worker_id: str, request_id: str) -> None:
        """Counts the request on that worker no more. Idempotent."""
        worker = self._workers.get(worker_id)
        if worker and (prefix := worker.remove(request_id)):
            self._prefixes.settle(worker_id, prefix)
            self._free.recount(worker)

    def free(self, num_tokens: int = UNBOUNDED) -> Capacity | None:
        """Returns what all workers have free for a prompt of so many tokens, less what is reserved.
        None without a worker that takes requests. Where a pool has none, the other does its work.
        """
        prefill, decode = self._free.of(_PREFILL), self._free.of(_DECODE)
        if not decode.workers:
            decode = prefill
        if not decode.workers:
            return None
        prompt_tokens = (prefill if prefill.workers else decode).prompt_tokens
        if self.may_skip_prefill(num_tokens):
            prompt_tokens = max(prompt_tokens, decode.prompt_tokens)
        return decode._replace(prompt_tokens=prompt_tokens) - self._total_reserved

    def may_skip_prefill(self, num_tokens: int) -> bool:
        """Returns whether a decode worker may compute a prompt of so many tokens, whatever it has
        cached.
        """
        return num_tokens <= self._local_prefill_tokens

    def largest(self) -> Capacity | None:
        """Returns the sequences and KV cache of the largest decode workers when empty. None without
        one.
        """
        sizes = [worker.size for worker in self._workers.values() if worker.info.role == _DECODE]
        if not sizes:
            return None
        return Capacity(
            sequences=max(size.sequences for size in sizes),
            kv_tokens=max(size.kv_tokens for size in sizes),
        )

    def reserve(self, request: TokenRequest) -> None:
        """Reserves what the request needs until it is dispatched, or until `release`."""
        self.release(request.request_id)
        needed = required_capacity(request)
        self._reserved[request.request_id] = needed
        self._total_reserved += needed

    def release(self, request_id: str) -> None:
        """Ends a reservation. Idempotent."""
        if reserved := self._reserved.pop(request_id, None):
            self._total_reserved -= reserved

    def subscribe(self, on_free: Callable[[], object]) -> Callable[[], None]:
        """Calls `on_free` whenever there may be more free capacity than before; returns what ends
        that.
        """
        return self._free.subscribe(on_free)

    def prefill_queue(self) -> LinearCost:
        """Returns the seconds until the workers that compute prompts have computed all that they
        have, and for each token of this router's prompts more. Of these as much is taken to be
        cached as of those before, and other routers to have as many for each of theirs as of the
        sequences at workers.
        """
        pool = self._computing
        if not pool:
            return LinearCost(fixed=0.0, each=0.0)
        token_seconds = 1 / sum(1 / self._token_seconds(worker) for worker in pool)
        uncached_rate = self.uncached_rate
        own = sum(worker.own.sequences for worker in self._workers.values())
        others = sum(worker.others.sequences for worker in self._workers.values())
        num_tokens = (
            sum(worker.pending_tokens for worker in pool)
            + uncached_rate * self._total_reserved.prompt_tokens
        )
        return LinearCost(
            fixed=num_tokens * token_seconds,
            each=uncached_rate * token_seconds * (1 + others / max(own, 1)),
        )

    @property
    def uncached_rate(self) -> float:
        """The part of a prompt that is not cached where prompts are computed: the mean of the
        workers'.
        """
        rates = [worker.uncached_rate for worker in self._computing]
        return sum(rates) / len(rates) if rates else 1.0

    @property
    def _computing(self) -> list[WorkerState]:
        """The workers that prompts are sent to."""
        role = _PREFILL if self._free.of(_PREFILL).workers else _DECODE
        return [
            worker
            for worker in self._workers.values()
            if worker.info.role == role and worker.takes_requests
        ]

    def least_prefill_seconds(self) -> float:
        """Returns how long the fastest worker takes for the shortest prompt; 0 before anything was
        measured.
        """
        rates = self._prefill_rates[_PREFILL]
        return rates.best().seconds(1) if rates.known else 0.0

    def _remove(self, worker_id: str) -> None:
        worker = self._workers.pop(worker_id)
        self._free.remove(worker)
        self._prefixes.remove(worker_id)
        self._prefill_rates[worker.info.role].forget(worker_id)
        self._transfer_rates.forget(worker_id)

    def _look_up(self, request: TokenRequest) -> tuple[TokenRequest, Prefix, dict[str, int]]:
        prefix = Prefix(request.submit.token_ids[:], request.prefix_salt)
        self._looked_up = request, prefix, self._prefixes.match(prefix)
        return self._looked_up

    def _last_look_up(self, request: TokenRequest) -> tuple[TokenRequest, Prefix, dict[str, int]]:
        found = self._looked_up
        return found if found is not None and found[0] is request else self._look_up(request)

    def _token_seconds(self, worker: WorkerState) -> float:
        """Returns the seconds of each prompt token while a worker has many, as it reports them."""
        return max(
            worker.load.prompt_token_seconds or self._prefill_cost(worker).each, _LEAST_SECONDS
        )

    def _prefill_cost(self, worker: WorkerState) -> LinearCost:
        """Returns the cost of a prompt; a role without observations is taken to be as fast as the
        other.
        """
        own, other = (
            self._prefill_rates[worker.info.role],
            self._prefill_rates[_OTHER[worker.info.role]],
        )
        return own.cost(worker.info.worker_id) if own.known else other.best()

    def _candidates(
        self, role: "worker_pb2.Role", avoid: Collection[str], matched: Mapping[str, int]
    ) -> list[Candidate]:
        found = [
            worker
            for worker_id, worker in self._workers.items()
            if worker.info.role == role and worker.takes_requests and worker_id not in avoid
        ]
        steps = [worker.load.step_seconds for worker in found if worker.load.step_seconds]
        step_seconds = min(steps, default=NEUTRAL_STEP_SECONDS)
        return [self._candidate(worker, matched, step_seconds) for worker in found]

    def _ahead(self, candidate: Candidate) -> Candidate:
        """Returns the worker as one finds it that goes ahead of what waits there."""
        worker = self._workers.get(candidate.worker_id)
        pending = 0 if worker is None else worker.ahead_tokens
        return replace(candidate, pending_tokens=pending, num_pending=0, prefill=NEUTRAL_PREFILL)

    def _candidate(
        self, worker: WorkerState, matched: Mapping[str, int], step_seconds: float
    ) -> Candidate:
        info = worker.info
        return Candidate(
            worker_id=info.worker_id,
            pending_tokens=worker.pending_tokens,
            num_pending=worker.own.prompts + worker.others.prompts,
            num_requests=worker.own.sequences + worker.others.sequences,
            free_tokens=worker.free_tokens,
            matched_tokens=matched.get(info.worker_id, 0),
            max_sequences=info.max_sequences,
            mixed_chunk_tokens=info.mixed_chunk_tokens,
            token_bytes=(info.kv_bytes_per_token or _DEFAULT_TOKEN_BYTES),
            prefill=self._prefill_cost(worker),
            transfer=self._transfer_rates.cost(info.worker_id),
            step_seconds=worker.load.step_seconds or step_seconds,
        )
