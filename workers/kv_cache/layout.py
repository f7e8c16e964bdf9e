"""Describes the layout of a model's KV cache, by layer and for any split over ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element by compute dtype."""

GPU_QUANTIZED: Final = ("int8", "fp8")
"""Cache dtypes with one byte per number: -127 to 127, or E4M3 (arXiv 2209.05433)."""

QUANTIZED: Final = (*GPU_QUANTIZED, "int4")
"""Cache dtypes of fewer bits than the model's; int4, numbers of 0 to 15, on CPUs only."""

SCALE_BYTES: Final = 2
"""Bytes of the bfloat16 scale after each head's vector in a cache of int8 or fp8.

A stored number times the scale approximates the original value.
"""

INT4_GROUP: Final = 32
"""Numbers of a vector that share a scale in a cache of int4; the last group may have fewer."""

INT4_SCALE_BYTES: Final = 4
"""Bytes of the scale and the least value of each such group, in bfloat16 behind all numbers.

The least value plus a stored number times the scale approximates the original value.
"""


def head_bytes(head_dim: int, dtype: str, cache_dtype: str = "auto") -> int:
    """Returns the bytes of a token's key (or value) of one KV head; see `KvLayout`."""
    if cache_dtype == "int4":
        return head_dim // 2 + -(-head_dim // INT4_GROUP) * INT4_SCALE_BYTES
    return head_dim + SCALE_BYTES if cache_dtype in QUANTIZED else head_dim * ITEM_BYTES[dtype]


