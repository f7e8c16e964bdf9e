"""The engine: schedule, launch, update.

Knows nothing about tokenization, text, networks or where its plans are carried out.
"""

import time
from collections.abc import Callable
from typing import Final

from .block_pool import BlockState
from .config import EngineConfig
from .events import Event
from .plan import Executor, FirstTokens, Samples, StepPlan
from .scheduler import Scheduler
from .sequence import SequenceSpec

_WEIGHT: Final = 0.1  # of the newest step in `step_seconds`


class QueueFull(Exception):
    """The queue has reached its bound."""


class DoesNotFit(Exception):
    """The sequence could not run even alone."""


class Engine:
    """Runs sequences on an executor, step after step. All calls come from one thread.

    With `config.overlap`, one step is in flight between two calls of `step`, so that the executor has the next one
    before it is done with the last.
    """

    def __init__(self, executor: Executor, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.scheduler = Scheduler(config, clock)
        self.step_seconds = 0.0  # moving mean of the steps that had decodes; read from any thread
        self._clock = clock
        self._executor = executor
        self._in_flight: tuple[StepPlan, Callable[[], Samples]] | None = None  # launched, not yet collected

    def submit(self, spec: SequenceSpec, submitted: float | None = None) -> None:
        """Queues a sequence, whose queue time counts from `submitted` by the engine's clock, else from now. Raises
        QueueFull or DoesNotFit, and then holds nothing of it."""
        if not self.scheduler.fits(spec):
            times = f"{spec.num_choices} times " if spec.num_choices > 1 else ""
            room = f"{self.config.capacity_tokens} tokens, {self.config.max_sequences} sequences"
            raise DoesNotFit(f"{times}{len(spec.tokens)} + {spec.max_tokens} tokens; room for {room}")
        if self.scheduler.num_waiting >= self.config.max_waiting:
            raise QueueFull(f"{self.config.max_waiting} sequences are waiting")
        self.scheduler.add(spec, submitted)

    def cancel(self, sequence_id: int) -> None:
        """Frees whatever the sequence holds, be it queued, importing, running or leased. Idempotent. No event of the
        sequence comes after it.

        A submit for n choices takes the ids id to id + n - 1. Until the choices have their first tokens, or for good in
        a PREFILL, the first id stands for all; then each is a sequence of its own. So whoever is done with all of them
        cancels every id, in any order. The beams of a search end together, with any of their ids.

        The blocks may belong to another sequence at once: whoever fills an import must have stopped before, and what a
        reader copies out of them meanwhile is worthless."""
        self.scheduler.finish(sequence_id)

    def cancel_choice(self, sequence_id: int, choice: int) -> None:
        """Ends one choice, or hypothesis, of those submitted as sequence_id, wherever they stand: no event of it comes
        any more, and if it is no sequence yet it never will be. Idempotent. The last one's end is a `cancel` of them
        all."""
        self.scheduler.cancel_choice(sequence_id, choice)

    def commit_import(self, sequence_id: int, opening: FirstTokens) -> None:
        """The KV cache of a DECODE sequence has arrived whole and verified: from the next step on it runs. A choice
        that its first token does not end yields the tokens after it; one that it ends yields that token again.

        Unknown ids are ignored, since a cancel may have been faster. Raises RuntimeError unless the sequence is
        importing, and ValueError if the opening has not a token for each choice or beam, with log probabilities for
        beams and none else."""
        self.scheduler.commit_import(sequence_id, opening)

    @property
    def has_work(self) -> bool:
        """Whether `step` could do something now."""
        return self._in_flight is not None or self.scheduler.has_work

    def step(self, early: Callable[[list[Event]], None] | None = None) -> list[Event]:
        """Launches a step of the batch, if there is anything to compute, and waits for its end; with overlap for the
        end of the step that the call before this one launched.

        Returns the events. Those that are known before the end (admissions, joins, preemptions, layers of a prefill)
        go to `early` at once where that is given, so that a decode worker can get ready while the prefill runs."""
        started = self._clock()
        plan, events = self.scheduler.schedule()
        if early is not None and events:
            early(events)
            events = []
        launched = (plan, self._launch(plan, early)) if plan.sequences or plan.dropped else None
        if self.config.overlap:
            launched, self._in_flight = self._in_flight, launched
        if launched is not None:
            plan, collect = launched
            events += self.scheduler.update(plan, collect())
            if plan.has_decodes:
                seconds = self._clock() - started
                self.step_seconds += (seconds - self.step_seconds) * (_WEIGHT if self.step_seconds else 1.0)
        return events + self.scheduler.cache_changes()

    def _launch(self, plan: StepPlan, early: Callable[[list[Event]], None] | None) -> Callable[[], Samples]:
        def on_layers(num_layers: int) -> None:
            if early is not None and (events := self.scheduler.progress(plan, num_layers)):
                early(events)

        return self._executor.launch(plan, on_layers)

    def blocks(self) -> dict[BlockState, int]:
        """How many blocks are in each state; they add up to the pool's size."""
        return {state: self.scheduler.pool.count(state) for state in BlockState}

    def cached_hashes(self) -> list[bytes]:
        """The hashes of all blocks in the prefix cache, as of the last step: the `CacheChanged` events after it say
        what follows."""
        return self.scheduler.pool.told_hashes()

    def check_integrity(self) -> None:
        """Raises RuntimeError if the books do not balance."""
        self.scheduler.check_integrity()
