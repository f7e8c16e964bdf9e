"""Times engines on one loaded model, step by step."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch

from tandem.tests.bench.engine.adapters import random_adapter
from tandem.workers.engine.config import Budgets, EngineConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import Event, NewTokens
from tandem.workers.engine.plan import (
    Executor,
    FirstTokens,
    OnLayers,
    Samples,
    SamplingParams,
    StepPlan,
)
from tandem.workers.engine.sequence import SequenceSpec, Task
from tandem.workers.kv_cache.layout import KvLayout
from tandem.workers.kv_cache.tables import TableSpec
from tandem.workers.model.adapter import AdapterTable
from tandem.workers.model.attention.quantized_cache import quantize
from tandem.workers.model.config import ModelConfig
from tandem.workers.model.costs.measure import synchronize
from tandem.workers.model.device import DTYPES
from tandem.workers.model.footprint import state_tokens
from tandem.workers.model.kv.gpu import split_scales
from tandem.workers.model.kv.store import PagedKv
from tandem.workers.model.loader import ReadWeight, build_model, load_weights
from tandem.workers.model.runner import ModelRunner

BLOCK_SIZE: Final = 16
WARMUP_STEPS: Final = 4
PARTS: Final = ("schedule", "prepare", "model", "sample", "emit")
"""The parts of an engine step.

`schedule` makes the plan. `prepare` builds the flat batch from it. `model` ends with the logits.
`sample` ends with the tokens on the host. `emit` updates sequences and makes the events. If steps
overlap, a call collects the tokens of the step before, and only the sum of the parts is meaningful.
"""
_PREFILL_SECONDS: Final = 2.0  # prompts are repeated for about this time
_PREFILL_RUNS: Final = (2, 5)  # minimum and maximum number of runs


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRun:
    """Holds the times of a batch's decode steps after the warm-up."""

    context: float  # mean number of positions that a token attends to
    steps: list[dict[str, float]]  # seconds of each of PARTS
    sampled: list[list[int]]  # tokens of each step, including the warm-up


class BenchRunner(Executor):
    """Holds a model with KV memory, on which engines run one after the other.

    The KV memory holds noise. So a decode can begin at any context without a prefill, as it does
    after a KV transfer.
    """

    def __init__(
        self,
        config: ModelConfig,
        read: ReadWeight,
        *,
        dtype: str,
        cache_dtype: str = "auto",
        device: torch.device,
        num_blocks: int,
        chunk: int,
        exact: bool,
        batch_invariant: bool = False,
        lora_rank: int | None = None,
        num_states: int = 0,
        on_loaded: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """Loads the model and fills its KV memory with noise.

        `chunk` is the maximum number of tokens of a prefill step. `exact` waits for a GPU at every
        mark. Then the times of the parts are exact, but the steps are slower and do not overlap.
        `lora_rank` is the rank of an adapter that all sequences use. `num_states` is the number of
        states of a model that keeps any. `on_loaded` is called with "weights", "KV cache" and
        "warm-up" when these are done.
        """
        self._chunk = chunk
        self._exact = exact
        self._device = device
        self._marks: dict[str, float] = {}
        model = build_model(
            config, DTYPES[dtype], batch_invariant=batch_invariant, device_type=device.type
        )
        load_weights(model, read, device)
        on_loaded("weights")
        layout = KvLayout(layers=config.layers, dtype=dtype, model="", cache_dtype=cache_dtype)
        kv = PagedKv(
            layout,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            device=device,
            num_states=num_states,
        )
        _fill_with_noise(kv)
        on_loaded("KV cache")
        adapters = AdapterTable(
            model.lora, dtype=DTYPES[dtype], device=device, batch_invariant=batch_invariant
        )
        self.adapter = 0 if lora_rank is None else 1  # the number of the adapter in use
        if lora_rank is not None:
            adapters.load(self.adapter, random_adapter(config, lora_rank))
        self.runner = ModelRunner(
            config,
            model,
            kv,
            on_stage=self._mark,
            batch_invariant=batch_invariant,
            adapters=adapters,
        )
        self.runner.warmup()
        on_loaded("warm-up")
        self.code = model.code
        self._vocab_size = config.vocab_size
        self._num_blocks = num_blocks
        self._sampled: list[list[int]] = []

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        self._marks = {}
        self._mark("prepare")
        wait = self.runner.launch(plan, on_layers)
        if not plan.sequences:
            return wait

        def collect() -> Samples:
            samples = wait()
            self._mark("emit")
            self._sampled.append(samples.tokens)
            return samples

        return collect

    def prompt(self, num_tokens: int, seed: int) -> tuple[int, ...]:
        """Returns random tokens; no two seeds share a prefix block."""
        return tuple(
            random.Random(f"{num_tokens} {seed}").choices(range(self._vocab_size), k=num_tokens)
        )

    def decode(self, batch: int, context: int, steps: int) -> DecodeRun:
        """Decodes `batch` sequences that hold `context` tokens each, through a whole engine."""
        engine = self._engine(batch)
        self._sampled = []
        for index in range(batch):
            engine.submit(
                self._spec(
                    index, Task.DECODE, self.prompt(context, index), WARMUP_STEPS + steps + 2
                )
            )
        engine.step()  # admits them, as after a KV transfer
        for index in range(batch):
            engine.commit_import(index, FirstTokens(tokens=(index % self._vocab_size,)))
        times = [self._step(engine) for _ in range(WARMUP_STEPS + steps)]
        for index in range(batch):
            engine.cancel(index)
        while engine.has_work:
            engine.step()
        seen = context + WARMUP_STEPS + (steps + 1) / 2
        return DecodeRun(context=seen, steps=times[WARMUP_STEPS:], sampled=self._sampled)

    def prefill(self, num_tokens: int) -> tuple[float, int]:
        """Returns the seconds from a single prompt's submission to its first token, and the token.

        The seconds are the median of several prompts; the token is the first prompt's.
        """
        self._prefill(min(num_tokens, 2 * self._chunk), seed=-1)  # warm-up
        seconds: list[float] = []
        tokens: list[int] = []
        least, most = _PREFILL_RUNS
        while len(seconds) < least or (len(seconds) < most and sum(seconds) < _PREFILL_SECONDS):
            begin = time.perf_counter()
            tokens.append(self._prefill(num_tokens, seed=len(seconds)))
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds), tokens[0]

    def _prefill(self, num_tokens: int, seed: int) -> int:
        engine = self._engine(1)
        engine.submit(self._spec(0, Task.COLOCATED, self.prompt(num_tokens, seed), 1))
        events: list[Event] = []
        while engine.has_work:
            events += engine.step()
        return next(event.token_ids[0] for event in events if isinstance(event, NewTokens))

    def _engine(self, batch: int) -> Engine:
        states = self.runner.kv.states
        config = EngineConfig(
            num_blocks=self._num_blocks,
            num_states=states.num_slots if states else 0,
            state_tokens=state_tokens(self.runner.kv.layout, 1),
            block_size=BLOCK_SIZE,
            tables=self.runner.kv.tables,
            overlap=self.runner.launches_ahead and not self._exact,
            budgets=Budgets(chunk_tokens=max(self._chunk, batch), max_sequences=batch),
        )
        return Engine(self, config)

    def _step(self, engine: Engine) -> dict[str, float]:
        begin = time.perf_counter()
        engine.step()
        end = time.perf_counter()
        marks = {"emit": end} | self._marks  # with overlap, the first step collects nothing
        times = [begin, *(marks[name] for name in PARTS[1:]), end]
        return {
            name: after - before
            for name, (before, after) in zip(PARTS, pairwise(times), strict=True)
        }

    def _spec(
        self, index: int, task: Task, prompt: tuple[int, ...], max_tokens: int
    ) -> SequenceSpec:
        greedy = SamplingParams(temperature=0.0)
        return SequenceSpec(
            id=index,
            task=task,
            tokens=prompt,
            max_tokens=max_tokens,
            sampling=greedy,
            adapter=self.adapter,
        )

    def _mark(self, name: str) -> None:
        if self._exact:
            synchronize(self._device)
        self._marks[name] = time.perf_counter()


