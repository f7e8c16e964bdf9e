"""Provides the demo model for tests: its folder, ranks, varied prompts, and transformers as the
reference.
"""

import functools
import gc
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tandem.cluster.store.store import get_model
from tandem.tests.peers import IDENTITY
from tandem.workers.model import loader
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
    return get_model(NAME)


@functools.cache
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder())


def rank(**config: Any) -> Rank:
    """Returns a loaded rank in float32, with fields of RankConfig as given. Threads are the
    process's: give each of two workers one of two cores.
    """
    gc.collect()  # the parts of a worker know each other: those of the tests before keep gigabytes
    # Room for 5,800 tokens in float32. Zeroing the default of a gigabyte takes a second.
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 1 << 28} | config
    # Moving weights into larger pages takes a second as well, and gives the same tokens.
    with patch.object(loader, "use_huge_pages"):
        return load_rank(RankConfig(model=str(folder()), identity=IDENTITY, **settings))


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


def transformers_model() -> PreTrainedModel:
    """Returns the model in transformers, in float32, with a thread for each core."""
    torch.set_num_threads(os.cpu_count() or 1)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32)
    return model


@torch.inference_mode()
def likeliest(model: torch.nn.Module, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Returns what the model chooses greedily after the prompt, and after it and the first 1, 2,
    ... of `tokens`, the last excepted. These are `tokens` if and only if they are what it
    generates, which would take a step for each.
    """
    ids = torch.tensor([[*prompt, *tokens[:-1]]])  # [1, num_tokens]
    chosen: list[int] = model(ids, logits_to_keep=len(tokens)).logits[0].argmax(-1).tolist()
    return chosen
