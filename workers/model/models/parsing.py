"""Parses the common fields of config.json as transformers 4 and 5 write them."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from ...kv_cache.layout import LayerGeometry, StatePart
from ..config import Fields, ModelConfig, RopeConfig, plain_name, text_fields

MAX_LAYERS: Final = 1_000
_INFINITY: Final = {"__float__": "Infinity"}
_ACTIVATIONS: Final = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

WindowOf = Callable[[int], int | None]
"""Returns the sliding window of a layer by its index."""
RopeOf = Callable[[int], RopeConfig | None]
"""Returns the rotary embedding of a layer by its index."""
StatesOf = Callable[[int], tuple[StatePart, ...]]
"""Returns the parts of a layer's state by its index; empty if the layer has attention."""


def parse_decoder_config(
    fields: Fields,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    window: WindowOf = lambda index: None,
    rope: RopeOf | None = None,
    states: StatesOf = lambda index: (),
    activation: tuple[str, str] = ("hidden_act", "silu"),
    norm_eps: tuple[str, float] = ("rms_norm_eps", 1e-6),
    intermediate_size: int | None = None,
    tied: bool = False,
) -> ModelConfig:
    """Parses the fields that most families have in common.

    `activation` and `norm_eps` are names and defaults of two fields that differ between families.
    `intermediate_size` and `tied` are defaults of fields; `tied` is that of tie_word_embeddings.
    Without `rope`, all layers have the rotary embedding that the fields describe. A layer with
    `states` has no attention, so it keeps nothing for each token. Raises CheckpointError if a field
    is missing, ill-typed, out of bounds or not supported.
    """
    if (name := fields.text(*activation)) not in _ACTIVATIONS:
        raise fields.error(
            activation[0], f"{name!r:.60} is not supported, only {', '.join(_ACTIVATIONS)}"
        )
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    num_kv_heads = _num_kv_heads(fields, num_heads)
    head_dim = _head_dim(fields, hidden_size, num_heads)
    shared = None if rope else parse_rope(fields)
    parts = [states(index) for index in range(num_layers)]
    ropes = tuple(
        None if kept else rope(index) if rope else shared for index, kept in enumerate(parts)
    )
    for each in filter(None, set(ropes)):
        _check_rope(fields, each, head_dim)
    return ModelConfig(
        architecture=fields.texts("architectures")[0],
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", intermediate_size),
        layers=tuple(
            LayerGeometry(
                num_heads=num_heads,
                num_kv_heads=0 if kept else num_kv_heads,
                head_dim=head_dim,
                window=window(index),
                states=kept,
            )
            for index, kept in enumerate(parts)
        ),
        ropes=ropes,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        norm_eps=fields.number(*norm_eps),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", tied),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        dtype=parse_dtype(fields),
        activation=_ACTIVATIONS[name],
        quantization=parse_quantization(fields),
    )


def parse_quantization(fields: Fields) -> dict[str, Any]:
    """Returns quantization_config; empty without one. Raises CheckpointError.

    The first versions of llm-compressor called it compression_config.
    """
    if found := fields.mapping("quantization_config"):
        return found
    found = fields.mapping("compression_config")
    return {**found, "quant_method": "compressed-tensors"} if found else {}


def without_prefixes(value: Any) -> Any:
    """Returns a quantization_config whose names of layers are those of the text model alone."""
    if isinstance(value, Mapping):
        return {name: without_prefixes(each) for name, each in value.items()}
    if isinstance(value, list):
        return [
            plain_name(each) if isinstance(each, str) else without_prefixes(each) for each in value
        ]
    return value


def parse_layer_types(fields: Fields, default: Callable[[int], bool]) -> Callable[[int], bool]:
    """Returns a function from a layer's index to whether it has a sliding window.

    The field layer_types decides; without it, `default` does.
    """
    if not fields.has("layer_types"):
        return default
    kinds = parse_layer_kinds(fields, ("full_attention", "sliding_attention"))
    return lambda index: kinds[index] == "sliding_attention"


def parse_layer_kinds(
    fields: Fields, allowed: Collection[str], name: str = "layer_types"
) -> tuple[str, ...]:
    """Returns the types of all layers. Raises CheckpointError if one is not `allowed`."""
    kinds = fields.texts(name)
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    if len(kinds) != num_layers or not set(kinds) <= set(allowed):
        raise fields.error(
            name, f"must be a list of {num_layers} entries, each {' or '.join(allowed)}"
        )
    return tuple(kinds)


def parse_alternating_windows(fields: Fields, *, full_every: int, default: int = 4096) -> WindowOf:
    """Returns the windows of a model in which every `full_every`th layer has full attention.

    The field layer_types overrides this. `default` is the default of sliding_window.
    """
    window = fields.integer("sliding_window", default)
    slides = parse_layer_types(fields, lambda index: bool((index + 1) % full_every))
    return lambda index: window if slides(index) else None


