"""Tests the defaults of request parameters in generation_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.config import TandemConfig
from tandem.cluster.store.generation_defaults import describe_defaults, generation_defaults
from tandem.workers.model.config import CheckpointError

AUTO = TandemConfig(model="m")


def write(folder: Path, **fields: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_the_fields_that_vllm_reads_are_defaults_and_the_others_are_not(tmp_path: Path) -> None:
    assert generation_defaults(AUTO, tmp_path) == {}
    folder = write(
        tmp_path,
        **{
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
            "min_p": None,
            "repetition_penalty": 1.05,
        },
        **{
            "max_new_tokens": 2048,
            "do_sample": False,
            "eos_token_id": [1, 2],
            "typical_p": 0.5,
            "max_length": 7,
        },
    )
    defaults = generation_defaults(AUTO, folder)
    assert describe_defaults(defaults) == (
        "max_tokens 2048, temperature 0.6, top_k 20, top_p 0.95, repetition_penalty 1.05"
    )
    assert generation_defaults(TandemConfig(model="m", generation_config="none"), folder) == {}


def test_the_operators_defaults_win_over_those_of_the_file(tmp_path: Path) -> None:
    folder = write(tmp_path, temperature=0.6, top_k=20)
    for name in ("max_tokens", "max_new_tokens"):
        config = TandemConfig(model="m", sampling_defaults={"temperature": 1, name: 7})
        own = {"sampling.temperature": 1, "stopping.max_tokens": 7}
        assert generation_defaults(config, folder) == own | {"sampling.top_k": 20}
        alone = config.model_copy(update={"generation_config": "none"})
        assert generation_defaults(alone, folder) == own


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("temperature", 2.5, "must be from 0 to 2, got 2.5"),
        ("temperature", "1.0", "must be a number, got '1.0'"),
        ("temperature", True, "must be a number, got True"),
        ("temperature", float("nan"), "must be from 0 to 2, got nan"),
        ("top_k", 1.5, "must be an integer, got 1.5"),
        ("top_k", 10**40, "must be from -1 to 1000000, got 1000"),
        ("top_p", 0, "must be greater than 0 and at most 1, got 0"),
        ("max_new_tokens", 0, "must be from 1 to 1048576, got 0"),
        ("repetition_penalty", [], "must be a number, got []"),
    ],
)
def test_a_value_that_no_request_could_have_is_refused_by_name(
    tmp_path: Path, field: str, value: object, reason: str
) -> None:
    with pytest.raises(CheckpointError) as failure:
        generation_defaults(AUTO, write(tmp_path, **{field: value}))
    text = str(failure.value)
    assert text.startswith(f"generation_config.json: {field}: {reason}")
    assert text.endswith("; set generation_config: none to ignore the file")
