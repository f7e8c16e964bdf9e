"""Computes what one rank of a split model keeps in memory for KV cache, and whether models go with
ranks and with each other. Pure arithmetic; imports no torch.
"""

from ..kv_cache.layout import head_bytes
from ..kv_cache.sharding import check_split, kv_heads
from .config import ModelConfig


def check_config_split(config: ModelConfig, tp: int) -> None:
    """Raises ValueError, with one line for the user, if some layer's heads cannot be split over
    `tp` ranks.
    """
    for layer in config.layers:
        check_split(layer.num_heads, layer.num_kv_heads, tp)
        if config.transformers is not None and layer.num_kv_heads % tp:
            raise ValueError(
                f"tp: {tp} does not divide the model's {layer.num_kv_heads} KV heads, as "
                "transformers needs"
            )
    if tp > 1 and not config.has_tp_plan:
        raise ValueError(
            f"tp: {tp}: transformers has no plan to split {config.architecture}, only 1 is possible"
        )


def check_draft(draft: ModelConfig, model: ModelConfig) -> None:
    """Raises ValueError, with one line for the user, if `draft` cannot propose tokens for `model`."""
    if draft.vocab_size != model.vocab_size:
        sizes = f"{draft.vocab_size} tokens in its vocabulary and the model {model.vocab_size}"
        raise ValueError(f"the draft model has {sizes}; they must be the same")


def kv_bytes_per_token(config: ModelConfig, tp: int, dtype: str, cache_dtype: str = "auto") -> int:
    """Returns the bytes of one token's keys and values, over all layers, on each rank.

    Raises ValueError as `check_split` does."""
    heads = (
        (len(kv_heads(layer.num_heads, layer.num_kv_heads, tp, 0)), layer.head_dim)
        for layer in config.layers
    )
    return 2 * sum(
        num_slots * head_bytes(head_dim, dtype, cache_dtype) for num_slots, head_dim in heads
    )
