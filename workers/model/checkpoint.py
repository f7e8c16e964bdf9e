"""Checks a model folder before anything is loaded; reads headers only, so size does not matter.

Reads the safetensors format (8 bytes of header length, a JSON header, the tensors back to back), single file or
sharded. Imports no torch.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from .config import MAX_JSON_BYTES, CheckpointError, ModelConfig, load_model_config, parse_json, read_json

__all__ = ["CheckpointError", "check_checkpoint", "expected_tensors", "fingerprint", "tensor_shards"]

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_ITEM_BYTES: Final = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
_WEIGHT_DTYPES: Final = ("F32", "BF16", "F16")
_SAMPLE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """Where one tensor lies."""

    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every weight of the model, as transformers names them."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        for name, shape in _layer_tensors(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_checkpoint(folder: Path) -> ModelConfig:
    """Checks that the folder holds a model this package can serve, reading no weights.

    Raises CheckpointError, one line naming file and tensor or field, if something is missing, truncated or does not
    fit config.json."""
    config = load_model_config(folder)
    _check_weights(folder, config)
    _check_tokenizer(folder, config)
    return config


def tensor_shards(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor. Raises CheckpointError if there are no safetensors weights."""
    single = folder / SINGLE_FILE
    if single.exists():
        return dict.fromkeys(_read_header(single), single)
    if not (folder / INDEX_FILE).exists():
        raise CheckpointError(f"{SINGLE_FILE}: not found, nor {INDEX_FILE} (only safetensors weights are read)")
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{INDEX_FILE}: weight_map: must be an object")
    shards = {}
    for name, file in weight_map.items():
        # A plain file name cannot lead out of the folder.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{INDEX_FILE}: {name}: {file!r} is not the name of a safetensors file in the folder")
        shards[name] = folder / file
    return shards


def fingerprint(folder: Path) -> str:
    """A hash, 32 hex digits, of the model: equal config and weights give equal fingerprints, however sharded.

    Of each tensor it reads only the first and last 4 KiB. Raises CheckpointError as `check_checkpoint`."""
    config = load_model_config(folder)
    described = asdict(config)
    del described["eos_token_ids"]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for name, (shard, entry) in sorted(_check_weights(folder, config).items()):
        digest.update(f"{name} {entry.dtype} {entry.shape} ".encode())
        with shard.open("rb") as file:
            for begin in (entry.begin, max(entry.begin, entry.end - _SAMPLE_BYTES)):
                file.seek(begin)
                digest.update(file.read(min(_SAMPLE_BYTES, entry.end - begin)))
    return digest.hexdigest()[:32]


def _layer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (query, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def _check_weights(folder: Path, config: ModelConfig) -> dict[str, tuple[Path, _Entry]]:
    shards = tensor_shards(folder)
    headers = {shard: _read_header(shard) for shard in sorted(set(shards.values()))}
    for name, shard in shards.items():
        if name not in headers[shard]:
            raise CheckpointError(f"{shard.name}: {name}: missing, though {INDEX_FILE} lists it")
    found: dict[str, tuple[Path, _Entry]] = {}
    for name, shape in expected_tensors(config).items():
        if name not in shards:
            file = INDEX_FILE if (folder / INDEX_FILE).exists() else SINGLE_FILE
            raise CheckpointError(f"{file}: {name}: missing")
        shard = shards[name]
        entry = headers[shard][name]
        _check_entry(f"{shard.name}: {name}", entry, shape, next(iter(found.values()))[1].dtype if found else None)
        found[name] = (shard, entry)
    return found


def _check_entry(where: str, entry: _Entry, shape: tuple[int, ...], dtype: str | None) -> None:
    if entry.shape != shape:
        raise CheckpointError(f"{where}: shape is {list(entry.shape)}, config.json asks for {list(shape)}")
    if entry.dtype not in _WEIGHT_DTYPES:
        raise CheckpointError(f"{where}: dtype {entry.dtype} is not supported, only {', '.join(_WEIGHT_DTYPES)}")
    if dtype is not None and entry.dtype != dtype:
        raise CheckpointError(f"{where}: dtype is {entry.dtype}, that of the weights before it {dtype}")


def _read_header(path: Path) -> dict[str, _Entry]:
    """Parses and checks the header of one safetensors file, down to the last byte of its tensors."""
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
    entries = {name: _entry(path.name, name, value, start) for name, value in header.items()}
    position, last = start, "header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise CheckpointError(f"{path.name}: {name}: data_offsets leave a gap or overlap after {last}")
        position, last = entry.end, name
        if position > size:
            raise CheckpointError(f"{path.name}: {name}: truncated: ends at byte {position} of a file of {size} bytes")
    if position != size:
        raise CheckpointError(f"{path.name}: {size - position} bytes follow the last tensor {last}")
    return entries


def _entry(file: str, name: str, value: Any, start: int) -> _Entry:
    error = CheckpointError(f"{file}: {name}: not a valid tensor entry")
    if not isinstance(value, dict):
        raise error
    dtype, shape, offsets = value.get("dtype"), _sizes(value.get("shape")), _sizes(value.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise error
    begin, end = offsets
    if dtype in _ITEM_BYTES and end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise CheckpointError(f"{file}: {name}: data_offsets {offsets} do not fit {dtype} of shape {shape}")
    return _Entry(dtype=dtype, shape=tuple(shape), begin=start + begin, end=start + end)


def _sizes(value: Any) -> list[int] | None:
    valid = isinstance(value, list) and all(isinstance(item, int) and item >= 0 for item in value)
    return value if valid else None


def _check_tokenizer(folder: Path, config: ModelConfig) -> None:
    """The largest token id must be a row of the embedding."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(f"{path.name}: not found")
    tokenizer = read_json(path)
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens", [])
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict | list) or not isinstance(added, list):
        raise CheckpointError(f"{path.name}: model.vocab: missing or not a vocabulary")
    # Unigram models list their pieces in the order of their ids.
    ids = dict(vocab) if isinstance(vocab, dict) else {str(piece): index for index, piece in enumerate(vocab)}
    ids |= {str(token.get("content")): token.get("id") for token in added if isinstance(token, dict)}
    for token, index in ids.items():
        if not isinstance(index, int) or not 0 <= index < config.vocab_size:
            raise CheckpointError(
                f"{path.name}: token {token[:40]!r} has id {index!r}, beyond the {config.vocab_size} rows of "
                "model.embed_tokens.weight (vocab_size in config.json)"
            )
