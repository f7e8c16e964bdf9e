"""Compares tokens of random requests between graphs, eager steps and the CPU, in float32."""

import random
from collections.abc import Sequence
from typing import Final

import torch

from tandem.tests.bench.engine.shapes import SHAPES, random_weight
from tandem.tests.bench.engine.steps import BenchRunner
from tandem.tests.bench.gpu.bench import NEEDS_GPU, Bench, Stopwatch
from tandem.tests.workers.model.helpers import prompt
from tandem.workers.engine.config import Budgets, EngineConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import NewTokens
from tandem.workers.engine.plan import SamplingParams
from tandem.workers.engine.sequence import SequenceSpec, Task
from tandem.workers.model.module import WeightSlice

_NUM_BLOCKS: Final = 256
_SEQUENCES: Final = 12


def measure(bench: Bench) -> None:
    """Runs seeds until three quarters of the time are over; fails at the first difference."""
    runners = {"cpu": _load(torch.device("cpu"))}
    if bench.is_gpu:
        runners |= {"graphs": _load(bench.torch_device), "eager": _load(bench.torch_device)}
        runners["eager"].runner._graphs = None
    else:
        bench.row("graphs against eager steps", note=NEEDS_GPU)
        runners["cpu, short chunks"] = _load(torch.device("cpu"))
    seconds = bench.pick(bench.seconds * 0.75, 1.0)
    clock = Stopwatch()
    seed = 0
    while clock.seconds < seconds:
        found = {
            name: _tokens(runner, seed, chunk=20 if "short" in name else 48)
            for name, runner in runners.items()
        }
        for name, tokens in found.items():
            if tokens != found["cpu"]:
                bench.row("difference", seed=seed, of=name)
                raise RuntimeError(f"seed {seed}: {name} gives other tokens than the CPU")
        seed += 1
    replays = {name: runner.runner.num_graph_replays() for name, runner in runners.items()}
    bench.row("equal tokens", seeds=seed, sequences=seed * _SEQUENCES, graph_replays=replays)
    if bench.is_gpu:
        bench.check_graphs(runners["graphs"].runner)


def _load(device: torch.device) -> BenchRunner:
    return BenchRunner(
        SHAPES["tiny"],
        read_weight,
        dtype="float32",
        device=device,
        num_blocks=_NUM_BLOCKS,
        chunk=64,
        exact=False,
    )


def read_weight(part: WeightSlice, target: torch.Tensor) -> None:
    """Implements `ReadWeight`: a weight has the same numbers on every device.

    They are drawn on the CPU, because a GPU's generator gives other numbers for the same seed.
    """
    drawn = torch.empty(part.local_shape, dtype=target.dtype)
    random_weight(part, drawn)
    target.copy_(drawn)


def _tokens(runner: BenchRunner, seed: int, chunk: int) -> dict[int, Sequence[int]]:
    """Returns the tokens of sequences that come one by one, greedy and sampled."""
    numbers = random.Random(seed)
    budgets = Budgets(chunk_tokens=chunk, mixed_chunk_tokens=chunk // 2, max_sequences=8)
    overlap = runner.runner.launches_ahead
    config = EngineConfig(
        num_blocks=_NUM_BLOCKS, tables=runner.runner.kv.tables, overlap=overlap, budgets=budgets
    )
    engine = Engine(runner.runner, config)
    pending = [
        SequenceSpec(
            id=number,
            task=Task.COLOCATED,
            tokens=tuple(prompt(numbers.randint(1, 90), numbers.randint(0, 2**20))),
            max_tokens=numbers.randint(1, 30),
            sampling=SamplingParams(
                temperature=numbers.choice((0.0, 0.7, 1.0)),
                top_p=numbers.choice((1.0, 0.8)),
                seed=number,
            ),
            stop_ids=frozenset({5, 77}),
        )
        for number in range(_SEQUENCES)
    ]
    tokens: dict[int, list[int]] = {each.id: [] for each in pending}
    while pending or engine.has_work:
        if pending and numbers.random() < 0.5:
            engine.submit(pending.pop())
        for event in engine.step():
            if isinstance(event, NewTokens):
                tokens[event.id] += event.token_ids
    engine.check_integrity()
    return dict(tokens)
