"""A plan-level driver of a ModelRunner: prompts in, logits or tokens out, with scrambled block
tables.
"""

import json
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.utils import logging

from tandem.tests.workers.spans import read_now, span
from tandem.workers.engine.plan import (
    SampledLogprobs,
    Samples,
    SamplingParams,
    SequenceStep,
    StatePlan,
    StepPlan,
)
from tandem.workers.kv_cache.layout import KvSpan
from tandem.workers.kv_cache.tables import TableBlocks
from tandem.workers.model.checkpoint import Checkpoint
from tandem.workers.model.kv.store import PagedKv
from tandem.workers.model.loader import open_checkpoint
from tandem.workers.model.runner import ModelRunner
from tandem.workers.model.sampling.gumbel import sample

logging.disable_progress_bar()  # type: ignore[no-untyped-call]

GREEDY = SamplingParams(temperature=0.0)

# rope_parameters of every scaling; the tiny models' 2,048 positions are pretended to be stretched
# from 64.
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 64,
    },
}


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Random token ids, without the two special ones."""
    return random.Random(f"{num_tokens} {seed}").choices(range(2, 512), k=num_tokens)


def reference(folder: Path) -> torch.nn.Module:
    """The same model in transformers, float32, with the plainest attention."""
    config = json.loads((folder / "config.json").read_text())
    name = "AutoModelForCausalLM"
    if "text_config" in config:  # that class would build the text model alone
        name = config["architectures"][0]
    kind = getattr(transformers, name)
    model: torch.nn.Module = kind.from_pretrained(folder, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def reference_logits(model: torch.nn.Module, token_ids: Sequence[int]) -> torch.Tensor:
    """[num_tokens, vocab_size]"""
    logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits


def reference_greedy(
    model: torch.nn.Module, token_ids: Sequence[int], num_tokens: int
) -> list[int]:
    ids = torch.tensor([list(token_ids)])
    output = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    tokens: list[int] = output[0, len(token_ids) :].tolist()
    return tokens


def copy_state(source: PagedKv, slot: int, target: PagedKv, target_slot: int) -> None:
    """Copies a state to the cache of another runner, group by group."""
    for number, group in enumerate(source.layout.groups):
        if group.part.state:
            part = KvSpan(
                group=number,
                first_layer=0,
                num_layers=len(group.layers),
                first_token=0,
                num_tokens=1,
                first_slot=0,
                num_slots=source.num_slots(number),
            )
            data = read_now(source, TableBlocks((slot,)), part)
            target.write(TableBlocks((target_slot,)), part, data)


class Driver:
    """Feeds sequences to a runner, giving out blocks in a random order, as a scheduler would."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.free = list(range(runner.kv.num_blocks))
        random.Random(seed).shuffle(self.free)
        self.tables: dict[int, list[int]] = {}  # the first table; -1: a block has left the window
        self._others: dict[int, list[list[int]]] = {}  # the other tables
        num_states = runner.kv.states.num_slots if runner.kv.states else 0
        self.free_states = list(range(num_states))
        random.Random(seed).shuffle(self.free_states)
        self.states: dict[int, dict[int, int]] = {}  # by position: the slots with the state there
        self.imported: dict[int, int] = {}  # the slots of states that `copy_to` writes

    def step(
        self,
        sequence_id: int,
        token_ids: Sequence[int],
        start: int,
        sampling: SamplingParams = GREEDY,
        **fields: Any,
    ) -> SequenceStep:
        """The plan of one sequence's next tokens; the sequence is new if it has no block yet, and
        then the tokens are its whole prompt, unless `fields` of the step say otherwise.
        """
        is_new = sequence_id not in self.tables
        self.tables.setdefault(sequence_id, [])
        specs = self.runner.kv.tables
        self._others.setdefault(sequence_id, [[] for _ in specs[1:]])
        new: list[TableBlocks] = []
        for spec, table in zip(specs, self._all(sequence_id), strict=True):
            first = max(start + 1 - (spec.window or start + 1), 0) // spec.block_size
            # The next new block may be one that has just left the window.
            self.free += [block for block in table[:first] if block >= 0]
            table[:first] = [-1] * first
            num_blocks = -(-(start + len(token_ids)) // spec.block_size)
            blocks = [self.free.pop() for _ in range(num_blocks - len(table))]
            new.append(TableBlocks(tuple(blocks), len(table)))
            table += blocks
        if is_new and sampling.needs_history:
            fields = {"history": tuple(token_ids), "num_prompt": len(token_ids)} | fields
        values: dict[str, Any] = {"sampling": sampling if is_new else None, "num_samples": 1}
        return SequenceStep(
            sequence_id=sequence_id,
            token_ids=tuple(token_ids),
            start=start,
            new_blocks=tuple(new) if any(each.blocks for each in new) else (),
            state=self._plan_state(sequence_id, start, len(token_ids), fields.get("num_draft", 0)),
            **(values | fields),
        )

    def _plan_state(
        self, sequence_id: int, start: int, num_tokens: int, num_draft: int
    ) -> StatePlan | None:
        """The slots of a step: it continues from the state at `start`, maybe within a draft."""
        if not self.free_states:
            return None
        known = self.states.pop(sequence_id, {})
        if start and not known:
            known[start] = self.imported[sequence_id] = self.free_states.pop(0)
        counts = range(num_tokens - num_draft, num_tokens + 1)
        targets = [(count, self.free_states.pop(0)) for count in counts]
        # At the end of the list, because no step of the plan may write to a slot that one reads.
        self.free_states += known.values()
        self.states[sequence_id] = {start + count: slot for count, slot in targets}
        return StatePlan(known[start] if start else None, tuple(targets))

    def table(self, sequence_id: int, layer: int) -> TableBlocks:
        """The block table of a layer, from the first block that is held."""
        table = self._all(sequence_id)[self.runner.kv.table_of_layer[layer]]
        return TableBlocks(tuple(block for block in table if block >= 0), table.count(-1))

    def copy_to(self, other: "Driver", sequence_id: int, num_tokens: int) -> None:
        """Copies what another runner needs of a sequence's KV cache to compute its next token."""
        source, target = self.runner.kv, other.runner.kv
        if source.states:
            slot = self.states[sequence_id][num_tokens]
            copy_state(source, slot, target, other.imported[sequence_id])
        for layer, part in self.needed_parts(num_tokens):
            moved = read_now(source, self.table(sequence_id, layer), part)
            target.write(other.table(sequence_id, layer), part, moved)

    def needed_parts(self, num_tokens: int) -> Iterator[tuple[int, KvSpan]]:
        """Yields the layers that keep tokens, and what the next token sees of their KV cache."""
        kv = self.runner.kv
        for layer, geometry in enumerate(kv.layout.layers):
            first = max(num_tokens + 1 - (geometry.window or num_tokens + 1), 0)
            if geometry.keeps_tokens and first < num_tokens:
                yield layer, span(kv, first, num_tokens - first, layer, 1)

    def _all(self, sequence_id: int) -> list[list[int]]:
        return [self.tables[sequence_id], *self._others.get(sequence_id, [])]

    def sample(self, *steps: SequenceStep, **fields: Any) -> Samples:
        """Carries out a plan of these steps."""
        return self.runner.launch(StepPlan(sequences=steps, **({"dropped": ()} | fields)))()

    def run(self, *steps: SequenceStep, dropped: Sequence[int] = ()) -> list[int]:
        return self.sample(*steps, dropped=tuple(dropped)).tokens

    def drop(self, sequence_id: int) -> None:
        for table in self._all(sequence_id):
            self.free += [block for block in table if block >= 0]
        del self.tables[sequence_id]
        self._others.pop(sequence_id, None)
        self.free_states += self.states.pop(sequence_id, {}).values()
        random.Random(sequence_id).shuffle(self.free)
        self.run(dropped=[sequence_id])

    def drop_all(self) -> None:
        """Drops every sequence, so that another driver may have the runner."""
        for sequence_id in list(self.tables):
            self.drop(sequence_id)

    def generate(
        self,
        sequence_id: int,
        token_ids: Sequence[int],
        num_tokens: int,
        sampling: SamplingParams = GREEDY,
    ) -> list[int]:
        """Prefills in one step, then decodes alone."""
        tokens = self.run(self.step(sequence_id, token_ids, 0, sampling))
        while len(tokens) < num_tokens:
            start = len(token_ids) + len(tokens) - 1
            tokens += self.run(self.step(sequence_id, tokens[-1:], start))
        return tokens


def check_frequencies(tokens: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Checks how often each token was sampled, by chi-square within five standard deviations.

    `tokens`: [num_samples]; `probabilities`: [vocab_size].
    """
    expected = probabilities * len(tokens)
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    assert not counts[expected == 0].any()
    common = expected >= 5
    chi_square = ((counts - expected)[common].square() / expected[common]).sum().item()
    freedom = int(common.sum()) - 1
    assert freedom >= 3
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


def check_close(
    ours: Sequence[SampledLogprobs], theirs: Sequence[SampledLogprobs], tolerance: float = 1e-4
) -> None:
    """Checks that log probabilities are equal but for rounding, which depends on the number of rows
    in a step: on some CPUs another matrix kernel multiplies batches of another size.
    """

    def values(scores: Sequence[SampledLogprobs]) -> list[list[float]]:
        return [[each.logprob, *(value for _, value in each.top)] for each in scores]

    for mine, other in zip(values(ours), values(theirs), strict=True):
        assert mine == pytest.approx(other, rel=tolerance, abs=tolerance)


def check_same(ours: Sequence[SampledLogprobs], theirs: Sequence[SampledLogprobs]) -> None:
    """Checks `check_close`, and that ranks and the likeliest tokens are equal."""

    def ranked(scores: Sequence[SampledLogprobs]) -> list[tuple[int, list[int]]]:
        return [(each.rank, [token for token, _ in each.top]) for each in scores]

    assert ranked(ours) == ranked(theirs)
    check_close(ours, theirs)


@contextmanager
def recorded_logits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Collects the logits [num_sampled, vocab_size] of every step that samples."""
    recorded: list[torch.Tensor] = []

    def record(
        logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> torch.Tensor:
        recorded.append(logits.clone())
        return sample(logits, params, positions)

    with monkeypatch.context() as patch:
        patch.setattr("tandem.workers.model.sampling.sampler.sample", record)
        yield recorded


def multiply_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a product in Triton's interpreter, like one of a GPU's tensor cores, add in the same
    order for every row. BLAS, which it calls, has other kernels for the rows at the edge.
    """
    from triton.runtime import interpreter

    def create_dot(self: object, a: Any, b: Any, sums: Any, *options: object) -> object:
        product = np.einsum("ik,kj->ij", a.data, b.data, dtype=sums.data.dtype)
        return interpreter.TensorHandle(product + sums.data, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def load(
    folder: Path,
    *,
    dtype: str = "float32",
    num_blocks: int = 128,
    num_host_blocks: int = 0,
    num_states: int = 96,
    block_size: int = 16,
    device: str = "cpu",
    batch_invariant: bool = False,
    model_impl: str = "auto",
    quantization: str | None = None,
    cache_dtype: str = "auto",
    context_tokens: int | None = None,
) -> ModelRunner:
    """Loads a runner; `num_states` only for a model that keeps states."""
    checkpoint = open_checkpoint(
        folder, model_impl, quantization=quantization, context_tokens=context_tokens
    )
    return load_opened(
        checkpoint,
        dtype=dtype,
        cache_dtype=cache_dtype,
        device=device,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        num_states=num_states,
        block_size=block_size,
        batch_invariant=batch_invariant,
    )


def load_opened(
    checkpoint: Checkpoint,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    num_blocks: int = 128,
    num_states: int = 96,
    block_size: int = 16,
    **others: Any,
) -> ModelRunner:
    """Loads a runner of a checkpoint; `others` are arguments of ModelRunner.load."""
    return ModelRunner.load(
        checkpoint,
        dtype=dtype,
        device=device,
        num_blocks=num_blocks,
        num_states=num_states,
        block_size=block_size,
        **others,
    )


def mixed_steps(runner: ModelRunner) -> list[list[int]]:
    """Tokens of chunks of prompts beside decodes, with borders inside blocks and beyond the Mistral
    family's window, then of three sequences that only decode.
    """
    driver = Driver(runner)
    first, second = prompt(45, 1), prompt(33, 2)
    tokens = [driver.run(driver.step(1, first, 0), driver.step(2, second[:7], 0))]
    tokens.append(
        driver.run(
            driver.step(1, tokens[-1][:1], 45),
            driver.step(2, second[7:], 7),
            driver.step(3, [9], 0),
        )
    )
    for index in range(3):
        steps = zip((1, 2, 3), tokens[-1], (46, 33, 1), strict=True)
        tokens.append(
            driver.run(*(driver.step(number, [token], at + index) for number, token, at in steps))
        )
    return tokens
