"""Describes a model as config.json does, checked field by field; families share the parsers of common fields.

Reads what transformers 4 and 5 write. Imports no torch and knows nothing of the weights.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..kv_cache.layout import LayerGeometry

MAX_JSON_BYTES: Final = 100 * 1024 * 1024
_MAX_LAYERS: Final = 1_000
_MAX_SIZE: Final = 2**31 - 1


class CheckpointError(ValueError):
    """Says in one line why a model folder cannot be served, naming the file and the field or tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: the base and how its frequencies are scaled. Every optional field is resolved."""

    kind: str = "default"  # default, linear, llama3 or yarn
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int = 0  # tokens; llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    attention_factor: float = 1.0  # cos and sin are multiplied by it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Describes the shape of a decoder-only model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerGeometry, ...]
    max_position_embeddings: int  # tokens of the longest sequence
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    rope: RopeConfig
    dtype: str  # that the checkpoint declares: float32, bfloat16 or float16
    quantization: Mapping[str, Any] = field(default_factory=dict)  # quantization_config; empty is none
    eos_token_ids: tuple[int, ...] = ()


def read_fields(folder: Path) -> "Fields":
    """Reads config.json. Raises CheckpointError if the folder or the file is missing or not a JSON object, or if the
    folder has files that are none, or leads out of itself."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    _check_files(folder)
    return Fields("config.json", read_json(folder / "config.json"))


def read_context_tokens(folder: Path) -> int:
    """Reads the tokens of the model's longest sequence, whatever the family. Raises CheckpointError."""
    return read_fields(folder).integer("max_position_embeddings")


def read_eos_token_ids(folder: Path, fields: "Fields", vocab_size: int) -> tuple[int, ...]:
    """Reads the end-of-sequence tokens as transformers' `generate` does: of generation_config.json, else of `fields`.
    Raises CheckpointError."""
    path = folder / "generation_config.json"
    generation = Fields(path.name, read_json(path) if path.exists() else {})
    return generation.token_ids("eos_token_id", vocab_size) or fields.token_ids("eos_token_id", vocab_size)


def parse_decoder_config(
    fields: "Fields",
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    window: Callable[[int], int | None] = lambda index: None,
) -> ModelConfig:
    """Parses the fields that Llama and similar families name alike; `window` gives the sliding window of each layer.

    Raises CheckpointError if a field is missing, ill-typed, out of bounds or not supported."""
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise fields.error("hidden_act", f"{activation!r} is not supported, only 'silu'")
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    max_position = fields.integer("max_position_embeddings")
    num_kv_heads, head_dim = _num_kv_heads(fields, num_heads), _head_dim(fields, hidden_size, num_heads)
    return ModelConfig(
        architecture=fields.texts("architectures")[0],
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        layers=tuple(
            LayerGeometry(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, window=window(index))
            for index in range(fields.integer("num_hidden_layers", maximum=_MAX_LAYERS))
        ),
        max_position_embeddings=max_position,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        rope=_rope(fields, max_position),
        dtype=_dtype(fields),
        quantization=fields.mapping("quantization_config"),
    )


def _check_files(folder: Path) -> None:
    """Raises CheckpointError for a link that leads out of the folder, and for pipes, devices and dangling links.

    In the hub's cache files are links from REPOSITORY/snapshots/COMMIT to REPOSITORY/blobs, which may be."""
    root = folder.resolve()
    if root.parent.name == "snapshots":
        root = root.parent.parent
    for path in (*folder.iterdir(), *folder.glob("*/*")):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise CheckpointError(f"{path.name}: is a link that leads out of the model's folder")
        if not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path.name}: is neither a file nor a folder")


def read_json(path: Path) -> dict[str, Any]:
    """Parses a JSON object of at most MAX_JSON_BYTES; raises CheckpointError."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path.name}: larger than {MAX_JSON_BYTES} bytes")
        return parse_json(path.name, path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror})") from error


def parse_json(file: str, data: bytes) -> dict[str, Any]:
    """Parses a JSON object; raises CheckpointError naming `file`."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return values


