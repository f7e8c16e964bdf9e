"""Describes a model as config.json does, and reads and checks the fields of such files.

Imports no torch and knows nothing of the weights. One file because every family reads its config by
these fields and types.
"""

import json
import sys
from collections.abc import Callable, ItemsView, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ...proto.home import tokenizer_file
from ..kv_cache.layout import LayerGeometry

MAX_JSON_BYTES: Final = 100 * 1024 * 1024
CONTEXT_NAMES: Final = ("max_position_embeddings", "n_positions", "max_seq_len")
_MAX_SIZE: Final = 2**31 - 1
# The first config.json of some multimodal models, such as Qwen2-VL, have no text_config.
_MULTIMODAL: Final = ("text_config", "vision_config", "audio_config")
# Where transformers 4 and 5 put the text model of a multimodal model, and its names there.
_TEXT_PREFIXES: Final = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
)
# huggingface_hub writes this file into its store.
_SHARED_BLOBS_MARKER: Final = ".huggingface-shared-blobs"


class CheckpointError(ValueError):
    """Reports in one line why a model folder cannot be served; names file and field or tensor.

    Names come from the folder, so unprintable characters are escaped: a surrogate in a message
    would fail where the message is logged or sent.
    """

    def __init__(self, message: str) -> None:
        super().__init__(
            "".join(each if each.isprintable() else ascii(each)[1:-1] for each in message)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Describes a rotary embedding: its base and the scaling of its frequencies.

    Defaults of optional fields in config.json are resolved.
    """

    kind: str = "default"  # default, linear, llama3, yarn or longrope
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int = 0  # tokens; llama3, yarn and longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    factors: tuple[float, ...] = ()  # longrope: the divisor of each frequency
    # longrope: the divisors if no sequence is longer than original_max_position.
    short_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0  # factor of cos and sin
    rotated: float = 1.0  # share of a head's dimensions that are rotated, the first ones
    # Rotates pairs of neighbouring dimensions, not dimensions that are half a head apart.
    interleaved: bool = False

    def num_rotated(self, head_dim: int) -> int:
        """Returns the number of dimensions of a head that are rotated."""
        return int(head_dim * self.rotated)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Describes the routed experts of a model."""

    num_experts: int
    num_chosen: int  # experts per token
    intermediate_size: int  # of one expert
    layers: tuple[int, ...]  # layers with experts; the others have an MLP
    normalised: bool = True  # the weights of a token's experts add up to 1
    sigmoid: bool = False  # scores are a sigmoid of the router's outputs; else softmax of all
    has_score_bias: bool = False  # experts are chosen by the sums of scores and a bias
    # Experts are chosen from the groups with the highest sums of two scores.
    num_groups: int = 1
    num_chosen_groups: int = 1
    scale: float = 1.0  # of the weights
    latent_size: int | None = None  # of the experts' inputs and outputs, if not the hidden size
    is_mxfp4: bool = False  # whether the checkpoint has the experts' weights in MXFP4
    shared_size: int | None = None  # intermediate size of the expert of all tokens; None: no such
    # Whether a checkpoint may have the experts' weights as [experts, outputs, inputs].
    may_be_stacked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """Describes the layers of a model that compute the gated delta rule."""

    num_key_heads: int
    num_value_heads: int  # a multiple of num_key_heads
    key_dim: int  # of a head
    value_dim: int
    width: int  # tokens of the convolution


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig:
    """Describes the layers of LFM2 that are a short convolution."""

    width: int  # inputs of a channel, including the token's own
    has_bias: bool = False  # of the convolution and of the maps before and after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """Describes the layers of a model that are a Mamba 2 mixer (arXiv 2405.21060)."""

    num_heads: int
    head_dim: int
    num_groups: int  # of heads that share B and C, and of channels that are normalized together
    state_size: int  # numbers of B and of C
    conv_width: int  # inputs of a channel, including the token's own
    conv_bias: bool
    proj_bias: bool  # of the maps before and after the mixer
    limits: tuple[float, float]  # of the time step
    norm_eps: float

    @property
    def channels(self) -> int:
        """Returns the number of channels of all heads."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Describes the shape of a decoder-only model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerGeometry, ...]
    ropes: tuple[RopeConfig | None, ...]  # of each layer; None: no position embedding
    max_position_embeddings: int  # the context length that config.json names
    norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    dtype: str  # declared by the checkpoint: float32, bfloat16 or float16
    activation: str = "silu"  # of the MLP: silu or gelu_tanh
    attention_scale: float | None = None  # factor of the scores; None: head_dim ** -0.5
    attention_soft_cap: float | None = None  # soft cap of the scores
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # factor of the outputs of attention and MLP
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None
    experts: ExpertsConfig | None = None
    delta: DeltaConfig | None = None
    short_conv: ShortConvConfig | None = None
    mamba2: Mamba2Config | None = None
    # quantization_config; empty for a model that is not quantized.
    quantization: Mapping[str, Any] = field(default_factory=dict)
    # The fields of config.json if the model runs through transformers' code; None if it runs
    # through one of Tandem's families.
    transformers: Mapping[str, Any] | None = None
    has_tp_plan: bool = True  # whether the model can be split over ranks
    # The longest sequence; a longer one would need sparse attention. None: attention is dense.
    dense_tokens: int | None = None
    # The architecture of the multimodal model whose text model this is; empty for other models.
    text_model_of: str = ""
    eos_token_ids: tuple[int, ...] = ()
    # The context length of the service; None: the model's.
    served_tokens: int | None = None

    @property
    def context_tokens(self) -> int:
        """Returns the number of tokens of the longest sequence."""
        return self.served_tokens or self.max_position_embeddings

    @property
    def is_rounded(self) -> bool:
        """Returns True if plain weights are rounded when they are loaded.

        A quant_method without settings is not from a checkpoint.
        """
        return self.quantization.keys() == {"quant_method"}


def read_fields(folder: Path, name: str = "config.json") -> "Fields":
    """Reads a JSON file of a model folder.

    Raises CheckpointError if the folder or the file is missing, the file is not a JSON object, the
    folder has entries that are neither files nor folders, or a link leads out of it.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    _check_files(folder)
    if name == "config.json" and not (folder / name).exists():
        raise CheckpointError(f"{name}: not found{_instead_of_config(folder)}")
    return Fields(name, read_json(folder / name))


def context_tokens(fields: "Fields", default: int | None = None) -> int:
    """Returns the context length under any of the names that transformers' decoders use.

    Raises CheckpointError if it is missing and there is no default.
    """
    name = next(filter(fields.has, CONTEXT_NAMES), CONTEXT_NAMES[0])
    return fields.integer(name, default)


def text_fields(fields: "Fields") -> "Fields":
    """Returns the fields of the decoder: those of text_config in a multimodal model, else all."""
    return fields.nested("text_config") if fields.has("text_config") else fields


def text_model_of(fields: "Fields") -> str:
    """Returns the architecture of a multimodal model, of which only the text model is served.

    Returns "" for a text model. Raises CheckpointError.
    """
    return ", ".join(fields.texts("architectures")) if any(map(fields.has, _MULTIMODAL)) else ""


def plain_name(name: str) -> str:
    """Returns the name that a tensor or layer of a multimodal checkpoint has in its text model.

    Names that do not belong to the text model are returned as they are.
    """
    for prefix, plain in _TEXT_PREFIXES:
        if f"{name}.".startswith(prefix):
            return (plain + f"{name}.".removeprefix(prefix)).removesuffix(".")
    return name


def multimodal_names(name: str) -> list[str]:
    """Returns the names that a layer of a text model may have in a multimodal checkpoint."""
    return [
        (prefix + f"{name}.".removeprefix(plain)).removesuffix(".")
        for prefix, plain in _TEXT_PREFIXES
        if f"{name}.".startswith(plain)
    ]


def read_eos_token_ids(folder: Path, fields: "Fields", vocab_size: int) -> tuple[int, ...]:
    """Returns the end-of-sequence tokens, as vLLM does.

    These are eos_token_id of generation_config.json, or else of `fields` or their text_config, and
    the tokenizer's eos_token. Ids beyond the vocabulary are left out. Raises CheckpointError for a
    value that is not a token id.
    """
    path = folder / "generation_config.json"
    generation = Fields(path.name, read_json(path) if path.exists() else {})
    declared = (
        generation.token_ids("eos_token_id")
        or fields.token_ids("eos_token_id")
        or text_fields(fields).token_ids("eos_token_id")
    )
    ids = (*declared, *_tokenizer_end(folder))
    return tuple(dict.fromkeys(token for token in ids if 0 <= token < vocab_size))


def _tokenizer_end(folder: Path) -> tuple[int, ...]:
    """Returns the id of the tokenizer's eos_token; empty without one.

    As in transformers, special_tokens_map.json takes precedence over tokenizer_config.json, unless
    the latter has an added_tokens_decoder.
    """
    config, old = (
        Fields(name, read_json(folder / name) if (folder / name).exists() else {})
        for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
    source = old if old.has("eos_token") and not config.has("added_tokens_decoder") else config
    named = dict(source.items()).get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    path = tokenizer_file(folder)
    if not isinstance(text, str) or not path.exists():
        return ()
    index = token_ids_of(read_json(path)).get(text)
    return (index,) if type(index) is int else ()


def token_ids_of(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the unchecked ids of all tokens of a tokenizer.json by their text.

    Includes the vocabulary and the added tokens. Empty without a vocabulary.
    """
    model = tokenizer.get("model")
    added = tokenizer.get("added_tokens", [])
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict | list) or not isinstance(added, list):
        return {}
    if isinstance(vocab, dict):
        ids: dict[str, Any] = dict(vocab)
    else:  # Unigram models list pieces and scores in the order of their ids
        pieces = (entry[0] if isinstance(entry, list) and entry else entry for entry in vocab)
        ids = {str(piece): index for index, piece in enumerate(pieces)}
    return ids | {
        str(token.get("content")): token.get("id") for token in added if isinstance(token, dict)
    }


def _instead_of_config(folder: Path) -> str:
    """Returns advice for a folder that has something else instead of config.json."""
    names = sorted(path.name for path in folder.iterdir())
    if files := [name for name in names if name.endswith(".gguf")]:
        return f"; {files[0]:.80} is a complete model: give that file instead of its folder"
    if {"snapshots", "refs"} <= set(names):
        return "; this is a repository in the hub's cache: give one of the folders in its snapshots"
    if "adapter_config.json" in names:
        return "; this is an adapter (adapter_config.json): give the folder of its base model"
    return ""


def _check_files(folder: Path) -> None:
    """Raises CheckpointError for pipes, devices, dangling links and links out of the folder."""
    allowed = _link_targets(folder.resolve())
    for path in (*folder.iterdir(), *folder.glob("*/*")):
        if path.is_symlink() and not any(map(path.resolve().is_relative_to, allowed)):
            raise CheckpointError(f"{path.name}: is a link that leads out of the model's folder")
        if not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path.name}: is neither a file nor a folder")


def _link_targets(root: Path) -> list[Path]:
    """Returns the folders into which links of a model's folder may lead.

    In the hub's cache, files of REPOSITORY/snapshots/COMMIT are links to REPOSITORY/blobs. Since
    huggingface_hub 2, these may be links to blobs that all repositories of the cache share.
    """
    repository = root.parent.parent
    if root.parent.name != "snapshots" or not (repository / "blobs").is_dir():
        return [root]
    shared = repository.parent / "blobs"
    is_store = (shared / _SHARED_BLOBS_MARKER).is_file()
    return [repository, shared] if is_store else [repository]


def read_json(path: Path) -> dict[str, Any]:
    """Parses a JSON file of at most MAX_JSON_BYTES. Raises CheckpointError."""
    return parse_json(path.name, _read_bytes(path))


def read_json_list(path: Path) -> list[Any]:
    """Parses a JSON file that is a list, of at most MAX_JSON_BYTES. Raises CheckpointError."""
    values = _parse_any(path.name, _read_bytes(path))
    if not isinstance(values, list):
        raise CheckpointError(f"{path.name}: not a JSON list")
    return values


def parse_json(file: str, data: bytes) -> dict[str, Any]:
    """Parses a JSON object. Raises CheckpointError, which names `file`."""
    values = _parse_any(file, data)
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return values


def _read_bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path.name}: larger than {MAX_JSON_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror})") from error


def _parse_any(file: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON") from error


class Fields:
    """Reads typed fields of a JSON object; null counts as missing.

    Methods raise CheckpointError.
    """

    def __init__(self, file: str, values: dict[str, Any], prefix: str = "") -> None:
        self._file = file
        self._values = values
        self._prefix = prefix

    def error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._file}: {self._prefix}{name}: {problem}")

    def items(self) -> ItemsView[str, Any]:
        """Returns the names and unchecked values."""
        return self._values.items()

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Returns True if the field is present and null."""
        return name in self._values and self._values[name] is None

    def integer(
        self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MAX_SIZE
    ) -> int:
        def is_valid(value: Any) -> bool:
            return type(value) is int and minimum <= value <= maximum

        return int(self._value(name, default, is_valid, f"an integer from {minimum} to {maximum}"))

    def number(self, name: str, default: float | None = None) -> float:
        def is_valid(value: Any) -> bool:
            return type(value) in (int, float) and 0 < value <= sys.float_info.max

        return float(self._value(name, default, is_valid, "a number above 0"))

    def boolean(self, name: str, default: bool) -> bool:
        return bool(
            self._value(name, default, lambda value: isinstance(value, bool), "true or false")
        )

    def text(self, name: str, default: str | None = None) -> str:
        return str(self._value(name, default, lambda value: isinstance(value, str), "a string"))

    def numbers(self, name: str) -> tuple[float, ...]:
        def is_valid(value: Any) -> bool:
            return isinstance(value, list) and all(
                type(item) in (int, float) and 0 < item <= sys.float_info.max for item in value
            )

        return tuple(map(float, self._value(name, None, is_valid, "a list of numbers above 0")))

    def integers(self, name: str) -> tuple[int, ...]:
        """Returns a list of integers of at least 0; empty if missing."""

        def is_valid(value: Any) -> bool:
            return isinstance(value, list) and all(
                type(item) is int and item >= 0 for item in value
            )

        return tuple(self._value(name, [], is_valid, "a list of integers of at least 0"))

    def texts(self, name: str) -> list[str]:
        def is_valid(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(item, str) for item in value)

        return list(self._value(name, None, is_valid, "a list of strings"))

    def mapping(self, name: str) -> dict[str, Any]:
        """Returns an unchecked object; empty if missing."""
        return dict(self._value(name, {}, lambda value: isinstance(value, dict), "an object"))

    def nested(self, name: str) -> "Fields":
        """Returns the fields of an object; no fields if it is missing."""
        return Fields(self._file, self.mapping(name), f"{self._prefix}{name}.")

    def with_defaults(self, values: dict[str, Any]) -> "Fields":
        """Returns these fields, and `values` in place of those that are missing."""
        own = {name: value for name, value in self._values.items() if value is not None}
        return Fields(self._file, values | own, self._prefix)

    def with_values(self, values: dict[str, Any]) -> "Fields":
        """Returns these fields, and `values` in place of theirs."""
        return Fields(self._file, self._values | values, self._prefix)

    def replaced(self, values: dict[str, Any], name: str) -> "Fields":
        """Returns other values, whose errors name them as fields of the object `name`."""
        return Fields(self._file, values, f"{self._prefix}{name}.")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Returns one id or a list of ids as a tuple; empty if missing."""
        value = self._values.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int for token in ids):
            raise self.error(name, f"must be a token id or a list of token ids, is {value!r:.60}")
        return tuple(ids)

    def _value(self, name: str, default: Any, is_valid: Callable[[Any], bool], kind: str) -> Any:
        value = default if self._values.get(name) is None else self._values[name]
        if value is None:
            raise self.error(name, "is missing")
        if not is_valid(value):
            raise self.error(name, f"must be {kind}, is {value!r:.60}")
        return value
