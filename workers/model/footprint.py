"""Computes the memory of a rank, and checks that models fit the ranks and each other.

Pure arithmetic; imports no torch.
"""

from dataclasses import dataclass
from typing import Final

from ..engine.block_table import NUM_STATES
from ..kv_cache.layout import KvLayout, check_quantized
from ..kv_cache.memory import plan_memory, state_bytes
from ..kv_cache.sharding import check_split
from ..kv_cache.store import slots_of
from ..kv_cache.tables import DISK_NEEDS_DENSE, TableSpec, held_blocks, moved_bytes
from .config import ModelConfig

# Of a model without attention, whose blocks only name resume points.
_LEAST_BLOCK_BYTES: Final = 1024
_STATES_PER_SEQUENCE: Final = 4
_TOKENS_OF_POINT: Final = 2048  # between the regular resume points of a model without attention


def check_config_split(config: ModelConfig, tp: int) -> None:
    """Raises ValueError, a one-line message, if a layer's heads cannot be split over `tp` ranks."""
    if tp > 1 and not config.has_tp_plan:
        raise ValueError(
            f"tp: {tp}: transformers has no plan to split {config.architecture}; use 1"
        )
    for layer in config.layers:
        for part in layer.states:
            check_split(part.num_heads, part.num_kv_heads, tp)
        if not layer.keeps_tokens:
            continue
        check_split(layer.num_heads, layer.num_kv_heads, tp)
        # Every rank holds the rows of a latent layer.
        is_latent = layer.value_dim is not None
        if config.transformers is not None and not is_latent and layer.num_kv_heads % tp:
            raise ValueError(
                f"tp: {tp} does not divide the model's {layer.num_kv_heads} KV heads, which "
                "transformers requires"
            )


def check_device(config: ModelConfig, device: str, *, batch_invariant: bool = False) -> None:
    """Raises ValueError, a one-line message, if `device` cannot run the model.

    `batch_invariant`: with sums that do not depend on the batch, as in `ModelRunner.load`.
    """
    if device != "cpu" and any(layer.states for layer in config.layers):
        raise ValueError(
            f"device: {device}: models that keep states run on cpu only; "
            f"{config.architecture} keeps states"
        )
    if device != "cpu" and batch_invariant and config.transformers is not None:
        raise ValueError(
            f"numerics: exact on cuda needs Tandem's own code; {config.architecture} runs through "
            "transformers' code, whose sums depend on the batch; use fast"
        )


def check_draft(draft: ModelConfig, model: ModelConfig) -> None:
    """Raises ValueError, a one-line message, if `draft` cannot propose tokens for `model`."""
    if draft.vocab_size != model.vocab_size:
        raise ValueError(
            f"the draft model has {draft.vocab_size} tokens in its vocabulary and the model "
            f"{model.vocab_size}; they must be the same"
        )
    if any(layer.window is not None or layer.states for layer in draft.layers):
        raise ValueError("keeps state or windows beside full KV cache")
    if all(layer.window is not None for layer in model.layers if layer.keeps_tokens):
        raise ValueError("needs a model with layers that see all tokens, whose blocks it shares")


def check_disk(model: ModelConfig) -> None:
    """Raises ValueError, a one-line message, if blocks on disk cannot continue a prompt alone."""
    if any(layer.window is not None or layer.states for layer in model.layers):
        raise ValueError(DISK_NEEDS_DENSE)


def check_cache_dtype(config: ModelConfig, cache_dtype: str, device: str = "cpu") -> None:
    """Raises ValueError, a one-line message, if the KV cache cannot have a dtype on a device."""
    check_quantized(cache_dtype, device)
    if cache_dtype != "auto" and any(layer.value_dim is not None for layer in config.layers):
        raise ValueError(f"kv_cache_dtype: {cache_dtype} is not supported for latent keys")
    odd = [layer.head_dim for layer in config.layers if layer.keeps_tokens and layer.head_dim % 2]
    if cache_dtype == "int4" and odd:
        raise ValueError(f"kv_cache_dtype: int4 needs an even head size; the model has {odd[0]}")


def kv_bytes_per_token(config: ModelConfig, tp: int, dtype: str, cache_dtype: str = "auto") -> int:
    """Returns the bytes of one token's keys and values in all layers, on each rank.

    Raises ValueError as `check_split` and `check_cache_dtype`.
    """
    return _token_bytes(kv_layout(config, dtype, cache_dtype), tp)


def kv_layout(config: ModelConfig, dtype: str, cache_dtype: str = "auto") -> KvLayout:
    """Returns the layout of a model. Raises ValueError as `check_cache_dtype`."""
    check_cache_dtype(config, cache_dtype)
    return KvLayout(layers=config.layers, dtype=dtype, model="", cache_dtype=cache_dtype)


