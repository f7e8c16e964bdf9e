"""Runs the real engine on virtual time: an executor that takes time, and a runner without a thread.

An executor knows at once when its step will end. The runner lets the engine wait until then.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from ...workers.engine.engine import Engine, LaunchedStep
from ...workers.engine.events import Event
from ...workers.engine.plan import Executor, OnLayers, Samples, StepPlan
from ...workers.serve.engine_thread import EngineRunner
from .transfers import NUM_LAYERS

TOKEN = 0
"""Every sampled token; it finishes no sequence."""


class TimedExecutor(Executor):
    """Executes plans one after another, each for the seconds that a function predicts."""

    def __init__(self, predict: Callable[[StepPlan], float], *, reports_layers: bool) -> None:
        """`reports_layers`: call `on_layers` while a step runs, as executors without overlap do."""
        self._predict = predict
        self._reports_layers = reports_layers
        self._loop = asyncio.get_running_loop()
        self._free_at = 0.0
        self._ends: deque[float] = deque()  # of the steps that are not collected

    @property
    def next_end(self) -> float:
        """Returns the time at which the oldest step that is not collected ends."""
        return self._ends[0]

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        seconds = self._predict(plan) if plan.sequences else 0.0
        begin = max(self._loop.time(), self._free_at)
        self._free_at = begin + seconds
        self._ends.append(self._free_at)
        if on_layers is not None and self._reports_layers and plan.num_prompt_tokens:
            for num_layers in range(1, NUM_LAYERS):
                at = begin + seconds * num_layers / NUM_LAYERS
                self._loop.call_at(at, on_layers, num_layers)
        return partial(self._collect, sum([step.num_samples for step in plan.sequences]))

    def _collect(self, num_samples: int) -> Samples:
        self._ends.popleft()
        return Samples(tokens=[TOKEN] * num_samples)


class TimedRunner(EngineRunner):
    """Steps an engine in the event loop, as EngineThread does in its thread."""

    def __init__(
        self,
        engine: Engine,
        executor: TimedExecutor,
        *,
        on_step: Callable[[], object],
        failed: Callable[[BaseException], object],
    ) -> None:
        """Calls `on_step` after each step, and `failed` once if a step or a command raises."""
        super().__init__(engine)
        self.num_turns = 0  # of the engine: while it is the same, so is the worker's load
        self._executor = executor
        self._on_step = on_step
        self._failed = failed
        self._deliver: Callable[[list[Event]], object] = lambda events: None
        self._commands: deque[Callable[[Engine], object]] = deque()
        self._is_due = False  # `_turn` will run
        self._is_running = False  # a step runs
        self._is_stopped = False

    def start(self, deliver: Callable[[list[Event]], object]) -> None:
        """Sets the function that gets the events, in order."""
        self._deliver = deliver

    @property
    def is_busy(self) -> bool:
        """Returns True while a step runs."""
        return self._is_running

    def stop(self) -> None:
        """Ends the engine at once."""
        self._is_stopped = True
        if not self._ended.done():
            self._ended.set_result(None)

    def post(self, command: Callable[[Engine], object]) -> None:
        """Runs `command(engine)` before the engine's next step."""
        self._commands.append(command)
        if not self._is_running and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._turn)

    def call_in_loop(self, callback: Callable[[], None]) -> None:
        """Runs `callback` in the event loop."""
        self._loop.call_soon(callback)

    def _emit(self, events: list[Event]) -> None:
        self._loop.call_soon(self._deliver, events)

    def _turn(self) -> None:
        """Runs the posted commands and begins a step, if there is work."""
        self._is_due = False
        self.num_turns += 1
        try:
            while self._commands and not self._is_stopped:
                self._commands.popleft()(self._engine)
            if not self._is_stopped and self._engine.has_work:
                self._begin()
        except BaseException as error:
            self._fail(error)

    def _begin(self) -> None:
        """Launches a step; without one, the engine gets another turn."""
        launched = self._engine.launch(self._emit)
        if launched is not None:
            self._is_running = True
            self._loop.call_at(self._executor.next_end, self._end, launched)
            return
        self._engine.finish(None, self._emit)
        self._is_due = True
        self._loop.call_soon(self._turn)

    def _end(self, launched: LaunchedStep) -> None:
        """Ends a step, and begins the next one."""
        self._is_running = False
        if self._is_stopped:
            return
        try:
            self._engine.finish(launched, self._emit)
        except BaseException as error:
            self._fail(error)
            return
        self._on_step()
        self._turn()

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self.stop()
        self._failed(error)