def _fill_with_noise(kv: PagedKv) -> None:
    """Fills the keys and values of all layers; layers of equal shape get equal numbers."""
    generator = torch.Generator(kv.device).manual_seed(0)
    attending = [
        (geometry, parts)
        for geometry, parts in zip(kv.layout.layers, kv.layers, strict=True)
        if parts
    ]
    for index, (geometry, parts) in enumerate(attending):
        for part, first in zip(parts, attending[0][1], strict=True):
            if part.shape == first.shape and index:
                part.copy_(first)
            elif kv.is_quantized:
                size = (*part.shape[:-1], geometry.head_dim)
                noise = torch.randn(size, generator=generator, device=kv.device)
                _write(part, quantize(noise, kv.layout.cache_dtype), geometry.head_dim)
            else:
                part.normal_(generator=generator)


def _write(part: torch.Tensor, rows: torch.Tensor, head_dim: int) -> None:
    """Writes quantized rows, each of which has its numbers and then its scale."""
    if part.is_cuda:  # there the scales of a slot follow all of its numbers
        numbers, scales = split_scales(part, head_dim)
        numbers.copy_(rows[..., :head_dim].view(numbers.dtype))
        scales.copy_(rows[..., head_dim:].contiguous().view(torch.bfloat16)[..., 0])
    else:
        part.copy_(rows)


def states_for(config: ModelConfig, batch: int) -> int:
    """Returns the number of states that `batch` sequences need; a step writes other ones."""
    return 2 * batch + 2 if any(layer.states for layer in config.layers) else 0


def blocks_for(batch: int, context: int, steps: int, tables: Sequence[TableSpec] = ()) -> int:
    """Returns a number of KV blocks that is enough for `BenchRunner.decode`.

    `tables` are those of the model; empty stands for one table of all tokens.
    """
    return batch * blocks_of(context + WARMUP_STEPS + steps + 2, tables)


def blocks_of(num_tokens: int, tables: Sequence[TableSpec] = ()) -> int:
    """Returns the number of blocks of a sequence if no block leaves a window."""
    sizes = [table.block_size for table in tables] or [BLOCK_SIZE]
    return sum(-(-num_tokens // size) for size in sizes)
