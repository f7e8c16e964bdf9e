"""Sums up and orders the workers of one role, so that no request scans them.

A placement considers a bounded number of workers: those with the least predicted time of a typical
request, those with the most free KV cache, those that hold the beginning of the prompt, and two
random ones. So it costs the same with 20 workers and with 1,000. A worker whose estimates are old,
for instance because it was slow, is tried again as a random one.
"""

import heapq
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from ...proto import worker_pb2
from .capacity import NO_CAPACITY, Capacity
from .policy import NEUTRAL_STEP_SECONDS, NO_LOAD, Candidate, Load, affinity_rank, measure_load
from .prefix_index import Matches
from .ranking import WorkerRanking
from .speeds import WorkerSpeeds
from .worker_state import WorkerState

_NUM_LEAST_LOADED: Final = 8
_NUM_ROOMIEST: Final = 2
_NUM_HOLDERS: Final = 8
_NUM_RANDOM: Final = 2
_NUM_AFFINE: Final = 2
MAX_CANDIDATES: Final = _NUM_LEAST_LOADED + _NUM_ROOMIEST + _NUM_HOLDERS + _NUM_RANDOM
"""The workers that a placement considers; a pool with no more workers is considered whole."""

MAX_HOLDERS: Final = 32
"""The workers with the longest cached prefix, of which the `_NUM_HOLDERS` best are candidates."""

PER_UNIT: Final = 1_000_000
"""Rates are summed up in whole millionths: sums of floats would drift."""


_NUM_COUNTED_FIELDS: Final = Candidate._fields.index("matched_tokens")
_NO_CANDIDATE: Final = Candidate(worker_id="", pending_tokens=0, num_requests=0, free_tokens=0)


class Totals(NamedTuple):
    """Sums over a pool; the first four fields count only workers that take requests."""

    speed: int = 0  # prompt tokens per second of the measured workers, in millionths
    num_unmeasured: int = 0  # workers
    pending_tokens: int = 0  # of prompts
    uncached: int = 0  # uncached shares of prompts, in millionths
    own_sequences: int = 0  # of this router
    other_sequences: int = 0  # of other routers


class _Counted(NamedTuple):
    """The part of one worker in the sums."""

    free: Capacity = NO_CAPACITY
    totals: Totals = Totals()
    size: Capacity = NO_CAPACITY
    load: Load = NO_LOAD
    candidate: Candidate = _NO_CANDIDATE


