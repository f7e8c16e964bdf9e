"""Describes the layout of a model's KV cache, by layer and for any split over ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element by compute dtype."""

QUANTIZED: Final = ("int8", "fp8")
"""Cache dtypes with one byte per number: -127 to 127, or E4M3 (arXiv 2209.05433)."""

SCALE_BYTES: Final = 2
"""Bytes of the bfloat16 scale after each head's vector in a quantized cache.

A stored number times the scale approximates the original value.
"""


def head_bytes(head_dim: int, dtype: str, cache_dtype: str = "auto") -> int:
    """Returns the bytes of a token's key (or value) of one KV head; see `KvLayout`."""
    return head_dim + SCALE_BYTES if cache_dtype in QUANTIZED else head_dim * ITEM_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGeometry:
    """Describes the properties of a layer's attention that its KV cache depends on."""

    num_heads: int  # query heads: they decide the KV heads of a rank, see `sharding`
    num_kv_heads: int
    head_dim: int
    # The number of tokens that a query attends to, including its own; None: all tokens before it.
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Describes the KV cache of a model, independent of its split over ranks.

    The canonical form of a run of equal layers is [layer, key or value, token, KV head,
    head_bytes].
    """

    layers: tuple[LayerGeometry, ...]
    dtype: str  # the compute dtype: float32, bfloat16 or float16
    model: str  # the model's fingerprint: equal weights and config give equal KV cache
    # The cache's dtype: one of QUANTIZED, with a scale for each token and head; auto: the model's.
    cache_dtype: str = "auto"
    # Layers whose KV cache has equal shape form a group. The layer numbers of each group, by first
    # appearance.
    groups: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    # The group of each layer, and the layer's index within it.
    places: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)
    # 16 bytes, equal for equal layouts.
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
        # The dataclass is frozen. These are derived once, because transfers look them up for every
        # frame.
        object.__setattr__(self, "groups", tuple(map(tuple, groups.values())))
        object.__setattr__(
            self, "places", tuple(places[layer] for layer in range(len(self.layers)))
        )
        described = repr((self.layers, self.dtype, self.model))
        # Only then, so that the digests of running services do not change.
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
        """Returns the layout of a model whose layers are all equal."""
        layer = LayerGeometry(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        return cls(layers=(layer,) * num_layers, dtype=dtype, model=model)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def bytes_per_slot(self, layer: int) -> int:
        """Returns the bytes of one token's key and value in one KV slot of a layer."""
        return 2 * head_bytes(self.layers[layer].head_dim, self.dtype, self.cache_dtype)

    @property
    def bytes_per_token(self) -> int:
        """Returns the bytes of one token's keys and values in all layers of the whole model."""
        return sum(
            geometry.num_kv_heads * self.bytes_per_slot(i) for i, geometry in enumerate(self.layers)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpan:
    """Describes a part of a rank's KV cache: layers of one group, positions, and KV slots.

    The positions belong to one sequence. For KV slots see `sharding`.
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
        """Raises ValueError unless the span is valid.

        It must lie within `num_tokens` tokens and `num_slots(layer)` KV slots, and its layers must
        belong to one group.
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
        """Returns the bytes of the span in canonical form."""
        return (
            self.num_layers
            * self.num_tokens
            * self.num_slots
            * layout.bytes_per_slot(self.first_layer)
        )


def _check_range(first: int, count: int, size: int, what: str) -> None:
    if min(first, count - 1) < 0 or first + count > size:
        raise ValueError(f"{what} {first} + {count} are not within {size}")
