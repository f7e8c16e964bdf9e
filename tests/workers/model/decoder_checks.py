"""What holds for a decoder that runs through transformers' code: it gives what transformers
gives.
"""

from pathlib import Path
from typing import Final

import pytest
import torch

from tandem.tests.workers.model.helpers import (
    Driver,
    load,
    load_opened,
    prompt,
    recorded_logits,
    reference,
    reference_greedy,
    reference_logits,
)
from tandem.tests.workers.model.test_parallel import on_ranks
from tandem.workers.model.checkpoint import Checkpoint
from tandem.workers.model.loader import open_checkpoint
from tandem.workers.model.runner import ModelRunner

TOLERANCE: Final = 1e-4
_LENGTHS: Final = (1, 2, 63, 300)  # on both sides of a window, a block and a recurrence's chunk
_FEW_LENGTHS: Final = (63,)
_GREEDY: Final = ((16, 2), (1, 1), (63, 3), (300, 4))  # tokens of each prompt, and its seed
_NUM_TOKENS: Final = 10  # the prompt of 16 tokens goes beyond a window
_NUM_MOVED: Final = 3  # tokens after a transfer; those after them are computed as without one


def load_generic(folder: Path) -> ModelRunner:
    return load(folder, model_impl="transformers")


def check_decoder(
    folder: Path, checkpoint: Checkpoint | None = None, *, whole: bool = True
) -> list[list[int]]:
    """Checks logits and tokens, and tokens after a transfer; returns the tokens.

    Unless `whole`, checks fewer prompts and no transfer.
    """
    checkpoint = checkpoint or open_checkpoint(folder, "transformers")
    assert checkpoint.config.transformers is not None
    model, runner = reference(folder), load_opened(checkpoint)
    assert logit_difference(model, runner, _LENGTHS if whole else _FEW_LENGTHS) <= TOLERANCE
    tokens = tokens_alone(runner, len(_GREEDY) if whole else 1)
    check_greedy(model, tokens)
    if whole:
        moved = tokens_after_transfer(runner, load_opened(checkpoint), _NUM_MOVED)
        assert moved == [each[:_NUM_MOVED] for each in tokens]
    return tokens


def logit_difference(
    model: torch.nn.Module, runner: ModelRunner, lengths: tuple[int, ...] = _LENGTHS
) -> float:
    """The largest difference to transformers' logits: whole prompts, chunks, and chunks beside
    decodes.
    """
    driver = Driver(runner)
    differences = []
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        for length in lengths:
            ids = prompt(length)
            expected = reference_logits(model, ids)
            for chunk in dict.fromkeys((7 if length < 100 else 64, length)):
                ends = [min(start + chunk, length) for start in range(0, length, chunk)]
                with recorded_logits(patch) as logits:
                    for start, end in zip([0, *ends], ends, strict=False):
                        driver.run(driver.step(1, ids[start:end], start))
                driver.drop(1)
                differences.append(torch.cat(logits) - expected[[end - 1 for end in ends]])
        first, second, third = prompt(45, 1), prompt(33, 2), prompt(20, 3)
        with recorded_logits(patch) as logits:
            driver.run(driver.step(1, first[:40], 0), driver.step(2, second[:7], 0))
            driver.run(
                driver.step(1, first[40:41], 40),
                driver.step(2, second[7:], 7),
                driver.step(3, third[:1], 0),
            )
            driver.run(driver.step(1, first[41:42], 41), driver.step(3, third[1:2], 1))
        rows = {
            1: reference_logits(model, first),
            2: reference_logits(model, second),
            3: reference_logits(model, third),
        }
        seen = [(1, 39), (2, 6), (1, 40), (2, 32), (3, 0), (1, 41), (3, 1)]
        differences.append(
            torch.cat(logits) - torch.stack([rows[number][row] for number, row in seen])
        )
    driver.drop_all()
    return max(float(each.abs().max()) for each in differences)


def greedy_tokens(model: torch.nn.Module) -> list[list[int]]:
    return [reference_greedy(model, prompt(length, seed), _NUM_TOKENS) for length, seed in _GREEDY]


def check_greedy(model: torch.nn.Module, tokens: list[list[int]]) -> None:
    """Fails unless these are what `greedy_tokens` returns, or the first of it."""
    for each, found in zip(_GREEDY, tokens, strict=False):
        logits = reference_logits(model, [*prompt(*each), *found[:-1]])
        assert logits[-_NUM_TOKENS:].argmax(-1).tolist() == found


def tokens_alone(runner: ModelRunner, num_prompts: int = len(_GREEDY)) -> list[list[int]]:
    driver = Driver(runner)
    found = [
        driver.generate(index, prompt(*each), _NUM_TOKENS)
        for index, each in enumerate(_GREEDY[:num_prompts])
    ]
    driver.drop_all()
    return found


def tokens_after_transfer(
    prefill: ModelRunner, decode: ModelRunner, num_tokens: int = _NUM_TOKENS
) -> list[list[int]]:
    """Prefilled by one runner, decoded by another from its KV cache."""
    source, target = Driver(prefill), Driver(decode, seed=1)
    found = []
    for index, each in enumerate(_GREEDY):
        ids = prompt(*each)
        tokens = source.run(source.step(index, ids, 0))
        step = target.step(index, tokens, len(ids))
        source.copy_to(target, index, len(ids))
        tokens += target.run(step)
        while len(tokens) < num_tokens:
            tokens += target.run(target.step(index, tokens[-1:], len(ids) + len(tokens) - 1))
        found.append(tokens)
    return found


def tokens_of_two_ranks(folder: Path) -> list[list[list[int]]] | None:
    """None if transformers has no plan to split the model."""
    if not open_checkpoint(folder, "transformers").config.has_tp_plan:
        return None
    return on_ranks(folder, 2, tokens_alone, model_impl="transformers")


def architecture(folder: Path) -> str:
    return open_checkpoint(folder, "transformers").config.architecture
