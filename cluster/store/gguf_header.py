"""Reads the header of a GGUF file; checks each count, length and offset against a bound.

The readers of transformers and gguf trust these numbers: a file of a hundred bytes that claims
2**60 entries would use their time or memory without limit. So this reader runs first, and they read
only files that it accepts. It is also fast enough for a command's start: a header of 400,000
entries takes 0.2 s, with gguf.GGUFReader 23 s and 0.7 GB.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...workers.model.config import CheckpointError

_VERSIONS: Final = (2, 3)
_MAX_HEADER_BYTES: Final = 2**28
_MAX_VALUES: Final = 4_096
_MAX_TENSORS: Final = 65_536
_MAX_ENTRIES: Final = 2**22  # of all arrays; a vocabulary of 250,000 tokens takes 1.3 million
_MAX_NAME_BYTES: Final = 256
_MAX_TEXT_BYTES: Final = 2**20  # such as a chat template
_MAX_ENTRY_BYTES: Final = 1_024  # of a token, or a merge of two tokens
_MAX_DIMENSIONS: Final = 4
_MAX_END_IDS: Final = 64
END_IDS: Final = "tokenizer.ggml.eos_token_ids"
_ALIGNMENT: Final = "general.alignment"
_MAX_ALIGNMENT: Final = 65_536

_TEXT: Final = 8
_ARRAY: Final = 9
_NUMBERS: Final = {
    kind: struct.Struct(f"<{letter}")
    for kind, letter in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_COUNT: Final = _NUMBERS[10]
_KIND: Final = _NUMBERS[4]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Describes a tensor's type, shape and place, in bytes from the start of the file."""

    kind: int  # ggml's number of the type
    shape: tuple[int, ...]  # the fastest dimension first
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Holds the metadata of a GGUF file.

    For an array only the number of its entries, except for END_IDS, whose value is a tuple.
    """

    values: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.values["general.architecture"])

    def of_model(self, name: str, default: Any = None) -> Any:
        """Returns the value whose name begins with the architecture's name."""
        return self.values.get(f"{self.architecture}.{name}", default)


