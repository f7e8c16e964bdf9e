"""Runs sequences on an executor: schedule, execute, update.

Knows nothing of tokenization, text, networks or the place where its plans are executed.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from queue import Full
from typing import Final

from ...proto.hashing import DIGEST_BYTES
from ..kv_cache.tables import DISK_NEEDS_DENSE
from ..step_cost import StepTimes
from .block_pool import BlockState
from .config import Budgets, EngineConfig
from .events import Admitted, CacheChanged, Event, Progress
from .plan import (
    Constrained,
    CpuShare,
    Executor,
    FirstTokens,
    PrefixSource,
    Samples,
    StepPlan,
)
from .request_table import RequestTable
from .resume import LeasedPrefix, ResumePoints
from .scheduler import Scheduler
from .sequence import SequenceSpec, State, Task
from .update import update

_WEIGHT: Final = 0.1  # of the newest step in the moving means
_LEAST_MASK_SECONDS: Final = 0.002
_NUM_RECENT: Final = 32  # steps
# Tokens of a step. A message about fewer tokens takes longer than their transfer.
_LEAST_AHEAD: Final = 128

LaunchedStep = tuple[StepPlan, Callable[[], Samples]]
"""A step that is launched and not yet collected, with the function that collects it."""


class Engine:
    """Runs sequences on an executor, step after step.

    All calls except `expedite` come from one thread. With `config.overlap`, one step is in flight
    between two calls of `step`, so the executor has the next step before it finishes the last.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        source: PrefixSource | None = None,
    ) -> None:
        """Makes an engine that holds no sequence.

        `clock` returns seconds. The engine imports prefixes that `source` knows; see
        `commit_prefix`. Raises ValueError for a `source` beside windows or state.
        """
        if source is not None and (len(config.tables) > 1 or ResumePoints(config).is_sparse):
            raise ValueError(DISK_NEEDS_DENSE)
        self.config = config
        self.requests = RequestTable(config, clock)
        self.scheduler = Scheduler(
            self.requests, self._prepare_masks, self._count_importable, executor.propose
        )
        self._source = source
        self.step_seconds = 0.0  # moving mean of the steps with decodes; read from any thread
        # Moving means of the steps with prompts.
        self._prompt_tokens = 0.0
        self._prompt_seconds = 0.0
        self._times = StepTimes()
        # Durations of the last steps with only decodes, without the time for masks.
        self._model_seconds: deque[float] = deque(maxlen=_NUM_RECENT)
        self._mask_seconds = 0.0  # of the running step
        self._clock = clock
        self._executor = executor
        self._share: CpuShare | None = None  # for the next step
        # The step that is launched and not yet collected.
        self._in_flight: LaunchedStep | None = None
        self._started = 0.0  # when the last step was launched

    def submit(self, spec: SequenceSpec, submitted: float | None = None) -> None:
        """Queues a sequence; its queue time counts from `submitted` by the engine's clock, or now.

        Raises queue.Full if max_waiting sequences wait already, and ValueError if the sequence does
        not fit on an empty worker. After an error the engine holds nothing of the sequence.
        """
        budgets = self.scheduler.budgets
        if not self.scheduler.fits(spec):
            num_states = self.scheduler.num_states(spec)
            if num_states > self.config.num_states:
                raise ValueError(
                    f"the request takes {num_states} states; {self.config.num_states} are available"
                )
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
        """Ends a sequence in any state and frees its blocks; idempotent.

        No event of the sequence follows. A submit for n choices takes the ids id to id + n - 1.
        Until the choices have their first tokens, and always in a PREFILL, the first id stands for
        all choices. Afterwards each choice is a sequence of its own. So a caller that ends all
        choices cancels every id, in any order. The id of any beam ends the whole beam search.

        Another sequence may own the blocks at once. So an import must have stopped writing before
        this call, and data that a transfer reads from the blocks afterwards is invalid.
        """
        self.requests.finish(sequence_id)

    def cancel_choice(self, sequence_id: int, choice: int) -> None:
        """Ends one choice, or one hypothesis, of the submit `sequence_id` in any state; idempotent.

        No event of the choice follows. If it is not a sequence yet, it never becomes one. Ending
        the last choice cancels the request.
        """
        self.requests.cancel_choice(sequence_id, choice)

    def suspend(self, sequence_id: int) -> bool:
        """Suspends a running sequence: leases its blocks so that another worker can continue it.

        A `Suspended` event follows after the step in flight, but not before the first token and not
        if the sequence ends first. `cancel` then frees the lease. Until the choices of a submit
        have their first tokens, the first id stands for all choices. Idempotent.

        A PREFILL and a beam search continue to run. Returns False, and does nothing, if the
        sequence has not started, waits for its KV cache or is unknown.
        """
        return self.requests.suspend(sequence_id)

    def unload_adapter(self, number: int) -> None:
        """Unloads an adapter with a later step, as soon as no sequence uses it.

        The caller must submit no further sequence with the adapter.
        """
        self.requests.unloading.add(number)

    def commit_import(self, sequence_id: int, first_tokens: FirstTokens) -> None:
        """Starts a DECODE sequence whose KV cache is complete and verified.

        The sequence runs from the next step on. The events of a choice begin after its first token,
        except if the first token finishes the choice: then an event reports that token again.

        Ignores unknown ids, because a cancel may come first. Raises RuntimeError unless the
        sequence is importing, and ValueError if first_tokens does not match the request; see
        `SequenceSpec.check_first_tokens`.
        """
        sequence = self.requests.sequences.get(sequence_id)
        if sequence is None:
            return
        if sequence.state is not State.IMPORTING or sequence.import_hashes:
            raise RuntimeError(f"sequence {sequence_id}: commit while {sequence.state.value}")
        sequence.spec.check_first_tokens(first_tokens)
        self.requests.start(sequence)
        sequence.num_scheduled = sequence.num_computed = sequence.num_tokens
        self.requests.publish(sequence)
        self.requests.committed.append((sequence, first_tokens))

    def commit_prefix(self, sequence_id: int, num_tokens: int) -> None:
        """Starts a sequence that was admitted with `import_hashes`.

        The first `num_tokens` tokens of these blocks are imported and verified; the engine computes
        the rest of the prompt.

        Ignores unknown ids, because a cancel may come first. Raises RuntimeError unless the
        sequence is importing, and ValueError unless `num_tokens` fills some of these blocks
        exactly.
        """
        sequence = self.requests.sequences.get(sequence_id)
        if sequence is None:
            return
        if sequence.state is not State.IMPORTING or not sequence.import_hashes:
            raise RuntimeError(
                f"sequence {sequence_id}: commit of a prefix while {sequence.state.value}"
            )
        num_imported = len(sequence.import_hashes)
        num_blocks, rest = divmod(num_tokens, self.config.block_size)
        if rest or not 0 <= num_blocks <= num_imported:
            raise ValueError(
                f"num_tokens: {num_tokens} must fill 0 to {num_imported} blocks of "
                f"{self.config.block_size} tokens exactly"
            )
        if self.requests.resume.is_sparse and 0 < num_blocks < num_imported:
            raise ValueError(
                f"num_tokens: {num_tokens} must be 0 or fill all {num_imported} blocks, "
                "because the model keeps windows or state"
            )
        self.requests.commit_prefix(sequence, num_tokens)

    def lease_cached(self, digests: Iterable[bytes]) -> list[tuple[int, bytes]]:
        """Leases the cached blocks among `digests` for a copy and returns (block, hash) pairs.

        Ignores hashes that are not in the KV cache. The caller must call `unlease_cached` with the
        blocks.
        """
        return self.requests.lease_cached(digests)

    def lease_prefix(self, chain: Sequence[bytes]) -> LeasedPrefix:
        """Leases the blocks of the longest cached prefix of a hash chain for a copy.

        With windows or state this is the longest resume point with all its parts. Blocks that the
        step in flight loads from host memory are valid after that step. Leases no block if less
        than half of the blocks that sequences may use would be left to them. The caller must call
        `unlease_prefix`.
        """
        return self.requests.lease_prefix(chain)

    def unlease_prefix(self, lease: LeasedPrefix) -> None:
        """Ends the leases of `lease_prefix`."""
        self.requests.unlease_prefix(lease)

    def unlease_cached(self, blocks: list[int]) -> None:
        """Ends leases that `lease_cached` began."""
        self.requests.pool.end_copy(blocks)

    def clear_cache(self) -> CacheChanged:
        """Empties the prefix cache, also in host memory; returns the change, which no step reports.

        Sequences and leases go on. What they hold now enters the cache no more, and neither does
        what these sequences compute after it.
        """
        self.requests.clear_cache()
        stored, evicted = self._take_changes()
        return CacheChanged(stored=stored, evicted=evicted)

    def take_role(self, budgets: Budgets, share: CpuShare) -> None:
        """Runs later steps within `budgets` and with `share`; running sequences go on.

        No number of `budgets` may exceed that of the configuration.
        """
        self.scheduler.budgets = budgets
        self._share = share

    def expedite(self) -> None:
        """Raises the priority of the running step; see `Executor.expedite`."""
        self._executor.expedite()

    @property
    def has_work(self) -> bool:
        """Returns True if `step` has something to do now."""
        return self._in_flight is not None or self.scheduler.has_work

    def step(self, emit: Callable[[list[Event]], object] | None = None) -> list[Event]:
        """Launches a step, if there is work, and waits for its end.

        With overlap, waits for the step that the previous call launched instead. Passes events to
        `emit` as soon as they are known. Admissions, preemptions and computed layers of a prefill
        come before the end of the step, so a decode worker can fetch KV cache while the prefill
        runs. Without `emit`, returns all events.
        """
        events: list[Event] = []
        emit = emit or events.extend
        self.finish(self.launch(emit), emit)
        return events

    def launch(self, emit: Callable[[list[Event]], object]) -> LaunchedStep | None:
        """Does the first part of `step`: schedules and launches a step, if there is work.

        Returns the step that `finish` must get next, as soon as it has ended: the launched one or,
        with overlap, the one before it.
        """
        self._started = self._clock()
        self._mask_seconds = 0.0
        plan, found = self.scheduler.schedule(self._times.cost())
        if (plan.saved or plan.saved_states) and any(
            isinstance(event, Admitted) and self._is_import(event) for event in found
        ):
            plan = self._save_first(plan)
        if found:
            emit(found)
        launched = None
        if plan.sequences or plan.dropped or plan.unloaded or _has_copies(plan):
            if self._share is not None:
                plan = replace(plan, share=self._share)
                self._share = None
            launched = plan, self._executor.launch(plan, partial(self._report_layers, plan, emit))
        if self.config.overlap:
            launched, self._in_flight = self._in_flight, launched
        return launched

    def finish(self, launched: LaunchedStep | None, emit: Callable[[list[Event]], object]) -> None:
        """Does the second part of `step`: waits for the end of a step and applies its samples."""
        found: list[Event] = []
        if launched is not None:
            plan, collect = launched
            found = update(self.requests, plan, collect())
            self._measure(plan, self._clock() - self._started)
        stored, evicted = self._take_changes()
        if stored or evicted:
            found.append(CacheChanged(stored=stored, evicted=evicted))
        if found:
            emit(found)

    @property
    def prompt_token_seconds(self) -> float:
        """Returns the seconds per prompt token of steps with prompts, by moving means.

        Returns 0 before the first such step. Any thread may read it.
        """
        num_tokens = self._prompt_tokens
        return self._prompt_seconds / num_tokens if num_tokens else 0.0

    def _count_importable(self, chain: Sequence[bytes]) -> int:
        if self._source is None or not chain:
            return 0
        return self._source.count(chain, self.prompt_token_seconds * self.config.block_size)

    def _take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Returns the cache names that entered and left, of the kind that routers look up.

        These are the names of states, or without state the names of the blocks of table 0.
        """
        changes = self.requests.pool.take_changes()  # in any case, because that clears them
        if self.config.num_states:
            return self.requests.states.pool.take_changes()
        if len(self.config.tables) == 1:
            return changes
        stored, evicted = (
            tuple(name for name in names if len(name) == DIGEST_BYTES) for names in changes
        )
        return stored, evicted

    def _is_import(self, event: Admitted) -> bool:
        sequence = self.requests.sequences.get(event.id)  # None: preempted in the same step
        return sequence is not None and sequence.state is State.IMPORTING

    def _save_first(self, plan: StepPlan) -> StepPlan:
        """Saves evicted blocks to host memory before the step; returns the rest of the plan.

        All ranks have saved their parts when it returns. An import may write as soon as it is
        reported, maybe to a block that has to be saved first.
        """
        if self._in_flight is not None:
            in_flight, collect = self._in_flight
            samples = collect()
            self._in_flight = in_flight, lambda: samples
        first = StepPlan(sequences=(), dropped=(), saved=plan.saved, saved_states=plan.saved_states)
        self._executor.launch(first)()
        return replace(plan, saved=(), saved_states=())

    def _measure(self, plan: StepPlan, seconds: float) -> None:
        num_tokens = plan.num_prompt_tokens
        if self.scheduler.budgets.mixed_step_factor is not None:
            self._times.observe(plan.num_tokens - num_tokens, num_tokens, seconds)
        if num_tokens:
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
        """Prepares grammar masks for about as long as the model computes.

        So sequences without a grammar wait at most twice as long as they would without grammars in
        the batch. The shortest recent step counts. If other processes slow steps down, masks must
        not get more time, because they would slow them down further.
        """
        started = self._clock()
        seconds = max(min(self._model_seconds, default=0.0), _LEAST_MASK_SECONDS)
        ready = self._executor.prepare_masks(sequences, seconds)
        self._mask_seconds += self._clock() - started
        return ready

    def _report_layers(
        self, plan: StepPlan, emit: Callable[[list[Event]], object], num_layers: int
    ) -> None:
        """Reports the progress of prefills while a step runs, after its first num_layers layers."""
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
        """Returns the number of blocks in each state at one time; see `BlockPool.counts`."""
        return self.requests.pool.counts()

    def states(self) -> dict[BlockState, int]:
        """Returns the number of slots of states as `blocks`; all 0 if the model keeps no state."""
        return self.requests.states.pool.counts()

    def check_integrity(self) -> None:
        """Raises RuntimeError unless the tables and slots of sequences and both pools agree."""
        self.requests.check_integrity()


def _has_copies(plan: StepPlan) -> bool:
    return bool(plan.saved or plan.loaded or plan.saved_states or plan.loaded_states)


def _moving_mean(mean: float, newest: float) -> float:
    return mean + (newest - mean) * (_WEIGHT if mean else 1.0)
