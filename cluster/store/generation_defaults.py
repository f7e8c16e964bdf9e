"""Reads a model's defaults of request parameters from generation_config.json, as vLLM does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ...proto.errors import InvalidArgument
from ...proto.parameters import PARAMETERS, ROWS, check_value
from ...workers.model.config import CheckpointError, Fields, read_json
from ..config import TandemConfig

FILE: Final = "generation_config.json"
_INSTEAD: Final = "; set generation_config: none to ignore the file"


def generation_defaults(config: TandemConfig, folder: Path) -> dict[str, float]:
    """Returns the model's defaults, by field of proto/parameters.py.

    Contains only fields that the file names; none with `generation_config: none`. Other modules
    read the end-of-sequence tokens. Raises CheckpointError, which names the field and its bound,
    for a value that no request could have.
    """
    path = folder / FILE
    if config.generation_config == "none" or not path.exists():
        return {}
    found = {}
    fields = Fields(FILE, read_json(path))
    for row in PARAMETERS:
        name = row.generation_config
        if name and fields.has(name):
            value = dict(fields.items())[name]
            if type(value) is not int and (row.kind == "int32" or type(value) is not float):
                kind = "an integer" if row.kind == "int32" else "a number"
                raise fields.error(name, f"must be {kind}, got {value!r:.60}{_INSTEAD}")
            try:
                check_value(row, value, name, minimum=1 if name == "max_new_tokens" else None)
            except InvalidArgument as error:
                raise CheckpointError(
                    f"{FILE}: {error.message}, got {value!r:.60}{_INSTEAD}"
                ) from None
            found[row.field] = value
    return found


def describe_defaults(defaults: Mapping[str, float]) -> str:
    """Returns the defaults as one line; empty without defaults."""
    return ", ".join(f"{ROWS[field].client_name} {value:g}" for field, value in defaults.items())
