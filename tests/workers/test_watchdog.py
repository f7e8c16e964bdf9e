"""Tests when an engine is taken to hang, by a clock of the test's own."""

from collections.abc import Callable

from tandem.workers.engine.plan import Executor, OnLayers, Samples, StepPlan
from tandem.workers.serve.watchdog import Watchdog, WatchedExecutor


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def stalled_after(progress: Watchdog, clock: Clock, *, looks: int, seconds: float = 2.0) -> float:
    """What the last of so many looks returns, each so long after the one before."""
    stalled = 0.0
    for _ in range(looks):
        clock.now += seconds
        stalled = progress.stalled_seconds()
    return stalled


def test_a_step_stalls_from_its_beginning_on() -> None:
    clock = Clock()
    progress = Watchdog(clock)
    assert stalled_after(progress, clock, looks=10) == 0
    clock.now += 1.5
    progress.mark()
    assert stalled_after(progress, clock, looks=1, seconds=0.5) == 0.5
    assert stalled_after(progress, clock, looks=5) == 10.5


def test_progress_and_rest_begin_anew() -> None:
    clock = Clock()
    progress = Watchdog(clock)
    for end in (progress.mark, progress.rest):
        progress.mark()
        assert stalled_after(progress, clock, looks=4) == 8
        end()
        assert stalled_after(progress, clock, looks=1, seconds=0.0) == 0
    assert stalled_after(progress, clock, looks=10) == 0


def test_idle_time_counts_from_the_last_step() -> None:
    class NoLayers(Executor):
        def launch(
            self, plan: StepPlan, on_layers: OnLayers | None = None
        ) -> Callable[[], Samples]:
            return lambda: Samples(tokens=[])

    clock = Clock()
    progress = Watchdog(clock)
    clock.now += 5
    assert progress.idle_seconds() == 5
    progress.mark()
    clock.now += 5
    assert progress.idle_seconds() == 0
    progress.rest()  # after a command without a step
    clock.now += 2
    assert progress.idle_seconds() == 12
    progress.mark()
    collect = WatchedExecutor(NoLayers(), progress).launch(StepPlan(sequences=(), dropped=()))
    clock.now += 3
    collect()
    progress.rest()
    clock.now += 2
    assert progress.idle_seconds() == 2
    assert list(progress.steps) == [(3.0, 0)]


def test_a_pause_of_the_process_is_no_stall() -> None:
    clock = Clock()
    progress = Watchdog(clock)
    progress.mark()
    assert stalled_after(progress, clock, looks=1, seconds=600) == 4
    progress.mark()
    assert stalled_after(progress, clock, looks=1) == 2


def test_a_long_step_makes_progress_with_its_layers() -> None:
    class ThreeLayers(Executor):
        def launch(
            self, plan: StepPlan, on_layers: OnLayers | None = None
        ) -> Callable[[], Samples]:
            assert on_layers is not None
            for layer in (1, 2, 3):
                stalls.append(stalled_after(progress, clock, looks=3))
                on_layers(layer)
            return lambda: Samples(tokens=[])

    clock = Clock()
    progress = Watchdog(clock)
    stalls: list[float] = []
    layers: list[int] = []
    executor = WatchedExecutor(ThreeLayers(), progress)
    progress.mark()
    executor.launch(StepPlan(sequences=(), dropped=()), layers.append)
    executor.launch(StepPlan(sequences=(), dropped=()))
    assert (stalls, layers) == ([6.0] * 6, [1, 2, 3])
