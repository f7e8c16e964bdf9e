"""Provides the demo model for tests: its folder, ranks, varied prompts, and transformers as the reference."""

import functools
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tandem.cluster.store.store import get_model
from tandem.workers.tp.rank import Rank, RankConfig, load_rank

NAME = "smollm2-135m-instruct"

_TEXTS = (
    "What is the capital of France?",
    "Once upon a time, in a village between two rivers, there lived a clockmaker who",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n",
    "Liste der größten Städte: Wien, Zürich, München,",
    "1, 1, 2, 3, 5, 8, 13,",
    "The three laws of thermodynamics can be stated as follows. First,",
    "日本の首都は",
    "Dear Sir or Madam,\n\nI am writing to",
)


@functools.cache
def folder() -> Path:
    """Returns the model's folder; fetches it the first time."""
    return get_model(NAME, progress=False)


@functools.cache
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder())


def rank(**config: Any) -> Rank:
    """Returns a loaded rank in float32, with fields of RankConfig as given. Threads are the process's: give each of two
    workers one of two cores."""
    return load_rank(RankConfig(**({"model": str(folder()), "dtype": "float32"} | config)))


def prompts(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns one prompt of exactly each length: real text, cut or concatenated."""
    rng = random.Random(11)
    made = []
    for number, length in enumerate(lengths):
        ids: list[int] = []
        text = _TEXTS[number % len(_TEXTS)]
        while len(ids) < length:
            ids += tokenizer().encode(text)
            text = " " + rng.choice(_TEXTS)
        made.append(tuple(ids[:length]))
    return made


def reference(prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Returns what transformers generates greedily in float32, not stopping at the end token; prompts of similar length
    share a left-padded batch."""
    torch.set_num_threads(os.cpu_count() or 1)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32)
    made: dict[int, list[int]] = {}
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    while order:
        batch = [index for index in order[:8] if len(prompts[index]) <= 2 * len(prompts[order[0]])]
        order = order[len(batch) :]
        width = max(len(prompts[index]) for index in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)  # [batch, width]
        mask = torch.zeros_like(ids)  # [batch, width]
        for row, index in enumerate(batch):
            length = len(prompts[index])
            ids[row, width - length :] = torch.tensor(prompts[index])
            mask[row, width - length :] = 1
        out = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        made.update(zip(batch, out[:, width:].tolist(), strict=True))
    return [made[index] for index in range(len(prompts))]
