"""Which tokens of which sequences the next step computes, and who holds which blocks meanwhile.

One scheduler for prefill, decode and mixed work: a sequence has tokens to compute or it has none. Touches no tensor and
no network; calls nothing but the block pool.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from .block_pool import BlockPool, BlockState
from .config import EngineConfig
from .events import Admitted, Event, Joined, Preempted, Progress, Token
from .plan import PENDING_TOKEN, Samples, SequenceStep, StepPlan
from .sequence import Sequence, SequenceSpec, State, Task

_LEAST_AHEAD: Final = 128  # tokens of a step; fewer are moved in the time that it takes to speak of them


class Scheduler:
    """Continuous batching with chunked prefill.

    First every running sequence that only needs its next token. Then, in chunks, prompts in order of arrival and
    admission from the queue in order. The queue's head waits until its blocks are there; nobody overtakes it.
    Owns every sequence from `add` to FINISHED and all blocks they hold. Not thread-safe.

    A step may be scheduled before the one before it is updated (see `Sequence` for the counters). A sequence that ends
    meanwhile gives its blocks back at once, although the step in flight still writes to them: steps run in order, so
    the next owner's come later; and that step's token is for nobody.
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self._clock = clock
        self._sequences: dict[int, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of admission
        self._dropped: list[int] = []  # finished since the last plan
        self._joined: list[tuple[Sequence, int]] = []  # imports committed since the last schedule, and first tokens
        self._num_holding = 0  # sequences in IMPORTING or RUNNING

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_holding(self) -> int:
        """Sequences that import or run."""
        return self._num_holding

    @property
    def num_leased(self) -> int:
        return len(self._sequences) - len(self._waiting) - self._num_holding

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens to compute, in the queue or under way; imports count nothing. Safe from any thread: the copies
        are atomic."""
        queued = sum(s.num_tokens for s in tuple(self._waiting) if s.spec.task is not Task.DECODE)
        return queued + sum(s.num_uncomputed for s in tuple(self._running) if s.num_uncomputed > 1)

    @property
    def has_work(self) -> bool:
        """Whether there is something to schedule or to update. Imports that wait for their bytes are no work."""
        return bool(self._running or self._joined or self._dropped or self._can_admit())

    def add(self, spec: SequenceSpec, submitted: float | None = None) -> None:
        """Queues a sequence. The caller has checked `fits` and the queue's bound."""
        sequence = Sequence(spec, self.config.block_size, self._clock() if submitted is None else submitted)
        self._sequences[spec.id] = sequence
        self._waiting.append(sequence)

    def fits(self, spec: SequenceSpec) -> bool:
        """Whether the sequence could run on an otherwise empty worker."""
        return spec.max_length <= self.config.capacity_tokens

    def finish(self, sequence_id: int) -> None:
        """Frees whatever the sequence holds, in any state. Idempotent."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        elif sequence.state is State.LEASED:
            self.pool.unlease(sequence.blocks)
        else:
            self._num_holding -= 1
            if sequence.state is State.RUNNING:
                self._running.remove(sequence)
                self._dropped.append(sequence_id)
            self.pool.release(sequence.blocks)
            self.pool.unreserve(sequence.reserved)
        sequence.blocks, sequence.reserved = [], []
        sequence.move(State.FINISHED)

    def commit_import(self, sequence_id: int, first_token: int) -> None:
        """The KV cache of a DECODE sequence is whole and verified: from the next step on it runs. Unknown ids are
        ignored, since a cancel may have been faster. Raises RuntimeError unless the sequence is importing."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return
        if sequence.state is not State.IMPORTING:
            raise RuntimeError(f"sequence {sequence_id}: commit while {sequence.state.value}")
        sequence.move(State.RUNNING)
        missing = sequence.num_prompt_blocks - len(sequence.blocks)
        self._claim(sequence, missing)
        sequence.num_scheduled = sequence.num_computed = sequence.num_tokens
        self._publish(sequence)
        self._running.append(sequence)
        self._joined.append((sequence, first_token))

    def schedule(self) -> tuple[StepPlan, list[Event]]:
        """Decides the next step, where at most one is in flight. Preempts the newest running sequences when an older
        one cannot grow."""
        events = self._join()
        steps: dict[int, SequenceStep] = {}
        decodes = [sequence for sequence in self._running if sequence.num_unscheduled == 1]
        prompts = [sequence for sequence in self._running if sequence.num_unscheduled > 1]
        budget = self.config.mixed_chunk_tokens if decodes else self.config.chunk_tokens
        for sequence in decodes + prompts:
            is_prompt = sequence.num_unscheduled > 1
            count = min(sequence.num_unscheduled, budget) if is_prompt else 1
            if sequence.state is not State.RUNNING or count == 0:
                continue
            # Only decodes grow, and a victim is newer than all decodes before it here: none has its step already.
            events += [Preempted(id=victim) for victim in self._grow(sequence, sequence.num_scheduled + count)]
            if sequence.state is State.RUNNING:
                steps[sequence.spec.id] = self._step(sequence, count)
                budget -= count if is_prompt else 0
        while budget > 0 and self._can_admit():
            sequence = self._waiting.popleft()
            events.append(self._admit(sequence))
            if sequence.state is State.RUNNING:
                count = min(sequence.num_unscheduled, budget)
                steps[sequence.spec.id] = self._step(sequence, count)
                budget -= count
        plan = StepPlan(sequences=tuple(steps.values()), dropped=tuple(self._dropped))
        self._dropped.clear()
        return plan, events

    def update(self, plan: StepPlan, samples: Samples) -> list[Event]:
        """Books what a step computed, step by step as they were scheduled. What it computed for sequences that have
        ended since is dropped."""
        if len(samples.tokens) != sum(step.num_samples for step in plan.sequences):
            raise RuntimeError(f"{len(samples.tokens)} draws; {sum(s.num_samples for s in plan.sequences)} were planned")
        events: list[Event] = []
        tokens = iter(samples.tokens)
        for step in plan.sequences:
            token = next(tokens) if step.num_samples else None
            sequence = self._sequences.get(step.sequence_id)
            if sequence is None:
                continue
            sequence.num_computed += len(step.token_ids)
            self._publish(sequence)
            if sequence.spec.task is Task.PREFILL:
                events.append(Progress(id=step.sequence_id, num_computed=sequence.num_computed))
            if token is not None:
                events.append(self._take_token(sequence, token))
        return events

    def progress(self, plan: StepPlan, num_layers: int) -> list[Event]:
        """What is new while a step runs that has come through so many layers."""
        return [
            Progress(
                id=step.sequence_id,
                num_computed=step.start,
                num_ahead=step.start + len(step.token_ids),
                num_layers=num_layers,
            )
            for step in plan.sequences
            if len(step.token_ids) >= _LEAST_AHEAD and self._sequences[step.sequence_id].spec.task is Task.PREFILL
        ]

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every block held is held by exactly the sequences that say so."""
        self.pool.check_integrity()
        holders = [[0, 0] for _ in range(self.config.num_blocks)]
        reserved: list[int] = []
        for sequence in self._sequences.values():
            reserved += sequence.reserved
            for block in sequence.blocks:
                holders[block][sequence.state is State.LEASED] += 1
        for block, (owners, leases) in enumerate(holders):
            if (owners, leases) != self.pool.holders(block):
                raise RuntimeError(
                    f"block {block}: {owners} owners, {leases} leases; booked {self.pool.holders(block)}"
                )
        if not len(reserved) == len(set(reserved)) == self.pool.count(BlockState.RESERVED):
            raise RuntimeError(f"{reserved} reserved, {self.pool.count(BlockState.RESERVED)} booked")
        holding = sum(s.state in (State.IMPORTING, State.RUNNING) for s in self._sequences.values())
        if holding != self._num_holding:
            raise RuntimeError(f"{holding} sequences hold blocks, {self._num_holding} booked")

    def _join(self) -> list[Event]:
        """Lets committed imports take part; one whose first token was its last ends here and says so."""
        events: list[Event] = []
        for sequence, first_token in self._joined:
            if sequence.state is State.RUNNING:
                events.append(Joined(id=sequence.spec.id))
                token = self._take_token(sequence, first_token)
                events += [token] if token.finish is not None else []
        self._joined.clear()
        return events

    def _can_admit(self) -> bool:
        if not self._waiting or self._num_holding >= self.config.max_sequences:
            return False
        sequence = self._waiting[0]
        shared = self._match(sequence)
        needed = self._num_admission_blocks(sequence) - len(shared)
        return needed <= self.pool.num_available - self.pool.num_evictable(shared)

    def _admit(self, sequence: Sequence) -> Admitted:
        sequence.blocks = self._match(sequence)
        self.pool.share(sequence.blocks)
        sequence.reserved = self.pool.reserve(self._num_admission_blocks(sequence) - len(sequence.blocks))
        sequence.num_cached = len(sequence.blocks) * self.config.block_size
        sequence.num_scheduled = sequence.num_computed = sequence.num_cached
        sequence.admitted = self._clock()
        self._num_holding += 1
        table = (sequence.blocks + sequence.reserved)[: sequence.num_prompt_blocks]
        if sequence.spec.task is Task.DECODE:
            sequence.move(State.IMPORTING)
        else:
            self._claim(sequence, sequence.num_prompt_blocks - len(sequence.blocks))
            sequence.move(State.RUNNING)
            self._running.append(sequence)
        return Admitted(
            id=sequence.spec.id,
            queue_seconds=sequence.admitted - sequence.submitted,
            num_cached=sequence.num_cached,
            blocks=tuple(table),
        )

    def _match(self, sequence: Sequence) -> list[int]:
        if not self.config.prefix_caching:
            return []
        # A prompt that is computed here needs at least its last token computed, for the logits.
        last = sequence.num_tokens - (sequence.spec.task is not Task.DECODE)
        return self.pool.match(sequence.chain[: last // self.config.block_size])

    def _num_admission_blocks(self, sequence: Sequence) -> int:
        growth = -(-self.config.growth_tokens // self.config.block_size)
        return min(sequence.max_blocks, sequence.num_prompt_blocks + growth)

    def _grow(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Makes room for the first num_tokens tokens; returns the ids preempted for it, maybe the sequence's own."""
        preempted: list[int] = []
        missing = -(-num_tokens // self.config.block_size) - len(sequence.blocks)
        while missing > len(sequence.reserved):
            if self.pool.num_available:
                sequence.reserved += self.pool.reserve(1)
                continue
            victim = self._running[-1]
            preempted.append(victim.spec.id)
            self.finish(victim.spec.id)
            if victim is sequence:
                return preempted
        self._claim(sequence, max(missing, 0))
        return preempted

    def _claim(self, sequence: Sequence, count: int) -> None:
        self.pool.claim(sequence.reserved[:count])
        sequence.blocks += sequence.reserved[:count]
        del sequence.reserved[:count]

    def _step(self, sequence: Sequence, count: int) -> SequenceStep:
        start = sequence.num_scheduled
        step = SequenceStep(
            sequence_id=sequence.spec.id,
            token_ids=tuple(sequence.tokens[start : start + count]) or (PENDING_TOKEN,),
            start=start,
            new_blocks=tuple(sequence.blocks[sequence.num_sent_blocks :]),
            sampling=None if sequence.sampling_sent else sequence.spec.sampling,
            num_samples=int(start + count >= sequence.num_tokens),
        )
        sequence.num_scheduled += count
        sequence.num_sent_blocks = len(sequence.blocks)
        sequence.sampling_sent = True
        return step

    def _publish(self, sequence: Sequence) -> None:
        if self.config.prefix_caching:
            for block, digest in sequence.publishable():
                self.pool.publish(block, digest)

    def _take_token(self, sequence: Sequence, token: int) -> Token:
        finish = sequence.append(token)
        first = sequence.num_generated == 1
        event = Token(
            id=sequence.spec.id,
            index=sequence.spec.first_index + sequence.num_generated - 1,
            token=token,
            finish=finish,
            prefill_seconds=self._clock() - sequence.admitted if first else 0.0,
        )
        if finish is not None:
            self.finish(sequence.spec.id)
        elif sequence.spec.task is Task.PREFILL:
            self._running.remove(sequence)
            self._dropped.append(sequence.spec.id)
            self._num_holding -= 1
            self.pool.lease(sequence.blocks)
            sequence.move(State.LEASED)
        return event