def parse_rope(
    fields: Fields,
    *,
    layer_type: str = "",
    default_theta: float = 10_000.0,
    default_rotated: float = 1.0,
    has_partial: bool = False,
) -> RopeConfig:
    """Parses the rotary embedding of all layers or, if present, of one type of layers.

    transformers 5 writes `rope_parameters`; transformers 4 wrote `rope_theta` and `rope_scaling`.
    As in transformers, an empty object counts as missing. Raises CheckpointError.
    """
    name = "rope_scaling" if fields.mapping("rope_scaling") else "rope_parameters"
    rope = fields.nested(name)
    if layer_type and rope.has(layer_type):
        rope = rope.nested(layer_type)
    elif of_types := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise rope.error(
            of_types[0], "a rotary embedding per layer type is not supported for this model"
        )
    theta = rope.number("rope_theta", fields.number("rope_theta", default_theta))
    rotated = rope.number(
        "partial_rotary_factor", fields.number("partial_rotary_factor", default_rotated)
    )
    if rotated != 1.0 and not (has_partial and rotated < 1.0):
        raise rope.error("partial_rotary_factor", "is not supported")
    max_position = fields.integer("max_position_embeddings")
    original = rope.integer("original_max_position_embeddings", max_position)
    if fields.has("original_max_position_embeddings"):
        original = fields.integer("original_max_position_embeddings")
    kind = rope.text("rope_type", rope.text("type", "default"))
    # Dynamic scaling changes nothing up to max_position_embeddings, and no sequence is longer.
    if kind in ("default", "dynamic"):
        return RopeConfig(theta=theta, rotated=rotated)
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, factor=rope.number("factor"), rotated=rotated)
    parsers = {"llama3": _llama3, "yarn": _yarn, "longrope": _longrope, "su": _longrope}
    if kind not in parsers:
        raise rope.error(
            "rope_type",
            f"{kind!r:.60} is not supported, only default, linear, dynamic, {', '.join(parsers)}",
        )
    return parsers[kind](rope, theta, original, max_position, rotated)


def parse_time_steps(fields: Fields, name: str) -> tuple[float, float]:
    """Returns the least and the greatest time step of mixers; without the field, all are allowed.

    The greatest may be infinite. Raises CheckpointError.
    """
    values = dict(fields.items()).get(name)
    if values is None:
        return 0.0, math.inf
    is_pair = isinstance(values, list) and len(values) == 2
    # transformers 5 writes infinity as an object, since JSON has no name for it.
    numbers = [math.inf if each == _INFINITY else each for each in values] if is_pair else []
    if not is_pair or any(type(each) not in (int, float) for each in numbers):
        raise fields.error(name, f"must be two numbers, is {values!r:.60}")
    least, most = map(float, numbers)
    if not 0 <= least <= most:
        raise fields.error(name, f"must be ascending numbers of at least 0, is {values!r:.60}")
    return least, most


def parse_groups(fields: Fields, name: str, default: int, num_heads: int) -> int:
    """Returns the number of groups of a mixer's heads. Raises CheckpointError."""
    num_groups = fields.integer(name, default)
    if num_heads % num_groups:
        raise fields.error(name, f"{num_groups} does not divide the {num_heads} heads")
    return num_groups


def parse_dtype(fields: Fields) -> str:
    """Returns the dtype that config.json, or its text_config, declares. Raises CheckpointError."""
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    if not fields.has(name) and fields.has("text_config"):
        return parse_dtype(text_fields(fields))
    dtype = fields.text(name, "float32")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise fields.error(name, f"{dtype!r:.60} is not supported, only float32, bfloat16, float16")
    return dtype


def _num_kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    return num_kv_heads


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if not fields.has("head_dim") and hidden_size % num_heads:
        raise fields.error(
            "hidden_size", f"{hidden_size} is not a multiple of num_attention_heads {num_heads}"
        )
    head_dim = fields.integer("head_dim", hidden_size // num_heads, minimum=2)
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even, is {head_dim}")
    return head_dim


def _check_rope(fields: Fields, rope: RopeConfig, head_dim: int) -> None:
    num_rotated = rope.num_rotated(head_dim)
    if num_rotated < 2 or num_rotated % 2:
        raise fields.error(
            "partial_rotary_factor",
            f"must rotate an even number of dimensions, at least 2; it rotates {num_rotated}",
        )
    for factors in filter(None, (rope.factors, rope.short_factors)):
        if len(factors) != num_rotated // 2:
            raise fields.error(
                "rope_parameters", f"must have {num_rotated // 2} factors, has {len(factors)}"
            )


def _llama3(
    rope: Fields, theta: float, original: int, max_position: int, rotated: float
) -> RopeConfig:
    low = rope.number("low_freq_factor")
    high = rope.number("high_freq_factor")
    if low >= high:
        raise rope.error("low_freq_factor", f"{low} must be below high_freq_factor {high}")
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=rope.number("factor"),
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
        rotated=rotated,
    )


def _yarn(
    rope: Fields, theta: float, original: int, max_position: int, rotated: float
) -> RopeConfig:
    """Parses YaRN (arXiv 2309.00071); derives the attention factor if it is missing."""
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
        rotated=rotated,
    )


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(
    rope: Fields, theta: float, original: int, max_position: int, rotated: float
) -> RopeConfig:
    """Parses LongRoPE (arXiv 2402.13753).

    Its long factors are meant for sequences beyond the original context. As in vLLM, a model with
    a longer context uses them for all sequences, because the KV cache of a prefix must not depend
    on the tokens after it. `with_context` selects the short factors if no sequence is that long.
    """
    if original < 2:
        raise rope.error("original_max_position_embeddings", f"must be at least 2, is {original}")
    factor = rope.number("factor", max_position / original)
    attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        kind="longrope",
        theta=theta,
        original_max_position=original,
        factors=rope.numbers("long_factor" if max_position > original else "short_factor"),
        short_factors=rope.numbers("short_factor") if rope.has("short_factor") else (),
        attention_factor=rope.number("attention_factor", attention_factor),
        rotated=rotated,
    )
