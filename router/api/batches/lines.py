"""Parses the input file of a batch, for the Batch API and for `tandem batch`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ....proto.errors import InvalidArgument
from ...json_lines import number_lines

CustomId = Annotated[str, Field(min_length=1, max_length=512)]
BatchUrl = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]


class BatchRequest(BaseModel):
    """Describes a line of the input."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    custom_id: CustomId
    method: Literal["POST"]
    url: BatchUrl
    body: dict[str, Any]


def parse_batch(text: str, path: Path | str) -> Iterator[tuple[int, BatchRequest]]:
    """Yields the requests, each with the number of its line.

    Raises InvalidArgument, which names the line of `path`.
    """
    first_lines: dict[str, int] = {}
    for number, request in number_lines(text, path, BatchRequest):
        if request.body.get("stream"):
            raise InvalidArgument("body.stream: a batch has no streams", f"{path}:{number}")
        first = first_lines.setdefault(request.custom_id, number)
        if first != number:
            raise InvalidArgument(
                f"custom_id: {request.custom_id!r} is already in line {first}", f"{path}:{number}"
            )
        yield number, request
