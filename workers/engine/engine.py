"""Runs sequences on an executor: schedule, execute, update.

Knows nothing of tokenization, text, networks or where its plans are carried out.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from queue import Full
from typing import Final

from .block_pool import BlockState
from .config import EngineConfig
from .events import Admitted, CacheChanged, Event, Progress
from .plan import Constrained, Executor, FirstTokens, PrefixSource, Samples, StepPlan
from .request_table import RequestTable
from .scheduler import Scheduler
from .sequence import SequenceSpec, State, Task
from .update import update

_WEIGHT: Final = 0.1  # of the newest step in `step_seconds`
_LEAST_MASK_SECONDS: Final = 0.002
_NUM_RECENT: Final = 32  # steps
# tokens of a step; a message about fewer takes longer than their transfer
_LEAST_AHEAD: Final = 128


class Engine:
    """Runs sequences on an executor, step after step. All calls but `expedite` come from one thread.

    With `config.overlap`, one step is in flight between two calls of `step`, so that the executor
    has the next step before it has finished the last.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        source: PrefixSource | None = None,
    ) -> None:
        """`clock` returns seconds. Prefixes that `source` knows are imported, see `commit_prefix`."""
        self.config = config
        self.requests = RequestTable(config, clock)
        self.scheduler = Scheduler(
            self.requests, self._prepare_masks, self._count_importable, executor.propose
        )
        self._source = source
        self.step_seconds = 0.0  # moving mean of the steps with decodes; read from any thread
        self._prompt_tokens = self._prompt_seconds = 0.0  # moving means of the steps with prompts
        # Of the last steps with nothing but decodes, without the time for masks.
        self._model_seconds: deque[float] = deque(maxlen=_NUM_RECENT)
        self._mask_seconds = 0.0  # of the step under way
        self._clock = clock
        self._executor = executor
        # launched, not yet collected
        self._in_flight: tuple[StepPlan, Callable[[], Samples]] | None = None

    def submit(self, spec: SequenceSpec, submitted: float | None = None) -> None:
        """Queues a sequence, whose queue time counts from `submitted` by the engine's clock, else
        from now.

        Raises queue.Full if max_waiting sequences wait, and ValueError if the sequence does not fit
        even alone; then the engine holds nothing of it.
        """
        budgets = self.config.budgets
        if not self.scheduler.fits(spec):
            times = f"{spec.num_choices} times " if spec.num_choices > 1 else ""
            capacity = f"{self.config.capacity_tokens} tokens, {budgets.max_sequences} sequences"
            raise ValueError(
                f"{times}{len(spec.tokens)} + {spec.max_tokens} tokens exceed the capacity of "
                f"{capacity}"
            )
        if len(self.requests.waiting) >= budgets.max_waiting:
            raise Full(f"{budgets.max_waiting} sequences are waiting")
        self.requests.add(spec, submitted)

    def cancel(self, sequence_id: int) -> None:
        """Frees whatever the sequence holds, in any state. Idempotent. No event of the sequence
        follows.

        A submit for n choices takes the ids id to id + n - 1. Until the choices have their first
        tokens, and always in a PREFILL, the first id stands for all; then each choice is a sequence
        of its own. So a caller that ends all of them cancels every id, in any order. The beams of a
        search end together, with any of their ids.

        The blocks may belong to another sequence at once: an import must have stopped writing
        before, and data that a transfer reads from them afterwards is invalid.
        """
        self.requests.finish(sequence_id)

    def cancel_choice(self, sequence_id: int, choice: int) -> None:
        """Ends one choice, or hypothesis, of those submitted as sequence_id, in any state: no event
        of it follows, and it never becomes a sequence if it is none yet. Idempotent. Ending the
        last choice cancels the request.
        """
        self.requests.cancel_choice(sequence_id, choice)

    def suspend(self, sequence_id: int) -> bool:
        """Has a running sequence leased for another worker to continue: a `Suspended` event follows
        once the step in flight has ended, after the first token at the earliest, unless the
        sequence ends before. `cancel` then frees the lease. Until the choices of a submit have
        their first tokens, the first id stands for all. Idempotent.

        A PREFILL and a beam search go on. Returns False, having done nothing, if the sequence has
        not begun, waits for its KV cache or is unknown.
        """
        return self.requests.suspend(sequence_id)

    def unload_adapter(self, number: int) -> None:
        """Has the executor let go of an adapter, with a later step, once no sequence uses it. The
        caller submits none with it any more.
        """
        self.requests.unloading.add(number)

    def commit_import(self, sequence_id: int, first_tokens: FirstTokens) -> None:
        """Starts a DECODE sequence whose KV cache has arrived whole and verified: it runs from the
        next step on. A choice whose first token does not finish it yields the tokens after it; one
        that it finishes yields that token again.

        Ignores unknown ids, since a cancel may come first. Raises RuntimeError unless the sequence
        is importing, and ValueError if first_tokens does not match the request, see
        `SequenceSpec.check_first_tokens`.
        """
        sequence = self.requests.sequences.get(sequence_id)
        if sequence is None:
            return
        if sequence.state is not State.IMPORTING or sequence.importing:
            raise RuntimeError(f"sequence {sequence_id}: commit while {sequence.state.value}")
        sequence.spec.check_first_tokens(first_tokens)
        self.requests.start(sequence)
        sequence.num_scheduled = sequence.num_computed = sequence.num_tokens
        self.requests.publish(sequence)
        self.requests.committed.append((sequence, first_tokens))

    def commit_prefix(self, sequence_id: int, num_tokens: int) -> None:
        """Starts a sequence that was admitted with `importing`: so many more tokens, in the first
        of these blocks, are there and verified; the rest of the prompt is computed.

        Ignores unknown ids, since a cancel may come first. Raises RuntimeError unless the sequence
        is importing, and ValueError unless so many tokens are some of these blocks.
        """
        sequence = self.requests.sequences.get(sequence_id)
        if sequence is None:
            return
        if sequence.state is not State.IMPORTING or not sequence.importing:
            raise RuntimeError(
                f"sequence {sequence_id}: commit of a prefix while {sequence.state.value}"
            )
        num_blocks, rest = divmod(num_tokens, self.config.block_size)
        if rest or not 0 <= num_blocks <= len(sequence.importing):
            raise ValueError(
                f"num_tokens: {num_tokens} are not some of {len(sequence.importing)} blocks"
            )
        self.requests.commit_prefix(sequence, num_tokens)

    def lease_cached(self, digests: Iterable[bytes]) -> list[tuple[int, bytes]]:
        """Leases the blocks of those hashes that are in the KV cache, to be copied elsewhere;
        returns the blocks, each with its hash. The caller has to call `unlease_cached` with them.
        """
        return self.requests.lease_cached(digests)

    def lease_prefix(self, chain: Sequence[bytes]) -> list[int]:
        """Leases the blocks of the longest prefix of a hash chain that is in the KV cache, to be
        copied elsewhere. What the step in flight restores from host memory is there when that has
        ended. Leases none if less than half of what sequences may take would be left to them. The
        caller has to call `unlease_cached` with the blocks.
        """
        return self.requests.lease_prefix(chain)

    def unlease_cached(self, blocks: list[int]) -> None:
        """Ends leases of `lease_cached` or `lease_prefix`."""
        self.requests.unlease_cached(blocks)

    def expedite(self) -> None:
        """Has the step under way end soon, see `Executor.expedite`."""
        self._executor.expedite()

    @property
    def has_work(self) -> bool:
        """Whether `step` could do something now."""
        return self._in_flight is not None or self.scheduler.has_work

    def step(self, emit: Callable[[list[Event]], object] | None = None) -> list[Event]:
        """Launches a step of the batch, if there is anything to compute, and waits for its end;
        with overlap for the end of the step that the previous call launched.

        Gives the events to `emit` as soon as they are known: admissions, preemptions and layers of
        a prefill before the end, so that a decode worker can fetch KV cache while the prefill runs.
        Without `emit` returns them all.
        """
        events: list[Event] = []
        emit = emit or events.extend
        started, self._mask_seconds = self._clock(), 0.0
        plan, found = self.scheduler.schedule()
        if plan.saved and any(
            isinstance(event, Admitted) and self._is_import(event) for event in found
        ):
            plan = self._save_first(plan)
        if found:
            emit(found)
        launched = None
        if plan.sequences or plan.dropped or plan.unloaded or plan.saved or plan.restored:
            launched = plan, self._executor.launch(plan, partial(self._report_layers, plan, emit))
        if self.config.overlap:
            launched, self._in_flight = self._in_flight, launched
        found = []
        if launched is not None:
            plan, collect = launched
            found = update(self.requests, plan, collect())
            self._measure(plan, self._clock() - started)
        stored, evicted = self.requests.pool.take_changes()
        if stored or evicted:
            found.append(CacheChanged(stored=stored, evicted=evicted))
        if found:
            emit(found)
        return events

    @property
    def prompt_token_seconds(self) -> float:
        """Seconds of a step for each prompt token that it computes, a moving mean; 0 before the
        first. Read from any thread.
        """
        num_tokens = self._prompt_tokens
        return self._prompt_seconds / num_tokens if num_tokens else 0.0

    def _count_importable(self, chain: Sequence[bytes]) -> int:
        if self._source is None or not chain:
            return 0
        return self._source.count(chain, self.prompt_token_seconds * self.config.block_size)

    def _is_import(self, event: Admitted) -> bool:
        return self.requests.sequences[event.id].state is State.IMPORTING

    def _save_first(self, plan: StepPlan) -> StepPlan:
        """Carries out what a plan saves, on all ranks, and returns the rest of it. An import is
        written as soon as it is reported, maybe to a block that is to be saved.
        """
        if self._in_flight is not None:
            in_flight, collect = self._in_flight
            samples = collect()
            self._in_flight = in_flight, lambda: samples
        self._executor.launch(StepPlan(sequences=(), dropped=(), saved=plan.saved))()
        return replace(plan, saved=())

    def _measure(self, plan: StepPlan, seconds: float) -> None:
        if num_tokens := plan.num_prompt_tokens:
            self._prompt_seconds = _moving_mean(self._prompt_seconds, seconds)
            self._prompt_tokens = _moving_mean(self._prompt_tokens, num_tokens)
        if plan.has_decodes:
            self.step_seconds = _moving_mean(self.step_seconds, seconds)
            if plan.num_tokens == len(plan.sequences):
                # With overlap the device computes while masks are prepared.
                self._model_seconds.append(
                    seconds if self.config.overlap else seconds - self._mask_seconds
                )

    def _prepare_masks(self, sequences: Sequence[Constrained]) -> Collection[int]:
        """See `Executor.prepare_masks`. Masks take about as long as the model, so that the
        sequences without a grammar wait for at most twice as long as without those that have one.
        The shortest of the last steps counts: where other processes make steps longer, masks get no
        more time, or they would make them longer still.
        """
        started = self._clock()
        seconds = max(min(self._model_seconds, default=0.0), _LEAST_MASK_SECONDS)
        ready = self._executor.prepare_masks(sequences, seconds)
        self._mask_seconds += self._clock() - started
        return ready

    def _report_layers(
        self, plan: StepPlan, emit: Callable[[list[Event]], object], num_layers: int
    ) -> None:
        """Reports the progress of prefills while a step runs whose first num_layers layers are
        computed.
        """
        events: list[Event] = [
            Progress(
                id=step.sequence_id,
                num_computed=step.start,
                num_ahead=step.start + len(step.token_ids),
                num_layers=num_layers,
            )
            for step in plan.sequences
            if len(step.token_ids) >= _LEAST_AHEAD
            and self.requests.sequences[step.sequence_id].spec.task is Task.PREFILL
        ]
        if events:
            emit(events)

    def blocks(self) -> dict[BlockState, int]:
        """Returns how many blocks are in each state; the counts add up to the pool's size."""
        return {state: self.requests.pool.count(state) for state in BlockState}

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every block is held by exactly the sequences whose tables name
        it.
        """
        self.requests.check_integrity()


def _moving_mean(mean: float, newest: float) -> float:
    return mean + (newest - mean) * (_WEIGHT if mean else 1.0)
