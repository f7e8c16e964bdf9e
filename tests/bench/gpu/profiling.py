"""Lists the kernels of a step by their time, and the gaps between them."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from torch.profiler import ProfilerActivity, profile

from tandem.tests.bench.engine.steps import blocks_for
from tandem.tests.bench.gpu.bench import NEEDS_GPU, Bench
from tandem.tests.workers.model.helpers import Driver, prompt
from tandem.workers.model.costs.measure import synchronize

_MAX_KERNELS: Final = 12
_STEPS: Final = 10


def measure(bench: Bench) -> None:
    """Profiles decodes of several batches, and chunks at the begin and the end of a long prompt."""
    batches = bench.pick((1, 32, 256), (1, 3))
    context = bench.pick(1024, 64)
    late = bench.pick(30_720, 128)
    blocks = max(blocks_for(max(batches), context, 3 * _STEPS), (late + bench.chunk) // 16 + 2)
    runner = bench.load(blocks)
    for batch in batches:
        _profile(bench, f"{batch} decodes", partial(runner.decode, batch, context, _STEPS))
    for start in (0, late):
        driver = Driver(runner.runner)
        step = driver.step(1, prompt(bench.chunk), start)
        _profile(bench, f"chunk of {bench.chunk} at {start}", partial(driver.run, step))
        driver.drop(1)


def _profile(bench: Bench, name: str, function: Callable[[], object]) -> None:
    function()
    synchronize(bench.torch_device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.is_gpu else [])]
    with profile(activities=activities) as found:
        function()
        synchronize(bench.torch_device)
    column = "self_device_time_total" if bench.is_gpu else "self_cpu_time_total"
    events: list[Any] = sorted(found.key_averages(), key=lambda event: -getattr(event, column))
    total = sum(getattr(event, column) for event in events)
    for event in events[:_MAX_KERNELS]:
        microseconds = float(getattr(event, column))
        bench.row(
            f"{name}: {event.key[:60]}",
            calls=event.count,
            ms=microseconds / 1e3,
            share=microseconds / max(total, 1),
        )
    if not bench.is_gpu:
        bench.row(f"{name}: gaps between kernels", note=NEEDS_GPU)
        return
    ranges = sorted(
        (event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type.name == "CUDA"
    )
    if ranges:
        span = max(end for _, end in ranges) - ranges[0][0]
        bench.row(
            f"{name}: gaps between kernels",
            share=1 - _covered(ranges) / max(span, 1),
            ms=span / 1e3,
        )


def _covered(ranges: list[tuple[float, float]]) -> float:
    """Returns the length of the union of sorted ranges."""
    covered = 0.0
    reached = float("-inf")
    for start, end in ranges:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
