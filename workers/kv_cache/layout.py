"""Describes the KV cache of a model, layer by layer and however ranks split it, and boxes of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element, by the dtypes that models compute in."""

QUANTIZED: Final = ("int8", "fp8")
"""Cache dtypes of a byte for each number: -127 to 127, or E4M3 (arXiv 2209.05433)."""

SCALE_BYTES: Final = 2
"""In a cache of these the bfloat16 scale behind each head's vector: each number times it is what
was rounded.
"""


def head_bytes(head_dim: int, dtype: str, cache_dtype: str = "auto") -> int:
    """Returns the bytes of a token's key, or value, of one KV head; see `KvLayout`."""
    return head_dim + SCALE_BYTES if cache_dtype in QUANTIZED else head_dim * ITEM_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGeometry:
    """Describes the attention of one layer, as far as its KV cache depends on it."""

    num_heads: int  # query heads: they decide which KV heads a rank has, see `sharding`
    num_kv_heads: int
    head_dim: int
    window: int | None = None  # tokens that a query sees, its own included; None: all before it


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Describes the KV cache of a model, however ranks split it. The canonical form of a run of
    equal layers is [layer, key or value, token, KV head, head_bytes].
    """

    layers: tuple[LayerGeometry, ...]
    dtype: str  # that the model computes in: float32, bfloat16 or float16
    model: str  # the model's fingerprint: equal weights and config, equal KV cache
    # of what is kept: QUANTIZED with a scale for each token and head; auto: the model's
    cache_dtype: str = "auto"
    # Layers whose KV cache has equal shape form a group: the layer numbers of each, by first
    # appearance.
    groups: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    # Of each layer: its group and its index within it.
    places: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)
    # 16 bytes; equal for equal layouts.
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        groups: dict[tuple[int, int, int], list[int]] = {}
        for layer, geometry in enumerate(self.layers):
            groups.setdefault(
                (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim), []
            ).append(layer)
        places = {
            layer: (g, i)
            for g, group in enumerate(groups.values())
            for i, layer in enumerate(group)
        }
        # The dataclass is frozen; these are derived once because transfers look them up for every
        # frame.
        object.__setattr__(self, "groups", tuple(map(tuple, groups.values())))
        object.__setattr__(
            self, "places", tuple(places[layer] for layer in range(len(self.layers)))
        )
        described = repr((self.layers, self.dtype, self.model))
        # more is said only then: the digests of running services stay as they are
        if self.cache_dtype != "auto":
            described += self.cache_dtype
        object.__setattr__(self, "digest", blake2b(described.encode(), digest_size=16).digest())

    @classmethod
    def uniform(
        cls,
        *,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        model: str,
    ) -> "KvLayout":
        """The layout of a model whose layers are all equal."""
        layer = LayerGeometry(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        return cls(layers=(layer,) * num_layers, dtype=dtype, model=model)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def bytes_per_slot(self, layer: int) -> int:
        """Bytes of one token's key and value in one KV slot of a layer."""
        return 2 * head_bytes(self.layers[layer].head_dim, self.dtype, self.cache_dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers of the whole model."""
        return sum(
            geometry.num_kv_heads * self.bytes_per_slot(i) for i, geometry in enumerate(self.layers)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpan:
    """Names a box of a rank's KV cache: layers of one group, positions in a sequence, KV slots (see
    `sharding`).
    """

    first_layer: int
    num_layers: int
    first_token: int
    num_tokens: int
    first_slot: int
    num_slots: int

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)

    def check(self, layout: KvLayout, *, num_tokens: int, num_slots: Callable[[int], int]) -> None:
        """Raises ValueError unless the span lies within a cache of `num_tokens` tokens and
        `num_slots(layer)` KV slots, and its layers are of one group.
        """
        _check_range(self.first_layer, self.num_layers, layout.num_layers, "layers")
        if len({layout.places[layer][0] for layer in self.layers}) > 1:
            raise ValueError(
                f"layers {self.first_layer} + {self.num_layers} are not within one group of equal "
                "layers"
            )
        _check_range(self.first_token, self.num_tokens, num_tokens, "tokens")
        _check_range(self.first_slot, self.num_slots, num_slots(self.first_layer), "KV slots")

    def size(self, layout: KvLayout) -> int:
        """Bytes in canonical form."""
        return (
            self.num_layers
            * self.num_tokens
            * self.num_slots
            * layout.bytes_per_slot(self.first_layer)
        )


def _check_range(first: int, count: int, size: int, what: str) -> None:
    if min(first, count - 1) < 0 or first + count > size:
        raise ValueError(f"{what} {first} + {count} are not within {size}")
