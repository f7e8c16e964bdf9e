"""Reads and writes sentence-transformers' files, which say how embeddings are computed.

modules.json lists the modules that compute an embedding: Transformer, which is the model, Pooling,
and others. Each has a folder with its config.json.
"""

import json
import re
from pathlib import Path
from typing import Final

from ...router.pooling import PoolingRules
from ...workers.model.config import CheckpointError, Fields, read_json, read_json_list

FILE: Final = "modules.json"
CONFIGS: Final = "*_Pooling/config.json"
"""The pattern of the files of Pooling, which are in folders of their own."""

_WITHOUT_EFFECT: Final = ("Transformer", "Dropout", "Normalize")
"""Modules that the model itself is, that act in training alone, or that requests choose."""
_FLAGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The modes of the releases before 5.4, which have one field for each."""


def pooling_rules(folder: Path) -> PoolingRules:
    """Returns the pooling of the model in `folder`; without modules.json the last token's.

    The rules refuse embeddings if modules.json is damaged, or names a module that is not served.
    The pooling is unknown if its own file is missing or damaged.
    """
    if not (folder / FILE).exists():
        return PoolingRules()
    try:
        return PoolingRules(mode=_read_mode(folder))
    except CheckpointError as error:
        return PoolingRules(refusal=str(error))


def write_mode(folder: Path, mode: str) -> None:
    """Writes the files that `pooling_rules` reads as `mode`."""
    modules = {"": "Transformer", "1_Pooling": "Pooling"}
    listed = [
        {"idx": idx, "name": str(idx), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for idx, (path, kind) in enumerate(modules.items())
    ]
    (folder / FILE).write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))


def _read_mode(folder: Path) -> str:
    """Returns the pooling mode. Raises CheckpointError for another module that has an effect."""
    mode = PoolingRules().mode
    for entry in read_json_list(folder / FILE):
        if not isinstance(entry, dict):
            raise CheckpointError(f"{FILE}: must be a list of objects, has {entry!r:.60}")
        module = Fields(FILE, entry)
        kind = module.text("type").rpartition(".")[2]
        if kind == "Pooling":
            try:
                mode = _parse_mode(_read_config(folder, module))
            except CheckpointError as error:
                mode = f"unknown ({error})"
        elif kind not in _WITHOUT_EFFECT:
            raise CheckpointError(f"{FILE}: the module {kind} is not supported")
    return mode


def _read_config(folder: Path, module: Fields) -> Fields:
    """Returns the fields of a module's config.json. Raises CheckpointError."""
    path = module.text("path")
    if not re.fullmatch(r"\w[\w.-]{0,99}", path, re.ASCII):
        raise module.error("path", f"must be the name of a folder, is {path!r:.60}")
    name = f"{path}/config.json"
    if not (folder / name).exists():
        raise CheckpointError(f"{name}: not found")
    return Fields(name, read_json(folder / name))


def _parse_mode(fields: Fields) -> str:
    """Returns the names of all modes, joined by +; sentence-transformers' default is mean."""
    if not fields.has("pooling_mode"):
        modes = [mode for name, mode in _FLAGS.items() if fields.boolean(name, False)]
    elif isinstance(dict(fields.items())["pooling_mode"], str):
        modes = [fields.text("pooling_mode").lower()]
    else:
        modes = fields.texts("pooling_mode")
    return "+".join(modes) or "mean"