def read_gguf_header(path: Path) -> GgufHeader:
    """Returns the header of a GGUF file.

    Raises CheckpointError, one line that names the file and the field, for a file that is not GGUF,
    is truncated, or claims more than it can hold.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderReader(path.name, data).read()
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        # mmap raises ValueError for an empty file.
        raise CheckpointError(f"{path.name}: is empty") from error
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror})") from error


class _HeaderReader:
    """Parses a header in order; `_field` names the current field in errors."""

    def __init__(self, name: str, data: mmap.mmap) -> None:
        self._name = name
        self._data = data
        self._place = 0
        self._num_entries = 0
        self._field = "header"

    def read(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise self._error("is not a GGUF file")
        self._place = 4
        version = self._number(_KIND)
        if version not in _VERSIONS:
            raise self._error(
                f"version {version} is not supported; supported: {', '.join(map(str, _VERSIONS))}"
            )
        num_tensors = self._count("tensor_count", _MAX_TENSORS)
        values = self._values(self._count("metadata_kv_count", _MAX_VALUES))
        tensors = self._tensors(num_tensors, self._alignment(values))
        self._check(values, tensors)
        return GgufHeader(values=values, tensors=tensors)

    def _values(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for index in range(count):
            self._field = f"metadata {index}"
            self._field = key = self._text(_MAX_NAME_BYTES)
            if key in values:
                raise self._error("occurs twice")
            values[key] = self._value(self._number(_KIND))
        return values

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _TEXT:
            return self._text(_MAX_TEXT_BYTES)
        if kind != _ARRAY:
            raise self._error(f"type {kind} is unknown")
        kind = self._number(_KIND)
        is_kept = self._field == END_IDS
        count = self._count(
            self._field, _MAX_END_IDS if is_kept else _MAX_ENTRIES - self._num_entries
        )
        self._num_entries += count
        if is_kept and kind in _NUMBERS:
            return tuple(self._number(_NUMBERS[kind]) for _ in range(count))
        if kind == _TEXT:
            self._skip_texts(count)
        elif kind in _NUMBERS:
            self._skip(count * _NUMBERS[kind].size)
        else:
            raise self._error(f"an array of type {kind} is not supported")
        return count

    def _tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        found: dict[str, tuple[int, tuple[int, ...], int]] = {}
        for index in range(count):
            self._field = f"tensor {index}"
            self._field = name = self._text(_MAX_NAME_BYTES)
            if name in found:
                raise self._error("occurs twice")
            num_dimensions = self._number(_KIND)
            if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
                raise self._error(
                    f"has {num_dimensions} dimensions; the maximum is {_MAX_DIMENSIONS}"
                    if num_dimensions
                    else "has no dimensions"
                )
            shape = tuple(self._number(_COUNT) for _ in range(num_dimensions))
            found[name] = self._number(_KIND), shape, self._number(_COUNT)
        start = -(-self._place // alignment) * alignment
        return self._placed(
            {name: self._tensor(name, *each, start) for name, each in found.items()}
        )

    def _tensor(
        self, name: str, kind: int, shape: tuple[int, ...], offset: int, start: int
    ) -> GgufTensor:
        # The import takes some tenths of a second.
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        self._field = name
        if kind not in [*GGMLQuantizationType]:
            raise self._error(f"type {kind} is unknown")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if 0 in shape or shape[0] % block:
            raise self._error(f"shape {list(shape)} does not fit blocks of {block}")
        begin = start + offset
        end = begin + math.prod(shape) // block * block_bytes
        return GgufTensor(kind=kind, shape=shape, begin=begin, end=end)

    def _placed(self, tensors: dict[str, GgufTensor]) -> dict[str, GgufTensor]:
        """Checks that the tensors lie within the file and do not overlap."""
        last = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
            self._field = name
            if tensor.begin < last:
                raise self._error("overlaps another tensor")
            last = tensor.end
            if last > len(self._data):
                raise self._error(
                    f"truncated: ends at byte {last} of a file of {len(self._data)} bytes"
                )
        return tensors

    def _alignment(self, values: Mapping[str, Any]) -> int:
        self._field = _ALIGNMENT
        alignment = values.get(_ALIGNMENT, 32)
        if (
            type(alignment) is not int
            or not 1 <= alignment <= _MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise self._error(f"must be a power of 2 up to {_MAX_ALIGNMENT}, got {alignment!r:.60}")
        return alignment

    def _check(self, values: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
        self._field = "general.architecture"
        architecture = values.get(self._field)
        if not isinstance(architecture, str):
            raise self._error("is missing, or not a text")
        self._field = "split.count"
        num_files = values.get(self._field, 1)
        if num_files not in (0, 1):
            raise self._error(
                f"is one of {num_files!r:.60} files; join them first: llama-gguf-split --merge"
            )
        self._field = END_IDS
        if not isinstance(values.get(self._field, ()), tuple):
            raise self._error("must be an array of numbers")
        self._field = f"{architecture}.block_count"
        num_layers = values.get(self._field)
        if type(num_layers) is not int or not 1 <= num_layers <= len(tensors):
            raise self._error(
                f"must be from 1 to the number of tensors, {len(tensors)}, got {num_layers!r:.60}"
            )

    def _count(self, field: str, most: int) -> int:
        number = int(self._number(_COUNT))
        if number > most:
            self._field = field
            raise self._error(f"{number} is above the maximum, {most}")
        return number

    def _number(self, form: struct.Struct) -> Any:
        place = self._place
        self._skip(form.size)
        return form.unpack_from(self._data, place)[0]

    def _text(self, most: int) -> str:
        length = self._count(self._field, most)
        place = self._place
        self._skip(length)
        try:
            return self._data[place : self._place].decode()
        except UnicodeDecodeError:
            raise self._error("is not UTF-8") from None

    def _skip(self, num_bytes: int) -> None:
        self._place += num_bytes
        if self._place > len(self._data):
            raise self._error(
                f"truncated: the header is longer than the file's {len(self._data)} bytes"
            )
        if self._place > _MAX_HEADER_BYTES:
            raise self._error(f"the header is longer than the maximum, {_MAX_HEADER_BYTES} bytes")

    def _skip_texts(self, count: int) -> None:
        # Local names: this loop runs once for each entry of a vocabulary.
        unpack = _COUNT.unpack_from
        data = self._data
        place = self._place
        longest = 0
        try:
            for _ in range(count):
                (length,) = unpack(data, place)
                place += _COUNT.size + length
                longest = max(longest, length)
        except (struct.error, OverflowError):
            place = len(data) + 1  # `_skip` raises for it
        if longest > _MAX_ENTRY_BYTES:
            raise self._error(f"has an entry of {longest} bytes; the maximum is {_MAX_ENTRY_BYTES}")
        self._skip(place - self._place)

    def _error(self, problem: str) -> CheckpointError:
        field = repr(self._field)[1:-1]  # a name may contain any characters
        return CheckpointError(f"{self._name[:80]}: {field[:80]}: {problem}")
