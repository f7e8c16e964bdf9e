"""What a router knows of the workers: the directory's last word, what they report, what they were seen to do, and what
was sent there since."""

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from ...proto import worker_pb2
from ..request import TokenRequest
from .policy import NEUTRAL_PREFILL, NEUTRAL_STEP_SECONDS, NEUTRAL_TRANSFER, Candidate, Demand, Placement, place
from .prefix_index import Prefix, PrefixIndex
from .rates import LinearCost, Rates
from .worker_state import Capacity, DispatchedRequest, WorkerState, growth_tokens, num_sequences, usage_of

_UNKNOWN_TOKEN_BYTES: Final = 32_768
_PREFILL: Final = worker_pb2.ROLE_PREFILL
_DECODE: Final = worker_pb2.ROLE_DECODE
_OTHER: Final = {_PREFILL: _DECODE, _DECODE: _PREFILL}


@dataclass(slots=True)
class _Placing:
    """A request on its way, whose prompt is hashed once and sought in the index once a placement."""

    request: TokenRequest
    prefix: Prefix
    matched: dict[str, int]  # tokens of the prompt that are cached, by worker


class WorkerRegistry:
    """The workers as this router sees them. The last view stays when the directory is away.

    Of a request the view is told in this order: `place`, `sent` for each worker, `computed`, `ended` for each worker;
    whoever admitted it before it was placed says `reserve`, and `unreserve` when it is over.
    """

    def __init__(
        self,
        *,
        local_prefill_tokens: int = 0,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`local_prefill_tokens`: prompts of which a decode worker lacks no more may be computed there."""
        self._local_prefill_tokens = local_prefill_tokens
        self._rng = rng or random.Random()
        self._workers: dict[str, WorkerState] = {}
        self._prefixes = PrefixIndex()
        self._prefill_rates = {role: Rates(NEUTRAL_PREFILL, typical=512, clock=clock) for role in (_PREFILL, _DECODE)}
        self._transfer_rates = Rates(NEUTRAL_TRANSFER, typical=2**24, clock=clock)
        self._rooms = {_PREFILL: Capacity(), _DECODE: Capacity()}
        self._reserved: dict[str, Capacity] = {}
        self._all_reserved = Capacity()
        self._placing: _Placing | None = None  # the last one
        self._on_room: Callable[[], object] = lambda: None

    # --- what the directory and the workers say ----------------------------------------------------------------------

    def update(self, workers: Iterable[worker_pb2.WorkerInfo]) -> None:
        """Takes the directory's whole list. A worker of a new epoch begins anew."""
        listed = {info.worker_id: info for info in workers if info.role in self._rooms}
        for worker_id in list(self._workers):
            if worker_id not in listed or listed[worker_id].epoch != self._workers[worker_id].info.epoch:
                self._forget(worker_id)
        for worker_id, info in listed.items():
            known = self._workers.get(worker_id)
            if known is None:
                known = self._workers[worker_id] = WorkerState(info)
                known.report(info.load)
                self._prefixes.add(worker_id, max(info.block_size, 1), info.load.total_blocks)
            elif info.load != known.info.load:  # else it is only repeated, and a session may have said more since
                known.report(info.load)
            known.info = info
            self._recount(known)
        self._on_room()

    def report_load(self, worker_id: str, load: worker_pb2.Load) -> None:
        """A worker's session said how busy it is; newer than any heartbeat."""
        if known := self._workers.get(worker_id):
            known.report(load)
            self._recount(known)

    def report_cache(self, worker_id: str, epoch: int, stored: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """A worker's session said what came into its prefix cache and what went. Of another life of it: ignored."""
        if self._lives(worker_id, epoch):
            self._prefixes.report(worker_id, stored, evicted)

    def lost_session(self, worker_id: str, epoch: int) -> None:
        """Nobody reports the worker's cache any more; the next session begins with the whole of it."""
        if self._lives(worker_id, epoch):
            info = self._workers[worker_id].info
            self._prefixes.add(worker_id, max(info.block_size, 1), info.load.total_blocks)

    def measured(self, worker_id: str, *, prefill_tokens: int, prefill_seconds: float) -> None:
        """A worker computed so many tokens of a prompt, those it had cached not counted, in so long."""
        if known := self._workers.get(worker_id):
            self._prefill_rates[known.info.role].observe(worker_id, prefill_tokens, prefill_seconds)
            self._recount(known)

    def transferred(self, prefill_worker: str, decode_worker: str, num_bytes: int, seconds: float) -> None:
        """KV cache went from one worker to another in so long. Counts for both: a pair is as fast as its slower end."""
        for worker_id in (prefill_worker, decode_worker):
            if worker_id in self._workers:
                self._transfer_rates.observe(worker_id, num_bytes, seconds)

    def workers(self) -> list[worker_pb2.WorkerInfo]:
        """All workers known, as the directory last described them."""
        return [known.info for known in self._workers.values()]

    def get(self, worker_id: str) -> worker_pb2.WorkerInfo | None:
        """One worker, if it is known."""
        known = self._workers.get(worker_id)
        return known.info if known else None

    # --- the way of a request ----------------------------------------------------------------------------------------

    def place(self, request: TokenRequest, avoid: Collection[str] = ()) -> Placement | None:
        """Chooses the workers of an attempt, none of those in `avoid`. None if no decode worker is left."""
        placing = self._placing = self._look_up(request)
        prefill = self._candidates(_PREFILL, avoid, placing.matched)
        decode = self._candidates(_DECODE, avoid, placing.matched)
        demand = Demand(num_tokens=len(request.prompt), num_sequences=num_sequences(request))
        if decode:
            info = self._workers[decode[0].worker_id].info
            demand = replace(demand, token_bytes=info.kv_bytes_per_token or _UNKNOWN_TOKEN_BYTES)
        return place(demand, prefill, decode, self._rng, local_prefill_tokens=self._local_prefill_tokens)

    def sent(self, worker_id: str, request: TokenRequest, num_tokens: int) -> None:
        """The request was dispatched; `num_tokens` of its prompt are to be computed there, less what is cached. The
        decode worker is told last: with it, what was reserved is spent."""
        known = self._workers.get(worker_id)
        decodes = known is None or known.info.role == _DECODE
        if known is not None:
            placing = self._placing
            if placing is None or placing.request is not request:
                placing = self._look_up(request)
            cached = placing.matched.get(worker_id, 0)
            usage = usage_of(request, num_tokens=num_tokens, cached_tokens=cached, decodes=decodes)
            known.put(request.request_id, DispatchedRequest(usage, placing.prefix))
            self._prefixes.expect(worker_id, placing.prefix)
            self._recount(known)
        if decodes:
            self.unreserve(request.request_id)
            self._on_room()  # what was reserved did not count what is cached

    def computed(self, worker_id: str, request_id: str) -> None:
        """The prompt has been computed; the request is still there."""
        if known := self._workers.get(worker_id):
            known.computed(request_id)
            self._recount(known)

    def ended(self, worker_id: str, request_id: str) -> None:
        """The request has left the worker."""
        known = self._workers.get(worker_id)
        if known and (sent := known.take(request_id)):
            self._prefixes.settle(worker_id, sent.prefix)
            self._recount(known)

    # --- room, for whoever admits requests ---------------------------------------------------------------------------

    def room(self) -> Capacity | None:
        """What all workers have left, less what is reserved. None without a decode worker that takes requests. The
        prompts are computed by the decode workers if there is no prefill worker."""
        prefill, decode = self._rooms[_PREFILL], self._rooms[_DECODE]
        if not decode.workers:
            return None
        return (
            replace(decode, prompt_tokens=(prefill if prefill.workers else decode).prompt_tokens) - self._all_reserved
        )

    def largest(self) -> Capacity | None:
        """What a single decode worker has when it is empty, at most. None without one that takes requests."""
        found = [known.size for known in self._workers.values() if known.info.role == _DECODE]
        if not found:
            return None
        return Capacity(
            sequences=max(size.sequences for size in found), kv_tokens=max(size.kv_tokens for size in found)
        )

    def reserve(self, request: TokenRequest) -> None:
        """The request takes its part of the room before it is sent; `sent` ends that, or `unreserve`."""
        self.unreserve(request.request_id)
        room = needed_room(request)
        self._reserved[request.request_id] = room
        self._all_reserved += room

    def unreserve(self, request_id: str) -> None:
        """Idempotent."""
        if room := self._reserved.pop(request_id, None):
            self._all_reserved -= room

    def subscribe(self, on_room: Callable[[], object]) -> None:
        """Calls `on_room` whenever there may be more room than before."""
        self._on_room = on_room

    def least_prefill_seconds(self) -> float:
        """How long the fastest worker takes for the shortest prompt; 0 before anything was measured."""
        rates = self._prefill_rates[_PREFILL]
        return rates.best().seconds(1) if rates.known else 0.0

    # -----------------------------------------------------------------------------------------------------------------

    def _lives(self, worker_id: str, epoch: int) -> bool:
        return worker_id in self._workers and self._workers[worker_id].info.epoch == epoch

    def _forget(self, worker_id: str) -> None:
        known = self._workers.pop(worker_id)
        self._rooms[known.info.role] -= known.room
        self._prefixes.forget(worker_id)
        self._prefill_rates[known.info.role].forget(worker_id)
        self._transfer_rates.forget(worker_id)

    def _recount(self, known: WorkerState) -> None:
        before = known.room
        known.room = known.measure_room(self._prefill_line(known).each)
        self._rooms[known.info.role] += known.room - before
        if known.room.exceeds(before):
            self._on_room()

    def _look_up(self, request: TokenRequest) -> _Placing:
        prefix = Prefix(request.prompt, request.cache_salt)
        return _Placing(request, prefix, self._prefixes.match(prefix))

    def _prefill_line(self, known: WorkerState) -> LinearCost:
        """Of a pool that has never computed a prompt it is taken that it is as fast as the other."""
        own, other = self._prefill_rates[known.info.role], self._prefill_rates[_OTHER[known.info.role]]
        return own.line(known.info.worker_id) if own.known else other.best()

    def _candidates(
        self, role: "worker_pb2.Role", avoid: Collection[str], matched: Mapping[str, int]
    ) -> list[Candidate]:
        found = [
            known
            for worker_id, known in self._workers.items()
            if known.info.role == role and not known.info.draining and worker_id not in avoid
        ]
        steps = [known.load.step_seconds for known in found if known.load.step_seconds]
        step_seconds = min(steps, default=NEUTRAL_STEP_SECONDS)
        return [self._candidate(known, matched, step_seconds) for known in found]

    def _candidate(self, known: WorkerState, matched: Mapping[str, int], step_seconds: float) -> Candidate:
        info = known.info
        return Candidate(
            worker_id=info.worker_id,
            pending_tokens=known.pending_tokens,
            num_pending=known.own.pending + known.others.pending,
            num_requests=known.own.sequences + known.others.sequences,
            free_tokens=known.free_tokens,
            matched_tokens=matched.get(info.worker_id, 0),
            max_sequences=info.max_sequences,
            mixed_chunk_tokens=info.mixed_chunk_tokens,
            prefill=self._prefill_line(known),
            transfer=self._transfer_rates.line(info.worker_id),
            step_seconds=known.load.step_seconds or step_seconds,
        )


def needed_room(request: TokenRequest) -> Capacity:
    """What a request takes of the pools' room, if nothing of its prompt is cached."""
    num_tokens = len(request.prompt)
    return Capacity(
        sequences=num_sequences(request), kv_tokens=num_tokens + growth_tokens(request), prompt_tokens=num_tokens
    )
