"""Runs a decoder with states through transformers' code, with hand-made slots and steps."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import torch

from tandem.workers.kv_cache.layout import ITEM_BYTES
from tandem.workers.model.attention.backend import PLAIN, AttentionOptions, SequenceSpan
from tandem.workers.model.attention.torch_backend import TorchAttentionBackend
from tandem.workers.model.generic import config as generic_config
from tandem.workers.model.generic.causal_lm import TransformersForCausalLM
from tandem.workers.model.kv_store import PagedKv
from tandem.workers.model.loader import load_model, open_checkpoint
from tandem.workers.model.states.steps import StateStep, StateSteps, StepStates

NUM_SLOTS: Final = 16
NUM_BLOCKS: Final = 64
BLOCK_SIZE: Final = 16


def open_states(patch: pytest.MonkeyPatch) -> None:
    """Lets decoders with states be loaded, which a service whose engine has none refuses."""
    patch.setattr(generic_config, "_SERVES_STATES", True)


class SlotMemory:
    """Holds the memory of all slots, full of NaN at first."""

    def __init__(self, model: TransformersForCausalLM) -> None:
        self.parts = {
            (index, part.name): torch.full(
                (NUM_SLOTS, part.planes, part.num_kv_heads, part.row),
                torch.nan,
                dtype=getattr(torch, part.dtype),
            )
            for index, layer in enumerate(model.layers)
            for part in layer.states
        }
        assert all(each.dtype.itemsize in ITEM_BYTES.values() for each in self.parts.values())

    def memory(self, layer: int, part: str) -> torch.Tensor:
        return self.parts[layer, part]


class StateDriver:
    """Feeds sequences to a decoder, as an engine would: each step writes other slots."""

    def __init__(self, folder: Path, dtype: str = "float32", seed: int = 0) -> None:
        checkpoint = open_checkpoint(folder, "transformers")
        loaded = load_model(checkpoint, dtype=dtype, device="cpu")
        assert isinstance(loaded.model, TransformersForCausalLM)
        self.model = loaded.model
        self.slots_memory = SlotMemory(self.model)
        self.states = StepStates(steps=StateSteps(), memory=self.slots_memory.memory)
        layers = self.model.layers
        attending = [index for index, layer in enumerate(layers) if layer.keeps_tokens]
        # The number of a layer among those that attend.
        self._numbers = {index: number for number, index in enumerate(attending)}
        self._backend: TorchAttentionBackend | None = None
        self._block_sizes: list[int] = []  # of each block table
        if attending:
            kept = tuple(layers[index] for index in attending)
            kv = PagedKv(
                replace(checkpoint.kv_layout(dtype), layers=kept),
                num_blocks=NUM_BLOCKS,
                block_size=BLOCK_SIZE,
                device=torch.device("cpu"),
            )
            self._backend = TorchAttentionBackend(kv, kept)
            self._block_sizes = [table.block_size for table in kv.tables]
        self._blocks = random.Random(seed).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self._free = random.Random(seed).sample(range(NUM_SLOTS), NUM_SLOTS)
        self.tables: dict[int, list[list[int]]] = {}
        self.slots: dict[int, int] = {}
        self.lengths: dict[int, int] = {}
        self.saved: dict[int, tuple[int, int]] = {}  # number of tokens, slot

    def go_back(self, number: int) -> None:
        """Continues a sequence from its saved state."""
        self.lengths[number], self.slots[number] = self.saved.pop(number)

    @torch.inference_mode()
    def run(
        self, *sequences: tuple[int, list[int]], saved_before_end: int = 0
    ) -> list[torch.Tensor]:
        """Computes new tokens of sequences: the logits [num_tokens, vocab_size] of each.

        Of a sequence with more tokens, the state before the last `saved_before_end` is kept too.
        """
        spans: list[SequenceSpan] = []
        steps: list[StateStep] = []
        tokens: list[int] = []
        positions: list[int] = []
        sources = {number: self.slots.get(number) for number, _ in sequences}
        for number, ids in sequences:
            start = self.lengths.get(number, 0)
            end = start + len(ids)
            tables = self.tables.setdefault(number, [[] for _ in self._block_sizes])
            for table, size in zip(tables, self._block_sizes, strict=True):
                table += [self._blocks.pop() for _ in range(-(-end // size) - len(table))]
            spans.append(SequenceSpan(tables=tables, start=start, num_tokens=len(ids)))
            self.slots[number] = self._free.pop(0)
            targets = [(len(ids), self.slots[number])]
            if 0 < saved_before_end < len(ids):
                slot = self._free.pop(0)
                if number in self.saved:
                    self._free.append(self.saved[number][1])
                self.saved[number] = (end - saved_before_end, slot)
                targets.insert(0, (len(ids) - saved_before_end, slot))
            steps.append(
                StateStep(
                    first_row=len(tokens),
                    num_tokens=len(ids),
                    source=sources[number],
                    targets=tuple(targets),
                )
            )
            tokens += ids
            positions += range(start, end)
            self.lengths[number] = end
        self.states.steps.fill(steps)
        attention = self._backend.plan(spans) if self._backend else None

        def attend(
            layer: int,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            options: AttentionOptions = PLAIN,
        ) -> torch.Tensor:
            assert attention is not None
            return attention(self._numbers[layer], query, key, value, options)

        hidden = self.model(
            torch.tensor(tokens, dtype=torch.int32),
            torch.tensor(positions, dtype=torch.int32),
            attend,
            states=self.states,
        )
        self._free += [slot for slot in sources.values() if slot is not None]
        logits = self.model.compute_logits(hidden)
        return list(torch.split(logits, [len(ids) for _, ids in sequences]))
