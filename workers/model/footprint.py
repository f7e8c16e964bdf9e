"""What one rank of a split model keeps in memory. Pure arithmetic; imports no torch.

Says what `Decoder` and `PagedKv` hold with a `Shard`. Not in it: activations, and that in bfloat16 on CPUs a head that
is tied to the embedding is packed for its kernel beside it.
"""

import math

from ..kv_cache.layout import ITEM_BYTES
from ..kv_cache.sharding import kv_heads, part
from .checkpoint import expected_tensors
from .config import ModelConfig


def rank_tensors(config: ModelConfig, tp: int, rank: int) -> dict[str, tuple[int, ...]]:
    """The shape of each weight's part that a rank keeps, by the names of `expected_tensors`.

    Raises ValueError as `check_split` does."""
    query = config.num_heads // tp * config.head_dim
    kv = len(kv_heads(config.num_heads, config.num_kv_heads, tp, rank)) * config.head_dim
    inner, vocab = (len(part(size, tp, rank)) for size in (config.intermediate_size, config.vocab_size))
    rows = {"embed_tokens": vocab, "lm_head": vocab, "gate_proj": inner, "up_proj": inner}
    rows |= {"q_proj": query, "k_proj": kv, "v_proj": kv}
    columns = {"o_proj": query, "down_proj": inner}
    kept = {}
    for name, shape in expected_tensors(config).items():
        layer, leaf = name.split(".")[-2:]
        if layer in rows:
            kept[name] = (rows[layer], *shape[1:])
        elif layer in columns and leaf == "weight":
            kept[name] = (shape[0], columns[layer])
        elif layer not in columns or rank == 0:  # one rank adds the bias of what all add up
            kept[name] = shape
    return kept


def weight_bytes(config: ModelConfig, tp: int, dtype: str) -> int:
    """Bytes of the weights on the rank that has the most: where a size does not divide, parts differ by one.

    Raises ValueError as `check_split` does."""
    parts = (rank_tensors(config, tp, rank) for rank in range(tp))
    return ITEM_BYTES[dtype] * max(sum(map(math.prod, shapes.values())) for shapes in parts)


def kv_bytes_per_token(config: ModelConfig, tp: int, dtype: str) -> int:
    """Bytes of one token's keys and values, over all layers, on each rank.

    Raises ValueError as `check_split` does."""
    num_slots = len(kv_heads(config.num_heads, config.num_kv_heads, tp, 0))
    return 2 * config.num_layers * num_slots * config.head_dim * ITEM_BYTES[dtype]
