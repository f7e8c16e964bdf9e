"""Reads the defaults of request parameters: the operator's and generation_config.json's.

As in vLLM.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ...proto.errors import InvalidArgument
from ...proto.parameters import ROWS
from ...workers.model.config import CheckpointError, Fields, read_json
from ..config import TandemConfig
from ..request_defaults import DEFAULTED, by_field, check_default

FILE: Final = "generation_config.json"
_INSTEAD: Final = "; set generation_config: none to ignore the file"


def generation_defaults(config: TandemConfig, folder: Path) -> dict[str, float]:
    """Returns the defaults of requests, by field of proto/parameters.py.

    Contains only fields that `sampling_defaults` or the model's file names; the former win, and
    with `generation_config: none` the file is not read. Other modules read the end-of-sequence
    tokens. Raises CheckpointError, which names the field and its bound, for a value of the file
    that no request could have.
    """
    of_model = {} if config.generation_config == "none" else _read(folder / FILE)
    return of_model | by_field(config.sampling_defaults)


def _read(path: Path) -> dict[str, float]:
    if not path.exists():
        return {}
    found = {}
    fields = Fields(FILE, read_json(path))
    for row in DEFAULTED:
        name = row.generation_config
        if fields.has(name):
            value = dict(fields.items())[name]
            try:
                check_default(row, value, name)
            except InvalidArgument as error:
                raise CheckpointError(f"{FILE}: {error.message}{_INSTEAD}") from None
            found[row.field] = value
    return found


def describe_defaults(defaults: Mapping[str, float]) -> str:
    """Returns the defaults as one line; empty without defaults."""
    return ", ".join(f"{ROWS[field].client_name} {value:g}" for field, value in defaults.items())