def check_quantized(cache_dtype: str, device_type: str) -> None:
    """Raises ValueError, a one-line message, if a type of device cannot read a cache's dtype."""
    if device_type != "cpu" and cache_dtype in QUANTIZED and cache_dtype not in GPU_QUANTIZED:
        others = ", ".join(GPU_QUANTIZED)
        raise ValueError(
            f"kv_cache_dtype: {cache_dtype} has kernels on cpu only, those of GPUs read a byte for "
            f"each number; use {others} or auto"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """Describes one part of the state that a layer keeps for each sequence.

    Each part is split over ranks by its own heads: the matrix of a gated delta net by value heads,
    for example, and the last inputs of its convolution by key heads and by value heads.
    """

    name: str  # unique within the layer, such as "matrix" or "conv_value"
    # As of `LayerGeometry`: they decide the heads of a rank.
    num_heads: int
    num_kv_heads: int
    planes: int = 1  # equal arrays with the same heads, such as the inputs of query and key
    row: int  # elements of a head in a plane
    dtype: str = "float32"  # one of ITEM_BYTES; auto: the compute dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGeometry:
    """Describes the properties of a layer that its KV cache depends on."""

    num_heads: int  # query heads: they decide the KV heads of a rank, see `sharding`
    num_kv_heads: int  # 0: the layer keeps nothing for each token
    head_dim: int
    # The number of tokens that a query attends to, including its own; None: all tokens before it.
    window: int | None = None
    # A layer with latent attention keeps one row of head_dim elements for each token; the first
    # value_dim of them are also the value. None: a key and a value.
    value_dim: int | None = field(default=None, repr=False)
    # The earlier layer whose cache this layer reads; it keeps none of its own. All else is equal.
    reads: int | None = field(default=None, repr=False)
    states: tuple[StatePart, ...] = field(default=(), repr=False)

    @property
    def keeps_tokens(self) -> bool:
        """Returns True if the layer keeps something for each token."""
        return self.num_kv_heads > 0 and self.reads is None


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePart:
    """Describes what a layer keeps in one group: rows of equal size, by plane and KV head."""

    num_heads: int
    num_kv_heads: int
    planes: int  # 2: keys and values
    row_bytes: int  # of one KV head in one plane, of one token or, in a state, of the sequence
    window: int | None = None  # as of LayerGeometry
    state: str = ""  # the name of the part of a state; empty: kept for each token

    @property
    def slot_bytes(self) -> int:
        """Returns the bytes of all planes of one KV head, of one token or one state."""
        return self.planes * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Describes the layers that keep equal parts, whose memory is one array."""

    part: CachePart
    layers: tuple[int, ...]  # numbers of the layers, ascending

    @property
    def token_bytes(self) -> int:
        """Returns the bytes that all layers of the whole model keep for one token or one state."""
        return self.rank_bytes(self.part.num_kv_heads)

    def rank_bytes(self, num_slots: int) -> int:
        """Returns the same of a rank with `num_slots` KV slots in the group."""
        return len(self.layers) * num_slots * self.part.slot_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Describes the KV cache of a model, independent of its split over ranks.

    The canonical form of a run of layers of a group is [layer, plane, token, KV head, row_bytes];
    a state has one token.
    """

    layers: tuple[LayerGeometry, ...]
    dtype: str  # the compute dtype: float32, bfloat16 or float16
    model: str  # the model's fingerprint: equal weights and config give equal KV cache
    # The cache's dtype: one of QUANTIZED, with scales for each token and head; auto: the model's.
    cache_dtype: str = "auto"
    # By first appearance: the groups that are kept for each token, then those of states.
    groups: tuple[CacheGroup, ...] = field(init=False, repr=False, compare=False)
    # The group of each layer's tokens, and the layer's index within it; of the layer that it reads,
    # if it reads another. None: the layer has no attention.
    places: tuple[tuple[int, int] | None, ...] = field(init=False, repr=False, compare=False)
    # 16 bytes, equal for equal layouts.
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found: dict[CachePart, list[int]] = {}
        for layer, geometry in enumerate(self.layers):
            if geometry.keeps_tokens:
                found.setdefault(self._token_part(geometry), []).append(layer)
        numbers = {part: number for number, part in enumerate(found)}
        for layer, geometry in enumerate(self.layers):
            for state in geometry.states:
                found.setdefault(self._state_part(state), []).append(layer)
        groups = tuple(
            CacheGroup(part=part, layers=tuple(layers)) for part, layers in found.items()
        )
        places: list[tuple[int, int] | None] = []
        for layer, geometry in enumerate(self.layers):
            if geometry.reads is not None:
                kept = self.layers[geometry.reads]
                if not kept.keeps_tokens or self._token_part(kept) != self._token_part(geometry):
                    raise ValueError(f"layer {layer} cannot read the cache of {geometry.reads}")
                places.append(places[geometry.reads])
            elif geometry.keeps_tokens:
                group = numbers[self._token_part(geometry)]
                places.append((group, groups[group].layers.index(layer)))
            else:
                places.append(None)
        # The dataclass is frozen. These are derived once, because transfers look them up for every
        # frame.
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "places", tuple(places))
        described = repr((self.layers, self.dtype, self.model))
        # The rest only where a layout has it, so that the digests of running services do not
        # change.
        if self.cache_dtype != "auto":
            described += self.cache_dtype
        further = [(layer.value_dim, layer.reads, layer.states) for layer in self.layers]
        if any(fields != (None, None, ()) for fields in further):
            described += repr(further)
        object.__setattr__(self, "digest", blake2b(described.encode(), digest_size=16).digest())

    def _token_part(self, geometry: LayerGeometry) -> CachePart:
        return CachePart(
            num_heads=geometry.num_heads,
            num_kv_heads=geometry.num_kv_heads,
            planes=2 if geometry.value_dim is None else 1,
            row_bytes=head_bytes(geometry.head_dim, self.dtype, self.cache_dtype),
            window=geometry.window,
        )

    def _state_part(self, state: StatePart) -> CachePart:
        return CachePart(
            num_heads=state.num_heads,
            num_kv_heads=state.num_kv_heads,
            planes=state.planes,
            row_bytes=state.row * ITEM_BYTES[self.state_dtype(state)],
            state=state.name,
        )

    def state_dtype(self, state: StatePart) -> str:
        """Returns the dtype of a part of a state, one of ITEM_BYTES."""
        return self.dtype if state.dtype == "auto" else state.dtype

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

    @property
    def token_groups(self) -> tuple[CacheGroup, ...]:
        """Returns the groups that are kept for each token; they come first in `groups`."""
        return tuple(group for group in self.groups if not group.part.state)

    @property
    def state_groups(self) -> tuple[CacheGroup, ...]:
        """Returns the groups that are kept for each sequence."""
        return tuple(group for group in self.groups if group.part.state)

    @property
    def bytes_per_token(self) -> int:
        """Returns the bytes that all layers of the whole model keep for one token."""
        return sum(group.token_bytes for group in self.token_groups)

    @property
    def bytes_per_state(self) -> int:
        """Returns the bytes that all layers of the whole model keep for one sequence."""
        return sum(group.token_bytes for group in self.state_groups)

    def place(self, layer: int) -> tuple[int, int]:
        """Returns the group of a layer's tokens and the layer's index in it. Raises ValueError."""
        place = self.places[layer]
        if place is None:
            raise ValueError(f"layer {layer} keeps no KV cache")
        return place


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpan:
    """Describes a part of a rank's KV cache: layers of one group, positions, and KV slots.

    The positions belong to one sequence. For KV slots see `sharding`.
    """

    group: int = 0  # index into KvLayout.groups
    first_layer: int  # index into the group's layers
    num_layers: int
    first_token: int  # a state has one token, 0
    num_tokens: int
    first_slot: int
    num_slots: int

    @property
    def layers(self) -> range:
        """Returns the indices of the span's layers within its group."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    def check(self, layout: KvLayout, *, tokens: range, num_slots: Sequence[int]) -> None:
        """Raises ValueError unless the span is valid.

        It must lie within the positions `tokens` and `num_slots[group]` KV slots.
        """
        _check_range(self.group, 1, len(layout.groups), "group")
        num_layers = len(layout.groups[self.group].layers)
        _check_range(self.first_layer, self.num_layers, num_layers, "layers")
        if self.first_token < tokens.start:
            raise ValueError(f"tokens {self.first_token} are not within {tokens}")
        _check_range(self.first_token, self.num_tokens, tokens.stop, "tokens")
        _check_range(self.first_slot, self.num_slots, num_slots[self.group], "KV slots")

    def size(self, layout: KvLayout) -> int:
        """Returns the bytes of the span in canonical form."""
        slot_bytes = layout.groups[self.group].part.slot_bytes
        return self.num_layers * self.num_tokens * self.num_slots * slot_bytes


def _check_range(first: int, count: int, size: int, what: str) -> None:
    if min(first, count - 1) < 0 or first + count > size:
        raise ValueError(f"{what} {first} + {count} are not within {size}")
