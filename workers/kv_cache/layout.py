"""Describes the KV cache of a model, however ranks split it, and boxes of it."""

from dataclasses import dataclass
from typing import Final

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""By the dtypes of weights and of KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGeometry:
    """The attention of one layer, as its KV cache sees it."""

    num_heads: int  # query heads: they decide which KV heads a rank has, see `sharding`
    num_kv_heads: int
    head_dim: int
    window: int | None = None  # tokens that a query sees, its own included; None: all before it


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The KV cache of a model, however ranks split it. Its canonical form is [layer, key or value, token, KV head,
    head_dim] of dtype."""

    num_layers: int
    num_heads: int  # query heads: they decide which KV heads a rank has, see `sharding`
    num_kv_heads: int
    head_dim: int
    dtype: str  # float32, bfloat16 or float16
    model: str  # the model's fingerprint: equal weights and config, equal KV cache

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token's key and value in one layer and KV slot."""
        return 2 * self.head_dim * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpan:
    """A box of a rank's KV cache: layers, tokens (positions in a sequence) and KV slots (see `sharding`)."""

    first_layer: int
    num_layers: int
    first_token: int
    num_tokens: int
    first_slot: int
    num_slots: int

    def check(self, *, num_layers: int, num_tokens: int, num_slots: int) -> None:
        """Raises ValueError unless it lies within a cache of this many."""
        for first, count, size, what in (
            (self.first_layer, self.num_layers, num_layers, "layers"),
            (self.first_token, self.num_tokens, num_tokens, "tokens"),
            (self.first_slot, self.num_slots, num_slots, "KV slots"),
        ):
            if min(first, count - 1) < 0 or first + count > size:
                raise ValueError(f"{what} {first} + {count} are not within {size}")

    def size(self, layout: KvLayout) -> int:
        """Bytes in canonical form."""
        return self.num_layers * self.num_tokens * self.num_slots * layout.bytes_per_slot
