"""Tests the pooling of embeddings that sentence-transformers' files name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.store.pooling import pooling_rules, write_mode
from tandem.proto import inference_pb2
from tandem.proto.errors import InvalidArgument
from tandem.router.pooling import PoolingRules

MODELS = "sentence_transformers.models."
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": f"{MODELS}Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{MODELS}Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{MODELS}Normalize"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": f"{MODELS}Dense"}
FLAGS = {
    "word_embedding_dimension": 64,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
    "pooling_mode_weightedmean_tokens": False,
    "pooling_mode_lasttoken": False,
    "include_prompt": True,
}


def write(folder: Path, modules: object, pooling: object | None = None) -> Path:
    (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        (FLAGS | {"pooling_mode_lasttoken": True}, "lasttoken"),
        (FLAGS | {"pooling_mode_mean_tokens": True}, "mean"),
        (FLAGS | {"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        (FLAGS | {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "cls+mean"),
        (FLAGS, "mean"),
        ({"embedding_dimension": 64, "pooling_mode": "lasttoken"}, "lasttoken"),
        ({"embedding_dimension": 64, "pooling_mode": ["mean", "max"]}, "mean+max"),
        ({}, "mean"),
    ],
)
def test_the_pooling_is_that_of_the_files_of_old_and_new_releases(
    tmp_path: Path, pooling: dict[str, Any], mode: str
) -> None:
    folder = write(tmp_path, [TRANSFORMER, POOLING, NORMALIZE], pooling)
    assert pooling_rules(folder) == PoolingRules(mode=mode)


def test_without_the_files_it_is_the_last_token(tmp_path: Path) -> None:
    assert pooling_rules(tmp_path).mode == "lasttoken"
    assert pooling_rules(write(tmp_path, [TRANSFORMER])) == PoolingRules(mode="lasttoken")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_mode(tmp_path, "mean")
    assert pooling_rules(tmp_path) == PoolingRules(mode="mean")


@pytest.mark.parametrize(
    ("modules", "pooling", "reason"),
    [
        ([TRANSFORMER, POOLING, DENSE], {}, "modules.json: the module Dense is not supported"),
        ([TRANSFORMER, POOLING, DENSE], None, "modules.json: the module Dense is not supported"),
        ([{"path": ""}], None, "modules.json: type: is missing"),
        (["Pooling"], None, "modules.json: must be a list of objects, has 'Pooling'"),
        ({}, None, "modules.json: not a JSON list"),
    ],
)
def test_only_embeddings_are_refused_for_what_is_not_supported_or_damaged(
    tmp_path: Path, modules: object, pooling: object | None, reason: str
) -> None:
    assert pooling_rules(write(tmp_path, modules, pooling)).refusal.startswith(reason)


@pytest.mark.parametrize(
    ("path", "pooling", "reason"),
    [
        ("1_Pooling", None, "1_Pooling/config.json: not found"),
        (
            "1_Pooling",
            {"pooling_mode_lasttoken": 1},
            "1_Pooling/config.json: pooling_mode_lasttoken: must be true or false, is 1",
        ),
        (
            "1_Pooling",
            {"pooling_mode": 1},
            "1_Pooling/config.json: pooling_mode: must be a list of strings, is 1",
        ),
        ("../1_Pooling", {}, "modules.json: path: must be the name of a folder"),
        ("x" * 200, {}, "modules.json: path: must be the name of a folder"),
    ],
)
def test_a_pooling_that_cannot_be_read_is_unknown(
    tmp_path: Path, path: str, pooling: object | None, reason: str
) -> None:
    """A request may still name one."""
    rules = pooling_rules(write(tmp_path, [TRANSFORMER, POOLING | {"path": path}], pooling))
    assert rules.mode.startswith(f"unknown ({reason}")
    assert rules.choose(inference_pb2.POOLING_MEAN) == inference_pb2.POOLING_MEAN
    with pytest.raises(InvalidArgument, match=r"^pooling_type: .*unknown"):
        rules.choose(inference_pb2.POOLING_UNSPECIFIED)
