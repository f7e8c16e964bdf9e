"""Resolves MODEL and checks, before anything starts, that it can be served as configured."""

from collections.abc import Mapping
from pathlib import Path

from ...proto.errors import InvalidArgument
from ...workers.model.footprint import check_config_split
from .store import resolve_model


def checked_folder(model: str, tp: Mapping[str, int]) -> Path:
    """Returns the model's folder, fetched if it has to be, after the check that it can be served, and split over the
    `tp` ranks of each pool.

    Raises CheckpointError, or InvalidArgument for a `tp` that does not divide the model's heads."""
    from ...workers.model.loader import check_checkpoint  # with torch, which takes a second

    folder = resolve_model(model, progress=True)
    checkpoint = check_checkpoint(folder)
    wrong = []
    for role, size in tp.items():
        try:
            check_config_split(checkpoint, size)
        except ValueError as error:
            wrong.append(f"{role}.{error}")
    if wrong:
        raise InvalidArgument("\n".join(wrong))
    return folder.resolve()