class Pool:
    """Holds the workers of one role; each is counted again when it has changed."""

    def __init__(
        self,
        role: "worker_pb2.Role",
        workers: Mapping[str, WorkerState],
        speeds: WorkerSpeeds,
        rng: random.Random,
    ) -> None:
        """`workers`: the live map of the registry, with the workers of all roles."""
        self.free = NO_CAPACITY  # of the workers that take requests
        self.totals = Totals()
        self._role = role
        self._workers = workers
        self._speeds = speeds
        self._rng = rng
        self._counted: dict[str, _Counted] = {}
        self._sizes: Counter[Capacity] = Counter()
        # The workers that take requests.
        self._by_load = WorkerRanking(rng)
        self._by_room = WorkerRanking(rng)

    def count(self, worker: WorkerState) -> bool:
        """Counts a worker that has changed; returns True if more of its capacity is free."""
        counted = self._measure(worker)
        worker_id = worker.info.worker_id
        if worker.takes_requests:
            room = counted.free.kv_tokens if counted.free.sequences else 0
            self._by_load.put(worker_id, counted.load.seconds)
            self._by_room.put(worker_id, 1 / (1 + room))
        else:
            self._by_load.remove(worker_id)
            self._by_room.remove(worker_id)
        before = self._counted.get(worker_id, _Counted())
        self._counted[worker_id] = counted
        self._add(counted, before)
        return counted.free.exceeds(before.free)

    def remove(self, worker_id: str) -> None:
        """Removes a worker that has left. Idempotent."""
        if counted := self._counted.pop(worker_id, None):
            self._add(_Counted(), counted)
            self._by_load.remove(worker_id)
            self._by_room.remove(worker_id)

    def free_without(self, worker_id: str) -> Capacity:
        """Returns the free capacity of all workers except one."""
        return self.free - self._counted.get(worker_id, _Counted()).free

    def largest(self) -> Capacity | None:
        """Returns the most sequences and KV tokens of an empty worker; None without a worker."""
        if not self._sizes:
            return None
        return Capacity(
            sequences=max(size.sequences for size in self._sizes),
            kv_tokens=max(size.kv_tokens for size in self._sizes),
        )

    def select(
        self,
        matched: Matches,
        avoid: Collection[str] = (),
        *,
        computes: bool,
        is_recovery: bool = False,
        affinity: str = "",
    ) -> list[str]:
        """Returns the workers that a placement considers, none of them in `avoid`.

        `computes`: they compute the prompt, else they fetch its KV cache. `is_recovery`: the
        request jumps the queue, so the number of cached tokens decides among the holders.
        `affinity`: the workers that it prefers are considered; finding them takes 1 us for each
        worker.
        """
        if len(self._by_load) <= MAX_CANDIDATES:
            found = sorted(self._by_load.least(MAX_CANDIDATES))
        else:
            sampled = self._by_load.sample(_NUM_RANDOM)
            for worker_id in sampled:  # its estimates may be old
                self._by_load.put(worker_id, self._load(self._candidate(worker_id)).seconds)
            found = [
                *self._holders(matched, avoid, computes=computes, is_recovery=is_recovery),
                *self._by_load.least(_NUM_LEAST_LOADED, avoid),
                *self._by_room.least(_NUM_ROOMIEST, avoid),
                *sampled,
            ]
            if affinity and computes:
                ids = self._by_load.least(len(self._by_load), avoid)
                found += heapq.nlargest(_NUM_AFFINE, ids, partial(affinity_rank, affinity))
        return [each for each in dict.fromkeys(found) if each not in avoid]

    def candidates(self, worker_ids: Sequence[str], matched: Matches) -> list[Candidate]:
        """Returns workers as the policy sees them: as last counted, with their present speeds.

        A worker that has not reported the time of a step counts as fast as the fastest of them.
        """
        reported = [self._workers[worker_id].load.step_seconds for worker_id in worker_ids]
        least = min(filter(None, reported), default=NEUTRAL_STEP_SECONDS)
        return [
            self._candidate(worker_id, matched.num_tokens(worker_id), step_seconds or least)
            for worker_id, step_seconds in zip(worker_ids, reported, strict=True)
        ]

    def _holders(
        self, matched: Matches, avoid: Collection[str], *, computes: bool, is_recovery: bool
    ) -> list[str]:
        """Returns the best workers that hold the beginning of a prompt."""
        seconds: dict[str, float] = {}
        for worker_id, num_tokens in matched.longest(self._role, MAX_HOLDERS, self._rng):
            if worker_id in self._by_load and worker_id not in avoid:
                load = self._counted[worker_id].load
                saved = load.compute_token_seconds if computes else load.move_token_seconds
                own = 0.0 if is_recovery else load.seconds
                seconds[worker_id] = own - saved * num_tokens
        return heapq.nsmallest(_NUM_HOLDERS, seconds, key=seconds.__getitem__)

    def _candidate(
        self, worker_id: str, matched_tokens: int = 0, step_seconds: float | None = None
    ) -> Candidate:
        """Returns a worker as the policy sees it; `step_seconds` is as last counted by default."""
        counted = self._counted[worker_id].candidate
        # By position, because a placement does this 40 times and `_replace` takes twice as long.
        return Candidate._make(
            (
                *counted[:_NUM_COUNTED_FIELDS],
                matched_tokens,
                self._speeds.prefill_cost(self._role, worker_id),
                self._speeds.transfer.cost(worker_id),
                counted.step_seconds if step_seconds is None else step_seconds,
            )
        )

    def _measure(self, worker: WorkerState) -> _Counted:
        token_seconds = self._speeds.token_seconds(worker)
        takes = worker.takes_requests
        candidate = make_candidate(worker, self._speeds)
        is_measured = self._speeds.is_measured(worker)
        return _Counted(
            free=worker.measure_free(token_seconds),
            totals=Totals(
                speed=round(PER_UNIT / token_seconds) if takes and is_measured else 0,
                num_unmeasured=takes and not is_measured,
                pending_tokens=worker.pending_tokens if takes else 0,
                uncached=round(PER_UNIT * worker.uncached_rate) if takes else 0,
                own_sequences=worker.own.sequences,
                other_sequences=worker.others.sequences,
            ),
            size=worker.size,
            load=self._load(candidate),
            candidate=candidate,
        )

    def _load(self, candidate: Candidate) -> Load:
        return measure_load(candidate, computes=self._role == worker_pb2.ROLE_PREFILL)

    def _add(self, counted: _Counted, before: _Counted) -> None:
        """Replaces one part of the sums by another."""
        self.free += counted.free - before.free
        self.totals = Totals._make(
            total + new - old
            for total, new, old in zip(self.totals, counted.totals, before.totals, strict=True)
        )
        if counted.size != before.size:
            self._sizes[before.size] -= 1
            self._sizes[counted.size] += 1
            del self._sizes[NO_CAPACITY]  # of a worker that joins or leaves
            self._sizes = +self._sizes


def make_candidate(worker: WorkerState, speeds: WorkerSpeeds) -> Candidate:
    """Returns a worker as the policy sees it for a prompt of which it has nothing cached."""
    info, own, others = worker.info, worker.own, worker.others
    return Candidate(
        worker_id=info.worker_id,
        pending_tokens=worker.pending_tokens,
        num_pending=own.prompts + others.prompts,
        num_requests=own.sequences + others.sequences,
        free_tokens=worker.free_tokens,
        max_sequences=info.max_sequences,
        mixed_chunk_tokens=info.mixed_chunk_tokens,
        cost=worker.cost,
        prefill=speeds.prefill_cost(info.role, info.worker_id),
        transfer=speeds.transfer.cost(info.worker_id),
        step_seconds=worker.load.step_seconds or NEUTRAL_STEP_SECONDS,
    )