def state_tokens(layout: KvLayout, tp: int) -> int:
    """Returns the number of tokens whose KV cache has as many bytes as a state, on each rank.

    The result is 0 without states, and a constant if no layer keeps tokens.
    """
    if not layout.state_groups:
        return 0
    token = _token_bytes(layout, tp)
    return -(-state_bytes(layout, tp=tp) // token) if token else _TOKENS_OF_POINT


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCounts:
    """Holds the numbers of blocks and of states in a rank's memory."""

    num_blocks: int
    num_states: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBytes:
    """Holds the bytes of a rank's blocks and states, which share its cache."""

    block: int
    state: int = 0  # 0: the model keeps no state

    @classmethod
    def of(
        cls, layout: KvLayout, tp: int, *, block_size: int, draft_bytes: int = 0
    ) -> "CacheBytes":
        """Returns the bytes of each of `tp` ranks; `draft_bytes` are a draft model's of a token.

        Raises ValueError as `check_split`.
        """
        memory = plan_memory(layout, num_blocks=1, block_size=block_size, tp=tp, rank=0)
        block = memory.block_bytes + memory.tables[0].block_size * draft_bytes
        return cls(block=max(block, _LEAST_BLOCK_BYTES), state=state_bytes(layout, tp=tp))

    def split(
        self, num_bytes: int, *, state_slots: int | None, max_sequences: int, least: int
    ) -> CacheCounts:
        """Divides a cache of `num_bytes` into states and blocks.

        `state_slots` is the number of states. None: at most half of the bytes and four states for
        each of `max_sequences`. `least` is the number of states that one sequence takes. Raises
        ValueError, a one-line message, if there are fewer states, or no block beside them.
        """
        if not self.state:
            return self._beside(0, num_bytes)
        if state_slots is None:
            most = num_bytes // 2 // self.state
            state_slots = max(min(most, _STATES_PER_SEQUENCE * max_sequences), least)
        if state_slots < least:
            raise ValueError(
                f"state_slots: {state_slots} holds no sequence, which takes {least}; raise it"
            )
        counts = self._beside(state_slots, num_bytes)
        if not counts.num_blocks:
            needed = state_slots * self.state + self.block
            raise ValueError(
                f"kv_cache_gb: {gib(num_bytes)} are below {gib(needed)}, the size of "
                f"{state_slots} states and a block; raise it or lower state_slots"
            )
        return counts

    def split_host(self, num_bytes: int, counts: CacheCounts) -> CacheCounts:
        """Divides host memory in the ratio of the blocks and the states of the cache."""
        blocks = counts.num_blocks * self.block
        states = counts.num_states * self.state
        own = num_bytes * states // (blocks + states) // self.state if states else 0
        return self._beside(own, num_bytes)

    def _beside(self, num_states: int, num_bytes: int) -> CacheCounts:
        """Returns the counts of a cache with these states, and blocks in the rest of its bytes."""
        rest = num_bytes - num_states * self.state
        return CacheCounts(num_blocks=max(rest, 0) // self.block, num_states=num_states)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceMemory:
    """Holds what one sequence takes of a rank's KV cache."""

    tables: tuple[TableSpec, ...]
    num_blocks: tuple[int, ...]  # of each table
    num_states: int  # 0: the model keeps no state
    held_bytes: int  # of these blocks and states
    moved_bytes: int  # by a transfer to another worker
    unwindowed_bytes: int  # that it would hold if no layer had a window


def sequence_memory(
    layout: KvLayout, tp: int, *, block_size: int, num_tokens: int
) -> SequenceMemory:
    """Returns the KV cache of a sequence of `num_tokens` on each of `tp` ranks."""
    memory = plan_memory(layout, num_blocks=1, block_size=block_size, tp=tp, rank=0)
    num_blocks = held_blocks(memory.tables, num_tokens)
    num_states = NUM_STATES if layout.state_groups else 0
    of_states = num_states * state_bytes(layout, tp=tp)
    all_tokens = -(-num_tokens // block_size) * block_size
    return SequenceMemory(
        tables=memory.tables,
        num_blocks=num_blocks,
        num_states=num_states,
        held_bytes=sum(num_blocks) * memory.block_bytes + of_states,
        moved_bytes=moved_bytes(layout, slots_of(layout, tp, 0), num_tokens),
        unwindowed_bytes=all_tokens * _token_bytes(layout, tp) + of_states,
    )


def _token_bytes(layout: KvLayout, tp: int) -> int:
    """Returns the bytes that each of `tp` ranks keeps for one token."""
    slots = slots_of(layout, tp, 0)
    return sum(
        group.rank_bytes(num_slots)
        for group, num_slots in zip(layout.token_groups, slots, strict=False)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Holds the bytes that a rank keeps on its device beside the KV cache."""

    weights: int
    activations: int = 0  # the most that a step needs
    graphs: int = 0  # CUDA graphs and their buffers
    rest: int = 0  # CUDA, its libraries, and other programs

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.graphs + self.rest

    def __str__(self) -> str:
        return (
            f"{gib(self.weights)} of weights, {gib(self.activations)} of activations, "
            f"{gib(self.graphs)} of CUDA graphs and {gib(self.rest)} of the rest (CUDA, its "
            "libraries, other programs)"
        )


def memory_budget(total: int, share: float, utilization: float) -> int:
    """Returns the bytes of a device's or host's `total` memory that a rank may use.

    `share` is the rank's share of the GPU (`num_gpus`) or of the host, `utilization` the part of
    the share to use.
    """
    return int(total * share * utilization)


def gib(num_bytes: int) -> str:
    """Returns a number of bytes as text in GiB."""
    return f"{num_bytes / 2**30:.2f} GiB"
