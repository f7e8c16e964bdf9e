"""Which tokens of which sequences the next step computes, and who gets the blocks for them.

One scheduler for prefill, decode and mixed work: a sequence has tokens to compute or it has none. Touches no tensor and
no network.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from . import fork
from .block_pool import BlockPool
from .config import EngineConfig
from .events import Admitted, CacheChanged, Event, Failed, KvReceived, Preempted, Progress, Token
from .plan import PENDING_TOKEN, FirstTokens, Samples, SequenceStep, StepPlan
from .request_table import RequestTable
from .sequence import Search, Sequence, SequenceSpec, State, Task
from .update import OutputUpdate

_LEAST_AHEAD: Final = 128  # tokens of a step; fewer are moved in the time that it takes to speak of them


class Scheduler:
    """Continuous batching with chunked prefill.

    First every running sequence that only needs its next token. Then, in chunks, prompts in order of admission, and
    admission from the queue, by priority and then in order of arrival. The queue's head waits until its blocks are
    there; nobody overtakes it. Not thread-safe.

    A step may be scheduled before the one before it is updated (see `Sequence` for the counters). A sequence that ends
    meanwhile gives its blocks back at once, although the step in flight still writes to them: steps run in order, so
    the next owner's come later; and that step's token is for nobody.

    Several choices are one sequence until their first tokens are known, and so are the beams of a search; what they
    will need is reserved from the start (see `fork`).
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self._clock = clock
        self._ledger = RequestTable(config)
        self._outcome = OutputUpdate(self._ledger, clock)

    @property
    def pool(self) -> BlockPool:
        return self._ledger.pool

    @property
    def num_waiting(self) -> int:
        return len(self._ledger.waiting)

    @property
    def num_holding(self) -> int:
        """Sequences that import or run, and those that they are to become."""
        return self._ledger.num_holding

    @property
    def num_leased(self) -> int:
        return self._ledger.num_leased

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens to compute, in the queue or under way; imports count nothing. Safe from any thread: the copies
        are atomic."""
        queued = sum(s.num_tokens for s in tuple(self._ledger.waiting) if s.spec.task is not Task.DECODE)
        return queued + sum(s.num_uncomputed for s in tuple(self._ledger.running) if s.num_uncomputed > 1)

    @property
    def has_work(self) -> bool:
        """Whether there is something to schedule or to update. Imports that wait for their bytes are no work."""
        return bool(self._ledger.running or self._ledger.joined or self._ledger.dropped or self._can_admit())

    def add(self, spec: SequenceSpec, submitted: float | None = None) -> None:
        """Queues a sequence. The caller has checked `fits` and the queue's bound."""
        self._ledger.add(spec, self._clock() if submitted is None else submitted)

    def fits(self, spec: SequenceSpec) -> bool:
        """Whether the sequence could run on an otherwise empty worker."""
        num_slots = 1 if spec.task is Task.PREFILL else spec.num_choices
        least = fork.least_blocks(spec, self.config.block_size)
        return num_slots <= self.config.max_sequences and least <= self.config.num_blocks

    def finish(self, sequence_id: int) -> None:
        """See `Engine.cancel`."""
        self._ledger.finish(sequence_id)

    def cancel_choice(self, sequence_id: int, choice: int) -> None:
        """See `Engine.cancel_choice`."""
        self._ledger.cancel_choice(sequence_id, choice)

    def commit_import(self, sequence_id: int, opening: FirstTokens) -> None:
        """See `Engine.commit_import`."""
        sequence = self._ledger.sequences.get(sequence_id)
        if sequence is None:
            return
        if sequence.state is not State.IMPORTING:
            raise RuntimeError(f"sequence {sequence_id}: commit while {sequence.state.value}")
        num_tokens, num_choices = len(opening.tokens), sequence.spec.num_choices
        good = num_tokens >= num_choices if sequence.search else num_tokens == num_choices
        if not good or len(opening.logprobs) != (num_tokens if sequence.search else 0):
            raise ValueError(f"sequence {sequence_id}: the opening is of another request")
        self._ledger.start(sequence)
        sequence.num_scheduled = sequence.num_computed = sequence.num_tokens
        self._ledger.publish(sequence)
        self._ledger.joined.append((sequence, opening))

    def schedule(self) -> tuple[StepPlan, list[Event]]:
        """Decides the next step, where at most one is in flight. Preempts the newest running sequences when an older
        one cannot grow."""
        events = self._join()
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self._ledger.running:
            if num_unscheduled := sequence.num_unscheduled:
                (decodes if num_unscheduled == 1 else prompts).append(sequence)
        for sequence in decodes:  # before any has its step, so that the beams of a search grow all or none
            if sequence.num_scheduled == len(sequence.blocks) * self.config.block_size:
                events += self._grow(sequence)
        copies: list[tuple[int, int]] = []
        steps = [self._step(sequence, 1, copies) for sequence in decodes if sequence.state is State.RUNNING]
        budget = self.config.mixed_chunk_tokens if decodes else self.config.chunk_tokens
        for sequence in prompts:
            if sequence.state is State.RUNNING and budget:
                steps.append(self._step(sequence, min(sequence.num_unscheduled, budget), copies))
                budget -= len(steps[-1].token_ids)
        while budget > 0 and self._can_admit():
            sequence = self._ledger.waiting[0]
            events.append(self._admit(sequence))
            if sequence.state is State.RUNNING:
                steps.append(self._step(sequence, min(sequence.num_unscheduled, budget), copies))
                budget -= len(steps[-1].token_ids)
        plan = StepPlan(sequences=tuple(steps), dropped=tuple(self._ledger.dropped), copies=tuple(copies))
        self._ledger.dropped.clear()
        self.pool.release([source for source, _ in copies])  # not before admission: an import is filled at once
        return plan, events

    def update(self, plan: StepPlan, samples: Samples) -> list[Event]:
        """Books what a step computed, step by step as they were scheduled. What it computed for sequences that have
        ended since is dropped."""
        num_samples = sum([step.num_samples for step in plan.sequences])
        if len(samples.tokens) != num_samples:
            raise RuntimeError(f"{len(samples.tokens)} draws; {num_samples} were planned")
        events: list[Event] = []
        searches: list[Search] = []
        block_size, end = self.config.block_size, 0
        for step in plan.sequences:
            start, end = end, end + step.num_samples
            sequence = self._ledger.sequences.get(step.sequence_id)
            if sequence is None:
                continue
            if step.sequence_id in samples.failed:
                reason = samples.failed[step.sequence_id]
                events += [Failed(id=number, reason=reason) for number in self._give_up(sequence)]
                continue
            sequence.num_computed += len(step.token_ids)
            if sequence.num_computed >= (sequence.num_published + 1) * block_size:
                self._ledger.publish(sequence)
            if sequence.scores_prompt:
                sequence.prompt_logprobs += samples.prompt_logprobs.get(step.sequence_id, ())
            if sequence.spec.task is Task.PREFILL:
                events.append(Progress(id=step.sequence_id, num_computed=sequence.num_computed))
            if start == end:
                continue
            if sequence.search is None:
                logprobs = samples.logprobs.get(step.sequence_id)
                events += self._outcome.take(sequence, samples.tokens[start:end], logprobs)
            elif sequence.search not in searches:
                searches.append(sequence.search)
        for search in searches:
            events += self._outcome.advance(search, [samples.logprobs[m.spec.id][0].top for m in search.members])
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
            if len(step.token_ids) >= _LEAST_AHEAD
            and self._ledger.sequences[step.sequence_id].spec.task is Task.PREFILL
        ]

    def cache_changes(self) -> list[Event]:
        """What has come into the prefix cache and what has gone since the last call, as one event or none."""
        stored, evicted = self.pool.take_changes()
        return [CacheChanged(stored=stored, evicted=evicted)] if stored or evicted else []

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every block held is held by exactly the sequences that say so."""
        self._ledger.check_integrity()

    def _join(self) -> list[Event]:
        """Lets committed imports take part; one whose first token was its last ends here and says so."""
        events: list[Event] = []
        for sequence, opening in self._ledger.joined:
            if sequence.state is not State.RUNNING:
                continue
            events.append(KvReceived(id=sequence.spec.id))
            if sequence.search:
                candidates = list(zip(opening.tokens, opening.logprobs, strict=True))
                events += self._outcome.advance(sequence.search, [candidates])
            else:
                told = self._outcome.take(sequence, list(opening.tokens), None)
                events += [event for event in told if isinstance(event, Token) and event.finish is not None]
        self._ledger.joined.clear()
        return events

    def _can_admit(self) -> bool:
        if not self._ledger.waiting:
            return False
        sequence = self._ledger.waiting[0]
        if self._ledger.num_holding + sequence.num_slots > self.config.max_sequences:
            return False
        shared = self._match(sequence)
        needed = self._ledger.num_admission_blocks(sequence) - len(shared)
        return needed <= self.pool.num_available - self.pool.num_evictable(shared)

    def _admit(self, sequence: Sequence) -> Admitted:
        self._ledger.admit(sequence, self._match(sequence))
        sequence.admitted = self._clock()
        return Admitted(
            id=sequence.spec.id,
            queue_seconds=sequence.admitted - sequence.submitted,
            num_cached=sequence.num_cached,
            blocks=tuple((sequence.blocks + sequence.reserved)[: sequence.num_prompt_blocks]),
        )

    def _match(self, sequence: Sequence) -> list[int]:
        if not self.config.prefix_caching or sequence.scores_prompt:  # then every position is to be computed
            return []
        # A prompt that is computed here needs at least its last token computed, for the logits.
        last = sequence.num_tokens - (sequence.spec.task is not Task.DECODE)
        return self.pool.match(sequence.chain[: last // self.config.block_size])

    def _grow(self, sequence: Sequence) -> list[Event]:
        """Makes room for one block more; tells who was preempted for it, maybe the sequence itself."""
        events: list[Event] = []
        while sequence.state is State.RUNNING and not sequence.reserved:
            if self.pool.num_available:
                sequence.reserved += self.pool.reserve(1)
            else:
                events += [Preempted(id=number) for number in self._give_up(self._ledger.running[-1])]
        if sequence.state is State.RUNNING:
            self._ledger.claim(sequence, 1)
        return events

    def _give_up(self, sequence: Sequence) -> list[int]:
        """Ends a sequence, or the search of a beam; returns the ids under which it was known."""
        number, search = sequence.spec.id, sequence.search
        ids = [search.spec.id] if search else [number + choice for choice in sequence.choices]
        self._ledger.finish(number)
        return ids

    def _step(self, sequence: Sequence, count: int, copies: list[tuple[int, int]]) -> SequenceStep:
        start, end = sequence.num_scheduled, sequence.num_scheduled + count
        step = SequenceStep(
            sequence_id=sequence.spec.id,
            token_ids=tuple(sequence.tokens[start:end]) or (PENDING_TOKEN,),
            start=start,
            new_blocks=tuple(sequence.blocks[sequence.num_sent_blocks :]),
            sampling=None if sequence.sampling_sent else sequence.spec.sampling,
            num_samples=sequence.num_draws if end >= len(sequence.tokens) else 0,
        )
        if step.sampling is not None and step.sampling.needs_history:
            step = replace(step, history=tuple(sequence.tokens), num_prompt=sequence.spec.num_prompt)
        if sequence.scores_prompt and end < sequence.spec.num_prompt:
            step = replace(step, next_prompt_token=sequence.tokens[end])
        if sequence.copy_source is not None:
            copies.append((sequence.copy_source, sequence.blocks[start // self.config.block_size]))
            sequence.copy_source = None
        sequence.num_scheduled = end
        sequence.num_sent_blocks = len(sequence.blocks)
        sequence.sampling_sent = True
        return step
