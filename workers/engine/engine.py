"""The engine: schedule, execute, update.

Knows nothing about tokenization, text, networks or where its plans are carried out.
"""

import time
from collections.abc import Callable

from .block_pool import BlockState
from .config import EngineConfig
from .events import Event
from .plan import Executor
from .scheduler import Scheduler
from .sequence import SequenceSpec


class QueueFull(Exception):
    """The queue has reached its bound."""


class DoesNotFit(Exception):
    """The sequence could not run even alone."""


class Engine:
    """Runs sequences on an executor, one step at a time. All calls come from one thread."""

    def __init__(self, executor: Executor, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.scheduler = Scheduler(config, clock)
        self._executor = executor

    def submit(self, spec: SequenceSpec, submitted: float | None = None) -> None:
        """Queues a sequence, whose queue time counts from `submitted` by the engine's clock, else from now. Raises
        QueueFull or DoesNotFit, and then holds nothing of it."""
        if not self.scheduler.fits(spec):
            raise DoesNotFit(f"{len(spec.tokens)} + {spec.max_tokens} tokens; room for {self.config.capacity_tokens}")
        if self.scheduler.num_waiting >= self.config.max_waiting:
            raise QueueFull(f"{self.config.max_waiting} sequences are waiting")
        self.scheduler.add(spec, submitted)

    def cancel(self, sequence_id: int) -> None:
        """Frees whatever the sequence holds, be it queued, importing, running or leased. Idempotent.

        The blocks may belong to another sequence at once: whoever fills an import must have stopped before, and what a
        reader copies out of them meanwhile is worthless."""
        self.scheduler.finish(sequence_id)

    def commit_import(self, sequence_id: int, first_token: int) -> None:
        """The KV cache of a DECODE sequence has arrived whole and verified. A sequence that first_token does not end
        yields the tokens after it. Raises RuntimeError unless the sequence is importing or gone."""
        self.scheduler.commit_import(sequence_id, first_token)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self, early: Callable[[list[Event]], None] | None = None) -> list[Event]:
        """One step of the batch; computes nothing if there is nothing to compute.

        Returns the step's events. Those that are known before it computes (admissions, joins, preemptions) go to
        `early` at once where that is given, so that a decode worker can get ready while the prefill runs."""
        plan, events = self.scheduler.schedule()
        if early is not None and events:
            early(events)
            events = []
        sampled = self._executor.execute(plan) if plan.sequences or plan.dropped else []
        return events + self.scheduler.update(plan, sampled)

    def blocks(self) -> dict[BlockState, int]:
        """How many blocks are in each state; they add up to the pool's size."""
        return {state: self.scheduler.pool.count(state) for state in BlockState}

    def check_integrity(self) -> None:
        """Raises RuntimeError if the books do not balance."""
        self.scheduler.check_integrity()
