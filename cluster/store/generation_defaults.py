"""Reads what a model's folder says of requests that leave parameters out: generation_config.json,
as vLLM reads it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ...proto.errors import InvalidArgument
from ...proto.parameters import PARAMETERS, ROWS, check_value
from ...workers.model.config import CheckpointError, Fields, read_json
from ..config import TandemConfig

FILE: Final = "generation_config.json"
_INSTEAD: Final = "; with generation_config: none the file is left out"


def generation_defaults(config: TandemConfig, folder: Path) -> dict[str, float]:
    """Returns the defaults of a service, by field of proto/parameters.py. What the file does not
    name, or with `generation_config: none` everything, has the default of the table. The
    end-of-sequence tokens are read elsewhere.

    Raises CheckpointError, naming the field and its bound, for a value that no request could have.
    """
    path = folder / FILE
    if config.generation_config == "none" or not path.exists():
        return {}
    found, fields = {}, Fields(FILE, read_json(path))
    for row in PARAMETERS:
        name = row.generation_config
        if name and fields.has(name):
            value = dict(fields.items())[name]
            if type(value) is not int and (row.kind == "int32" or type(value) is not float):
                what = "an integer" if row.kind == "int32" else "a number"
                raise fields.error(name, f"must be {what}, is {value!r:.60}{_INSTEAD}")
            try:
                check_value(row, value, name, minimum=1 if name == "max_new_tokens" else None)
            except InvalidArgument as error:
                raise CheckpointError(
                    f"{FILE}: {error.message}, is {value!r:.60}{_INSTEAD}"
                ) from None
            found[row.field] = value
    return found


def describe_defaults(defaults: Mapping[str, float]) -> str:
    """Returns them in a line; empty if there are none."""
    return ", ".join(f"{ROWS[field].client_name} {value:g}" for field, value in defaults.items())
