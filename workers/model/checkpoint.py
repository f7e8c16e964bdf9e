"""Reads safetensors headers and token ids of a model folder, and computes its fingerprint.

Reads the safetensors format (8 bytes of header length, a JSON header, the tensors back to back),
single file or sharded. Imports no torch and knows nothing of the model's structure.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from ...proto.home import tokenizer_file
from ..kv_cache.layout import KvLayout
from .config import (
    MAX_JSON_BYTES,
    CheckpointError,
    ModelConfig,
    parse_json,
    read_json,
    token_ids_of,
)

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_ITEM_BYTES: Final = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
_GATE_UP: Final = ("gate_proj", "up_proj")
_DOWN: Final = ("down_proj",)
# By the end of the name of a tensor that has the maps of all experts: the end in place of it, which
# is followed by the number of an expert, and the expert's maps. Qwen's, then Granite's.
_STACKED: Final = {
    ".experts.gate_up_proj": (".experts", _GATE_UP),
    ".experts.down_proj": (".experts", _DOWN),
    ".block_sparse_moe.input_linear.weight": (".block_sparse_moe.experts", _GATE_UP),
    ".block_sparse_moe.output_linear.weight": (".block_sparse_moe.experts", _DOWN),
}
_SAMPLE_BYTES: Final = 4096
_CHUNK_BYTES: Final = 2**20
_MAX_NAME_BYTES: Final = 255  # of a file name on Linux


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Describes one tensor: its file, its name there, dtype, shape and byte range."""

    file: Path
    name: str
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Describes a checked model folder."""

    folder: Path
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]  # those that the model uses

    def fingerprint(self) -> str:
        """Returns a hash of config and weights as 32 hex digits.

        It does not depend on how the weights are sharded into files. Reads embeddings, of which
        training may change single rows, and the first and last 4 KiB of each other tensor.
        """
        described = asdict(self.config)
        # They change no keys and no values of the KV cache.
        del described["eos_token_ids"]
        served = described.pop("served_tokens") or 0
        # As in releases that kept the longer one here: a service must not seem to change.
        described["max_position_embeddings"] = max(self.config.max_position_embeddings, served)
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
        for name, stored in sorted(self.tensors.items()):
            digest.update(f"{name} {stored.dtype} {stored.shape} ".encode())
            with stored.file.open("rb") as file:
                for begin, end in self._sampled(name, stored):
                    file.seek(begin)
                    for place in range(begin, end, _CHUNK_BYTES):
                        digest.update(file.read(min(_CHUNK_BYTES, end - place)))
        return digest.hexdigest()[:32]

    def _sampled(self, name: str, stored: StoredTensor) -> list[tuple[int, int]]:
        """Returns the parts of a tensor's file that the fingerprint includes."""
        # A head changes no keys and no values.
        if stored.shape[:1] == (self.config.vocab_size,) and not name.startswith("lm_head."):
            return [(stored.begin, stored.end)]
        size = min(_SAMPLE_BYTES, stored.end - stored.begin)
        return [(stored.begin, stored.begin + size), (stored.end - size, stored.end)]

    def kv_layout(self, dtype: str, cache_dtype: str = "auto") -> KvLayout:
        """Returns the layout of the model's KV cache in this dtype."""
        model = self.fingerprint()
        return KvLayout(
            layers=self.config.layers, dtype=dtype, model=model, cache_dtype=cache_dtype
        )


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Reads the headers of all shards.

    Raises CheckpointError, one line naming file and tensor, if there are no safetensors weights, a
    file is truncated, or a tensor that the index lists is missing.
    """
    single = folder / SINGLE_FILE
    if single.exists():
        return _read_header(single)
    files = _read_index(folder)
    headers = {file: _read_header(file) for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in headers[file]:
            raise CheckpointError(f"{file.name}: {name}: missing, though {INDEX_FILE} lists it")
    return {name: headers[file][name] for name, file in files.items()}


def unstack_experts(
    stored: Mapping[str, StoredTensor], num_experts: int
) -> dict[str, StoredTensor]:
    """Returns the tensors, and the parts of stacked experts under the names of single experts.

    A stack of gate and up maps is [experts, 2 * size, hidden], the gates first. A stack of down
    maps is [experts, hidden, size].
    """
    found = dict(stored)
    for name, tensor in stored.items():
        suffix = next(filter(name.endswith, _STACKED), None)
        if suffix is None or len(tensor.shape) != 3 or tensor.shape[0] != num_experts:
            continue
        experts, maps = _STACKED[suffix]
        prefix = name.removesuffix(suffix) + experts
        if tensor.shape[1] % len(maps):
            continue
        _, num_outputs, num_inputs = tensor.shape
        size = (tensor.end - tensor.begin) // (num_experts * len(maps))
        for index in range(num_experts * len(maps)):
            number, which = divmod(index, len(maps))
            begin = tensor.begin + index * size
            found[f"{prefix}.{number}.{maps[which]}.weight"] = replace(
                tensor,
                shape=(num_outputs // len(maps), num_inputs),
                begin=begin,
                end=begin + size,
            )
    return found


def weights_file(folder: Path) -> str:
    """Returns the name of the file that lists the tensors."""
    return INDEX_FILE if (folder / INDEX_FILE).exists() else SINGLE_FILE


def check_tokenizer(folder: Path, config: ModelConfig) -> None:
    """Checks that every token of the vocabulary has a row in the embedding.

    Added tokens may lie beyond the embedding, as in Gemma 3 and many fine-tunes; a prompt that
    contains one is rejected. Raises CheckpointError.
    """
    path = tokenizer_file(folder)
    if not path.exists():
        raise CheckpointError(f"{path.name}: not found")
    tokenizer = read_json(path)
    if not (ids := token_ids_of(tokenizer)):
        raise CheckpointError(f"{path.name}: model.vocab: missing or not a vocabulary")
    added = {
        token.get("content")
        for token in tokenizer.get("added_tokens", [])
        if isinstance(token, dict)
    }
    for token, index in ids.items():
        if (
            type(index) is not int
            or index < 0
            or (index >= config.vocab_size and token not in added)
        ):
            raise CheckpointError(
                f"{path.name}: token {token[:40]!r} has id {index!r}, beyond the "
                f"{config.vocab_size} rows of model.embed_tokens.weight (vocab_size in config.json)"
            )


def _read_index(folder: Path) -> dict[str, Path]:
    """Returns the file of each tensor of a sharded checkpoint."""
    if not (folder / INDEX_FILE).exists():
        raise CheckpointError(f"{SINGLE_FILE}: not found, nor {INDEX_FILE}{_other_weights(folder)}")
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{INDEX_FILE}: weight_map: must be an object")
    files = {}
    for name, file in weight_map.items():
        if not _is_weights_file_name(file):
            raise CheckpointError(
                f"{INDEX_FILE}: {name}: {file!r:.300} is not the name of a safetensors file in the "
                "folder"
            )
        files[name] = folder / file
    return files


def _is_weights_file_name(name: Any) -> bool:
    """Returns True for a plain file name, which cannot lead out of the folder.

    A name with NUL or a surrogate would raise ValueError wherever the file is opened.
    """
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and name.isprintable()
        and Path(name).name == name
        and len(name.encode()) <= _MAX_NAME_BYTES
    )


def _other_weights(folder: Path) -> str:
    """Returns advice for a folder that has weights in another format."""
    names = sorted(path.name for path in folder.iterdir())
    if pickles := [name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl"))]:
        return (
            f"; {pickles[0]:.80} is not read, because reading it may run code: save the model "
            "again with transformers' save_pretrained, which writes safetensors"
        )
    if others := [name for name in names if name.endswith(".safetensors")]:
        return f"; {others[0]:.80} has neither name"
    return " (only safetensors weights are read)"


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Parses the header of a safetensors file and checks that its tensors fill the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or header_bytes > size - 8:
                raise CheckpointError(f"{path.name}: truncated: {size} bytes end within the header")
            if header_bytes > MAX_JSON_BYTES:
                raise CheckpointError(f"{path.name}: header is larger than {MAX_JSON_BYTES} bytes")
            header = parse_json(path.name, file.read(header_bytes))
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror})") from error
    header.pop("__metadata__", None)
    start = 8 + header_bytes
    entries = {name: _parse_entry(path, name, value, start) for name, value in header.items()}
    position = start
    last = "header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise CheckpointError(
                f"{path.name}: {name}: data_offsets leave a gap or overlap after {last}"
            )
        position = entry.end
        last = name
        if position > size:
            raise CheckpointError(
                f"{path.name}: {name}: truncated: ends at byte {position} of a file of {size} bytes"
            )
    if position != size:
        raise CheckpointError(f"{path.name}: {size - position} bytes follow the last tensor {last}")
    return entries


def _parse_entry(file: Path, name: str, value: Any, start: int) -> StoredTensor:
    error = CheckpointError(f"{file.name}: {name}: not a valid tensor entry")
    if not isinstance(value, dict):
        raise error
    dtype = value.get("dtype")
    shape = _sizes(value.get("shape"))
    offsets = _sizes(value.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise error
    begin, end = offsets
    if dtype in _ITEM_BYTES and end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise CheckpointError(
            f"{file.name}: {name}: data_offsets {offsets} do not fit {dtype} of shape {shape}"
        )
    return StoredTensor(
        file=file,
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        begin=start + begin,
        end=start + end,
    )


def _sizes(value: Any) -> list[int] | None:
    valid = isinstance(value, list) and all(isinstance(item, int) and item >= 0 for item in value)
    return value if valid else None
