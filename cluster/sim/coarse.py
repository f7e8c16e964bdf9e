"""Runs an engine with fewer events, for hundreds of workers: consecutive decode steps become one.

While a worker only decodes, each step takes the time of the step before plus that of one more token
of context for each sequence. So all steps until the next change are computed at once: until a
sequence ends, a request comes, or some time has passed. Everything else is the real engine.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from ...workers.engine.engine import Engine
from ...workers.engine.events import Event
from ...workers.engine.plan import Samples, SequenceStep, StepPlan
from ...workers.engine.update import update
from .cost import StepWork
from .engine import TOKEN, TimedExecutor, TimedRunner

_MOST_SECONDS: Final = 1.0
"""The longest time of steps that are computed at once; a worker that is killed loses their tokens.
"""


class _Decodes(NamedTuple):
    """Describes consecutive decode steps: the i-th takes `first` + i * `growth` seconds."""

    begin: float
    first: float
    growth: float
    length: int  # in steps

    def seconds(self, num_steps: int) -> float:
        return num_steps * (self.first + self.growth * (num_steps - 1) / 2)

    def steps_until(self, seconds: float) -> int:
        """Returns the number of steps that end at `seconds` or contain it, at least 1."""
        low, high = 1, self.length
        while low < high:
            middle = (low + high) // 2
            if self.seconds(middle) < seconds:
                low = middle + 1
            else:
                high = middle
        return low


class CoarseEngine(Engine):
    """An engine that can decode many steps at once. Not for `overlap`."""

    def count_steps(self) -> int:
        """Returns how many steps would only decode, each with the same sequences; 0 if unknown."""
        requests = self.requests
        running = requests.running
        if requests.waiting or requests.committed or not running:
            return 0
        if any(each.num_unscheduled != 1 or not each.num_generated for each in running):
            return 0
        num_steps = min(each.spec.max_tokens - each.num_generated for each in running)
        covered = sum(each.num_covered - each.num_scheduled for each in running)
        tables = self.config.tables
        spare_blocks = requests.pool.num_available - len(running) * len(tables)
        # A token takes a part of a block of each table.
        whole = requests.limits.alignment
        block_tokens = whole // sum(whole // table.block_size for table in tables)
        spare_tokens = covered + spare_blocks * block_tokens
        return max(min(num_steps, spare_tokens // len(running)), 0)

    def decode_work(self) -> StepWork:
        """Returns the work of the next decode step."""
        running = self.requests.running
        return StepWork(
            sequences=len(running), context_tokens=sum(each.num_scheduled + 1 for each in running)
        )

    def decode(self, num_steps: int, seconds: float, emit: Callable[[list[Event]], object]) -> None:
        """Applies decode steps at once, of `seconds` each: like a draft that is all accepted."""
        requests = self.requests
        requests.dropped.clear()
        steps = []
        for sequence in requests.running:
            start = sequence.num_scheduled
            requests.extend(sequence, start + num_steps)
            sequence.num_scheduled = start + num_steps
            step = SequenceStep(
                sequence_id=sequence.spec.id,
                token_ids=(TOKEN,) * num_steps,
                start=start,
                new_blocks=(),
                sampling=None,
                num_samples=num_steps,
                num_draft=num_steps - 1,
            )
            steps.append(step)
        self.step_seconds = seconds
        plan = StepPlan(sequences=tuple(steps), dropped=())
        samples = Samples(tokens=[TOKEN] * (num_steps * len(steps)))
        emit(update(requests, plan, samples))
        self.finish(None, emit)


class CoarseRunner(TimedRunner):
    """Steps a CoarseEngine."""

    def __init__(
        self,
        engine: CoarseEngine,
        executor: TimedExecutor,
        predict: Callable[[StepWork], float],
        *,
        on_step: Callable[[], object],
        on_decodes: Callable[[float], object],
        failed: Callable[[BaseException], object],
    ) -> None:
        """`predict` returns the seconds of a step.

        Calls `on_decodes` with the seconds of decode steps that the executor does not see.
        """
        super().__init__(engine, executor, on_step=on_step, failed=failed)
        self._coarse = engine
        self._predict = predict
        self._on_decodes = on_decodes
        self._run: _Decodes | None = None
        self._timer: asyncio.TimerHandle | None = None

    def post(self, command: Callable[[Engine], object]) -> None:
        """Runs `command(engine)` after the step that runs now."""
        super().post(command)
        if self._run is not None:
            self._shorten(self._run.steps_until(self._loop.time() - self._run.begin))

    def _begin(self) -> None:
        num_steps = self._coarse.count_steps()
        if num_steps < 2:
            super()._begin()
            return
        work = self._coarse.decode_work()
        later = replace(work, context_tokens=work.context_tokens + work.sequences)
        first = self._predict(work)
        growth = self._predict(later) - first
        run = self._run = _Decodes(self._loop.time(), first, growth, num_steps)
        self._is_running = True
        self._shorten(run.steps_until(_MOST_SECONDS))

    def _shorten(self, num_steps: int) -> None:
        assert self._run is not None
        self._run = run = self._run._replace(length=num_steps)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(run.begin + run.seconds(num_steps), self._end_run)

    def _end_run(self) -> None:
        run = self._run
        self._run = self._timer = None
        self._is_running = False
        if self._is_stopped or run is None:
            return
        seconds = run.seconds(run.length)
        self._on_decodes(seconds)
        try:
            self._coarse.decode(run.length, seconds / run.length, self._emit)
        except BaseException as error:
            self._fail(error)
            return
        self._on_step()
        self._turn()