class Fields:
    """Reads typed fields of a JSON object; null counts as missing. Every method raises CheckpointError."""

    def __init__(self, file: str, values: dict[str, Any], prefix: str = "") -> None:
        self._file = file
        self._values = values
        self._prefix = prefix

    def error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._file}: {self._prefix}{name}: {problem}")

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Returns whether the field is there and null, where that means something else than missing."""
        return name in self._values and self._values[name] is None

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MAX_SIZE) -> int:
        def is_valid(value: Any) -> bool:
            return type(value) is int and minimum <= value <= maximum

        return int(self._value(name, default, is_valid, f"an integer from {minimum} to {maximum}"))

    def number(self, name: str, default: float | None = None) -> float:
        def is_valid(value: Any) -> bool:
            return type(value) in (int, float) and 0 < value < math.inf

        return float(self._value(name, default, is_valid, "a number above 0"))

    def boolean(self, name: str, default: bool) -> bool:
        return bool(self._value(name, default, lambda value: isinstance(value, bool), "true or false"))

    def text(self, name: str, default: str | None = None) -> str:
        return str(self._value(name, default, lambda value: isinstance(value, str), "a string"))

    def texts(self, name: str) -> list[str]:
        def is_valid(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(item, str) for item in value)

        return list(self._value(name, None, is_valid, "a list of strings"))

    def mapping(self, name: str) -> dict[str, Any]:
        """Returns an object as it is; empty if missing."""
        return dict(self._value(name, {}, lambda value: isinstance(value, dict), "an object"))

    def nested(self, name: str) -> "Fields":
        """Returns the fields of an object; none if it is missing."""
        return Fields(self._file, self.mapping(name), f"{self._prefix}{name}.")

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Returns one id or a list of ids as a tuple; empty if missing."""
        value = self._values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            raise self.error(name, f"must be token ids below vocab_size {vocab_size}, is {value!r:.60}")
        return tuple(ids)

    def _value(self, name: str, default: Any, is_valid: Callable[[Any], bool], what: str) -> Any:
        value = default if self._values.get(name) is None else self._values[name]
        if value is None:
            raise self.error(name, "is missing")
        if not is_valid(value):
            raise self.error(name, f"must be {what}, is {value!r:.60}")
        return value


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    dtype = fields.text(name, "float32")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise fields.error(name, f"{dtype!r} is not supported, only float32, bfloat16, float16")
    return dtype


def _num_kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
    return num_kv_heads


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if not fields.has("head_dim") and hidden_size % num_heads:
        raise fields.error("hidden_size", f"{hidden_size} is not a multiple of num_attention_heads {num_heads}")
    head_dim = fields.integer("head_dim", hidden_size // num_heads, minimum=2)
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even, is {head_dim}")
    return head_dim


def _rope(fields: Fields, max_position: int) -> RopeConfig:
    """transformers 5 writes `rope_parameters`, 4 wrote `rope_theta` and `rope_scaling`."""
    name = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
    rope = fields.nested(name)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise rope.error("partial_rotary_factor", "is not supported")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, factor=rope.number("factor"))
    original = rope.integer("original_max_position_embeddings", max_position)
    if fields.has("original_max_position_embeddings"):
        original = fields.integer("original_max_position_embeddings")
    if kind == "llama3":
        return _llama3(rope, theta, original)
    if kind == "yarn":
        return _yarn(rope, theta, original, max_position)
    raise rope.error("rope_type", f"{kind!r} is not supported, only default, linear, llama3, yarn")


def _llama3(rope: Fields, theta: float, original: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.error("low_freq_factor", f"{low} must be below high_freq_factor {high}")
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=rope.number("factor"),
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: Fields, theta: float, original: int, max_position: int) -> RopeConfig:
    """YaRN (arXiv 2309.00071), with the attention factor it leaves to be derived."""
    factor = rope.number("factor", max_position / original)
    attention_factor = _yarn_scale(factor, 1.0)
    if rope.has("mscale") and rope.has("mscale_all_dim"):
        attention_factor = _yarn_scale(factor, rope.number("mscale")) / _yarn_scale(
            factor, rope.number("mscale_all_dim")
        )
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
        attention_factor=rope.number("attention_factor", attention_factor),
    )


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
