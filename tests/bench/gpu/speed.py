"""Measures decode, prefill and the host's share of a step, with the engine's benchmark."""

import statistics
import threading
from dataclasses import asdict

from tandem.tests.bench.engine import __main__ as engine
from tandem.tests.bench.engine.options import parse
from tandem.tests.bench.engine.report import DecodeFigure, PrefillFigure
from tandem.tests.bench.engine.steps import blocks_for
from tandem.tests.bench.gpu.bench import Bench, Stopwatch
from tandem.tests.workers.model.helpers import Driver, prompt
from tandem.workers.engine.plan import SequenceStep, StepPlan
from tandem.workers.model.runner import ModelRunner

_STEPS = 20


def decode(bench: Bench) -> None:
    """Measures decode steps of growing batches, at two contexts, and with exact numerics."""
    short, long = bench.pick(("1024", "8192"), ("64", "128"))
    _engine(bench, "decode", batches=bench.pick("1,8,32,64,128,256", "1,3"), context=short)
    _engine(bench, "decode", batches=bench.pick("1,32", "1"), context=long)
    batches = bench.pick("32", "1")
    _engine(bench, "exact", batches=batches, context=short, others=("--batch-invariant",))


def prefill(bench: Bench) -> None:
    """Measures single prompts."""
    _engine(bench, "prefill", prompts=bench.pick("512,2048,8192,32768", "40,90"))


def moe(bench: Bench) -> None:
    """Measures a mixture of experts; its floor reads every expert once a step."""
    shape = bench.pick("qwen3-30b-a3b", "tiny-moe")
    batches = bench.pick("1,32", "1,3")
    prompts = bench.pick("2048", "40")
    context = bench.pick("1024", "64")
    _engine(bench, shape, shape=shape, batches=batches, context=context, prompts=prompts)


def _engine(
    bench: Bench,
    name: str,
    *,
    shape: str | None = None,
    batches: str | None = None,
    context: str = "64",
    prompts: str | None = None,
    others: tuple[str, ...] = (),
) -> None:
    """Runs the engine's benchmark and records decodes if `batches` are given, and so on."""

    def record(figure: DecodeFigure | PrefillFigure) -> None:
        known = {key: value for key, value in asdict(figure).items() if value not in (None, {})}
        if isinstance(figure, DecodeFigure) and batches:
            size = f"batch {known.pop('batch')}, context {known.pop('context')}"
            bench.row(f"{name}: {size}", **known)
        if isinstance(figure, PrefillFigure) and prompts:
            bench.row(f"{name}: prompt of {known.pop('prompt')}", **known)

    model = ("--shape", shape or bench.shape, "--random-weights", "--device", bench.device)
    sizes = ("--batches", batches or "1", "--context", context, "--prompts", prompts or "32")
    engine.measure(parse([*model, *sizes, *others]), record)


def host(bench: Bench) -> None:
    """Measures the time that the host takes to launch a step, with and without graphs."""
    batches = bench.pick((1, 32, 256), (1, 3))
    context = bench.pick(1024, 32)
    mixed = bench.pick(512, 20)
    blocks = blocks_for(max(batches), context, 4 * _STEPS) + -(-mixed // 16) * (_STEPS + 2)
    runner = bench.load(blocks).runner
    graphs = runner._graphs
    for batch in batches:
        for kind in ("graphs", "eager") if graphs else ("eager",):
            runner._graphs = graphs if kind == "graphs" else None
            bench.row(f"launch of {batch} decodes, {kind}", ms=_launch_ms(runner, batch, context))
    runner._graphs = graphs
    few = min(32, max(batches))
    bench.row(
        f"launch of {few} decodes and a chunk of {mixed}",
        ms=_launch_ms(runner, few, context, mixed),
    )
    _beside_a_busy_thread(bench, runner, few, context)


def _launch_ms(runner: ModelRunner, batch: int, context: int, chunk: int = 0) -> float:
    """Returns the median time of a call of `launch`, whose step ends outside the time."""
    driver = Driver(runner)
    tokens = prompt(chunk) if chunk else []
    times = []
    for index in range(_STEPS):
        steps = _decodes(driver, batch, context + index)
        if chunk:
            steps.append(driver.step(1000 + index, tokens, 0))
        plan = StepPlan(sequences=tuple(steps), dropped=())
        clock = Stopwatch()
        collect = runner.launch(plan)
        times.append(clock.ms)
        collect()
    runner.launch(StepPlan(sequences=(), dropped=tuple(driver.tables)))()
    return statistics.median(times[2:])


def _decodes(driver: Driver, batch: int, at: int) -> list[SequenceStep]:
    return [driver.step(number, [7], at) for number in range(batch)]


def _beside_a_busy_thread(bench: Bench, runner: ModelRunner, batch: int, context: int) -> None:
    """Measures how much longer a step takes beside a thread that computes in Python."""
    done = threading.Event()

    def spin() -> None:
        while not done.is_set():
            sum(range(100))

    thread = threading.Thread(target=spin, daemon=True)
    try:
        for name in ("alone", "beside a busy thread"):
            if name != "alone":
                thread.start()
            driver = Driver(runner)
            clock = Stopwatch()
            for index in range(_STEPS):
                steps = tuple(_decodes(driver, batch, context + index))
                runner.launch(StepPlan(sequences=steps, dropped=()))()
            bench.row(f"step of {batch} decodes, {name}", ms=clock.ms / _STEPS)
            runner.launch(StepPlan(sequences=(), dropped=tuple(driver.tables)))()
    finally:
        done.set()
    thread.join()
