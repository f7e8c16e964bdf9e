"""Tests rows in place of embeddings: as if looked up, and as transformers' inputs_embeds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_decoders import make_tiny_decoder
from tandem.tests.workers.model.decoder_checks import TOLERANCE
from tandem.tests.workers.model.helpers import Driver, load, prompt, recorded_logits, reference
from tandem.tests.workers.model.test_parallel import on_ranks
from tandem.workers.model.runner import ModelRunner

IDS = prompt(40)
FIRST = 9
NUM_ROWS = 20
CHUNKS = ((0, 12), (12, 16), (16, 40))  # the first and the last have tokens beside rows
# By kind: models that scale embeddings not at all, in the lookup, and after it.
KINDS = [("llama", "auto"), ("gemma3_text", "auto"), ("granite", "auto")]
KINDS += [(kind, "transformers") for kind, _ in KINDS]


def make(folder: Path, kind: str) -> Path:
    if kind == "llama":
        return make_tiny_model(folder)
    scale: dict[str, Any] = {"embedding_multiplier": 12.0} if kind == "granite" else {}
    return make_tiny_decoder(folder, kind, **scale)


def other_rows(hidden: int) -> torch.Tensor:
    return torch.randn(NUM_ROWS, hidden, generator=torch.Generator().manual_seed(3))


def logits_of(runner: ModelRunner, rows: torch.Tensor | None) -> torch.Tensor:
    """The logits after each chunk, beside another sequence, and after two decoded tokens."""
    driver = Driver(runner)
    if rows is not None:
        runner.rows.hold(1, FIRST, rows)
    with pytest.MonkeyPatch.context() as patch, recorded_logits(patch) as logits:
        for start, end in CHUNKS:
            driver.run(driver.step(start + 2, IDS[:3], 0), driver.step(1, IDS[start:end], start))
        for position in (40, 41):
            driver.run(driver.step(1, [7], position))
    return torch.cat([each[-1:] for each in logits])


def embedded(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """transformers' inputs_embeds, [num_tokens, hidden]."""
    with torch.inference_mode():
        found: torch.Tensor = model.get_input_embeddings()(torch.tensor([ids]))[0]  # type: ignore[operator]
    return found


@pytest.mark.parametrize(("kind", "model_impl"), KINDS)
def test_rows_are_taken_as_embeddings(tmp_path: Path, kind: str, model_impl: str) -> None:
    folder = make(tmp_path, kind)
    model = reference(folder)
    embeddings = embedded(model, [*IDS, 7, 7])
    same = embeddings[FIRST : FIRST + NUM_ROWS].clone()
    runner = load(folder, model_impl=model_impl)
    plain = logits_of(runner, None)
    assert torch.equal(logits_of(load(folder, model_impl=model_impl), same), plain)
    rows = other_rows(embeddings.shape[1])
    found = logits_of(load(folder, model_impl=model_impl), rows)
    embeddings = embeddings.clone()
    embeddings[FIRST : FIRST + NUM_ROWS] = rows
    with torch.inference_mode():
        expected = model(inputs_embeds=embeddings[None]).logits[0]
    ends = [end - 1 for _, end in CHUNKS] + [40, 41]
    assert float((found - expected[ends]).abs().max()) <= TOLERANCE
    assert float((found - plain).abs().max()) > 100 * TOLERANCE


def test_a_step_with_rows_uses_no_step_program(tmp_path: Path) -> None:
    """Programs are recorded for bfloat16; the bits of other steps are the same as theirs."""
    folder = make_tiny_model(tmp_path)
    same = embedded(reference(folder), IDS)[FIRST : FIRST + NUM_ROWS].bfloat16()
    logits = [
        logits_of(load(folder, dtype="bfloat16"), rows)
        for rows in (None, same, other_rows(same.shape[1]))
    ]
    assert torch.equal(logits[0], logits[1])
    assert not torch.isclose(logits[0], logits[2]).all(dim=1)[1:].any()


def test_rows_end_with_their_sequence(tmp_path: Path) -> None:
    runner = load(make_tiny_model(tmp_path))
    driver = Driver(runner)
    with pytest.MonkeyPatch.context() as patch, recorded_logits(patch) as logits:
        driver.run(driver.step(1, IDS, 0))
        driver.drop(1)
        runner.rows.hold(1, FIRST, other_rows(64))
        driver.run(driver.step(1, IDS, 0))
        driver.drop(1)
        driver.run(driver.step(1, IDS, 0))
    first, second, third = logits
    assert torch.equal(first, third)
    assert not torch.equal(first, second)


def tokens_of(runner: ModelRunner, rows: torch.Tensor | None) -> list[int]:
    if rows is not None:
        runner.rows.hold(1, FIRST, rows)
    return Driver(runner).generate(1, IDS, 12)


def test_each_rank_takes_all_rows(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    rows = other_rows(64)
    expected = tokens_of(load(folder), rows)
    assert expected != tokens_of(load(folder), None)
    assert on_ranks(folder, 2, lambda runner: tokens_of(runner, rows)) == [expected] * 2
