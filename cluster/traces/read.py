"""Reads the public forms of request traces: Mooncake's lines of JSON and Azure's CSV.

The formats: https://github.com/kvcache-ai/Mooncake (FAST25-release/traces) and
https://github.com/Azure/AzurePublicDataset (AzureLLMInferenceTrace).
"""

import csv
import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fractions import Fraction
from itertools import groupby, pairwise
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from ...proto.errors import InvalidArgument
from ...router.json_lines import number_lines

OPTION: Final = "--trace"
MOONCAKE_BLOCK_TOKENS: Final = 512
_GZIP_MAGIC: Final = b"\x1f\x8b"
_AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MAX_TOKENS: Final = 100_000_000  # of one request
_MAX_MS: Final = 1e15
_SPEEDS: Final = (1e-6, 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """Describes one request of a trace.

    `block_hashes` names the blocks of the prompt in order; the last block may be partial. Two
    prompts that begin with the same hashes have the same prefix. Empty: the trace does not say
    what prompts have in common.
    """

    time: float  # seconds after the first request
    input_length: int  # tokens
    output_length: int  # tokens
    block_hashes: tuple[int, ...]
    block_tokens: int


@dataclass(frozen=True, slots=True)
class TraceScale:
    """Adapts a trace to a smaller service.

    Input lengths are rounded up, so that each prompt keeps its number of blocks; output lengths
    are rounded to the nearest number, and are at least 1.
    """

    lengths: Fraction = Fraction(1)  # factor of input lengths, output lengths and blocks
    speed: float = 1.0  # divides times: 0.05 makes the trace 20 times as long
    # Spreads requests with equal times evenly until the next time. Mooncake's times are rounded to
    # 3 s: without this, a slowed trace is a series of bursts.
    spread: bool = False

    def apply(self, request: TracedRequest) -> TracedRequest:
        """Returns the scaled request. Raises InvalidArgument if a block has no whole tokens."""
        block = request.block_tokens * self.lengths
        if request.block_hashes and block.denominator != 1:
            raise InvalidArgument(
                f"{self.lengths} times a block of {request.block_tokens} tokens must be a whole "
                f"number of tokens; use 1/N, where N divides {request.block_tokens}",
                "--length-scale",
            )
        return TracedRequest(
            time=request.time / self.speed,
            input_length=math.ceil(request.input_length * self.lengths),
            output_length=max(1, round(request.output_length * self.lengths)),
            block_hashes=request.block_hashes,
            block_tokens=max(1, int(block)),
        )


UNSCALED: Final = TraceScale()


def parse_scale(text: str) -> Fraction:
    """Parses a scale of lengths, such as 1/8 or 0.125. Raises InvalidArgument."""
    try:
        scale = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise InvalidArgument(f"must be N, N/M or 0.N, got {text!r}", "--length-scale") from None
    if not Fraction(1, 1_000_000) <= scale <= 1_000:
        raise InvalidArgument("must be from 1/1000000 to 1000", "--length-scale")
    return scale


def check_scale(scale: TraceScale, trace: Path | None) -> None:
    """Raises InvalidArgument for a speed out of bounds, and for a scale without a trace."""
    if trace is None and scale != UNSCALED:
        raise InvalidArgument("--length-scale, --speed and --spread-arrivals need --trace", OPTION)
    low, high = _SPEEDS
    if not low <= scale.speed <= high:
        raise InvalidArgument(f"must be from {low:g} to {high:g}, got {scale.speed}", "--speed")


def read_trace(path: Path, scale: TraceScale = UNSCALED) -> list[TracedRequest]:
    """Returns the requests of a trace in the order of their times, the first one at 0.

    Finds the format by the first character; `path` may name a gzip file. Raises InvalidArgument,
    which names file and line.
    """
    text = _read_text(path)
    if not text.strip():
        raise InvalidArgument("has no requests", f"{OPTION}: {path}")
    parse = _mooncake_requests if text.lstrip().startswith("{") else _azure_requests
    requests = sorted(parse(text, path), key=lambda request: request.time)
    if not requests:
        raise InvalidArgument("has no requests", f"{OPTION}: {path}")
    start = requests[0].time
    if scale.spread:
        requests = _spread(requests)
    return [scale.apply(replace(request, time=request.time - start)) for request in requests]


def _spread(requests: Sequence[TracedRequest]) -> list[TracedRequest]:
    """Spreads sorted requests with equal times evenly until the next time.

    The last ones get the interval before them.
    """
    groups = [list(group) for _, group in groupby(requests, key=lambda request: request.time)]
    times = [group[0].time for group in groups]
    gaps = [later - time for time, later in pairwise(times)]
    gaps.append(gaps[-1] if gaps else 0.0)
    return [
        replace(request, time=request.time + gap * number / len(group))
        for group, gap in zip(groups, gaps, strict=True)
        for number, request in enumerate(group)
    ]


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data.startswith(_GZIP_MAGIC) else data
        return text.decode("utf-8-sig")  # spreadsheets begin their files with a byte order mark
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InvalidArgument("is not a whole gzip file", f"{OPTION}: {path}") from None
    except OSError as error:
        raise InvalidArgument(str(error.strerror), f"{OPTION}: {path}") from None
    except UnicodeDecodeError:
        raise InvalidArgument("is not UTF-8", f"{OPTION}: {path}") from None


class MooncakeLine(BaseModel):
    """Holds one line of a trace in Mooncake's form; other keys are ignored."""

    model_config = ConfigDict(frozen=True, strict=True)

    timestamp: Annotated[float, Field(ge=0, le=_MAX_MS)]
    input_length: Annotated[int, Field(ge=1, le=_MAX_TOKENS)]
    output_length: Annotated[int, Field(ge=0, le=_MAX_TOKENS)]
    hash_ids: tuple[NonNegativeInt, ...] = ()
    # Tokens of a block; not in Mooncake's own traces.
    block_size: PositiveInt = MOONCAKE_BLOCK_TOKENS


def _mooncake_requests(text: str, path: Path) -> Iterator[TracedRequest]:
    for number, line in number_lines(text, f"{OPTION}: {path}", MooncakeLine):
        num_blocks = -(-line.input_length // line.block_size)
        if line.hash_ids and len(line.hash_ids) != num_blocks:
            raise InvalidArgument(
                f"has {len(line.hash_ids)} hash_ids; {line.input_length} tokens are {num_blocks} "
                f"blocks of {line.block_size}",
                f"{OPTION}: {path}:{number}",
            )
        yield TracedRequest(
            time=line.timestamp / 1000,
            input_length=line.input_length,
            output_length=line.output_length,
            block_hashes=line.hash_ids,
            block_tokens=line.block_size,
        )


def _azure_requests(text: str, path: Path) -> Iterator[TracedRequest]:
    rows = csv.reader(text.splitlines())
    try:
        if tuple(next(rows, ())) != _AZURE_COLUMNS:
            raise ValueError(
                f"must be lines of JSON in Mooncake's form, or CSV with the columns "
                f"{','.join(_AZURE_COLUMNS)}"
            )
        yield from map(_azure_request, filter(None, rows))
    except (csv.Error, ValueError) as error:
        raise InvalidArgument(str(error), f"{OPTION}: {path}:{rows.line_num}") from None


def _azure_request(row: Sequence[str]) -> TracedRequest:
    """Parses a row; raises ValueError."""
    if len(row) != len(_AZURE_COLUMNS):
        raise ValueError(f"must have {len(_AZURE_COLUMNS)} columns, got {len(row)}")
    try:
        time = datetime.fromisoformat(row[0])
    except ValueError:
        raise ValueError(f"{_AZURE_COLUMNS[0]} must be a date and time, got {row[0]!r}") from None
    lengths = dict(zip(_AZURE_COLUMNS[1:], row[1:], strict=True))
    for name, length in lengths.items():
        if not (length.isascii() and length.isdigit()) or int(length) > _MAX_TOKENS:
            raise ValueError(f"{name} must be from 0 to {_MAX_TOKENS}, got {length!r}")
    if not int(row[1]):
        raise ValueError(f"{_AZURE_COLUMNS[1]} must be at least 1, got 0")
    return TracedRequest(
        time=(time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp(),
        input_length=int(row[1]),
        output_length=int(row[2]),
        block_hashes=(),
        block_tokens=MOONCAKE_BLOCK_TOKENS,
    )
