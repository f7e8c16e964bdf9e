"""The decoder against transformers, float32, tiny random models whose logits are of order 10.

The bound of 2e-4 is absolute. The largest difference seen is 1.02e-4 on AVX2, where plain torch in
the place of the attention kernel has 8e-5, and 4e-5 on AVX-512; a mask, window or position off by
one gives 5.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.tests.tiny import DENSE, make_tiny_model
from tandem.tests.workers.model.helpers import (
    ROPES,
    Driver,
    load,
    prompt,
    recorded_logits,
    reference,
    reference_logits,
)

TOLERANCE = 2e-4
LENGTHS = (1, 2, 15, 16, 17, 63, 300)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", DENSE)
def test_prefill_whole_and_chunked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, rope: str, tied: bool
) -> None:
    folder = make_tiny_model(
        tmp_path, family, rope_parameters=ROPES[rope], tie_word_embeddings=tied
    )
    model, driver = reference(folder), Driver(load(folder))
    for num_tokens in LENGTHS:
        ids = prompt(num_tokens)
        expected = reference_logits(model, ids)
        small = 7 if num_tokens < 100 else 16
        for chunk in dict.fromkeys((small, 16, 64, num_tokens)):
            ends = [min(start + chunk, num_tokens) for start in range(0, num_tokens, chunk)]
            with recorded_logits(monkeypatch) as logits:
                for start, end in zip([0, *ends], ends, strict=False):
                    driver.run(driver.step(1, ids[start:end], start))
            driver.drop(1)
            difference = torch.cat(logits) - expected[[end - 1 for end in ends]]
            assert difference.abs().max() <= TOLERANCE, (num_tokens, chunk)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
        ("llama", {"num_key_value_heads": 4, "head_dim": 32, "num_hidden_layers": 3}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 5, "num_attention_heads": 8}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
        ("qwen3", {"attention_bias": True, "num_attention_heads": 8, "head_dim": 8}),
    ],
)
def test_variants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, overrides: dict[str, Any]
) -> None:
    folder = make_tiny_model(tmp_path, family, **overrides)
    model, driver = reference(folder), Driver(load(folder, block_size=8))
    ids = prompt(75)
    expected = reference_logits(model, ids)
    with recorded_logits(monkeypatch) as logits:
        driver.run(driver.step(1, ids[:40], 0))
        driver.run(driver.step(1, ids[40:70], 40))
        for start in range(70, 75):
            driver.run(driver.step(1, ids[start : start + 1], start))
    difference = torch.cat(logits) - expected[[39, 69, 70, 71, 72, 73, 74]]
    assert difference.abs().max() <= TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", DENSE)
def test_half_precision_is_near_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str
) -> None:
    """8 and 11 bits of mantissa on logits up to 15, some layers deep: within 1 and 0.15."""
    folder = make_tiny_model(tmp_path, family)
    ids = prompt(60)
    expected = reference_logits(reference(folder), ids)
    driver = Driver(load(folder, dtype=dtype))
    with recorded_logits(monkeypatch) as logits:
        driver.run(driver.step(1, ids[:40], 0))
        driver.run(driver.step(1, ids[40:59], 40))
        driver.run(driver.step(1, ids[59:], 59), driver.step(2, ids[:1], 0))
    rows = torch.cat(logits).float() - expected[[39, 58, 59, 0]]
    assert rows.abs().max() <= {"bfloat16": 1.0, "float16": 0.15}[dtype]
