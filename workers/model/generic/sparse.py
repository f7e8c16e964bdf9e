"""Lets decoders with sparse attention (arXiv 2512.02556) see all keys.

Their indexer chooses `index_topk` keys for each query. Up to this number of tokens it chooses all
of them, so attention is dense and needs no indexer. Longer sequences are refused.
"""

from typing import Any, Final

import torch
from torch import nn

from ..config import Fields, text_fields
from .latent import is_latent

# GLM-5.3 makes a mask of what an indexer chooses: groups of keys, and the keys after the last one.
_MASK: Final = "build_attention_mask_from_topk"
_HAS_TAIL: Final = "index_kpool_always_select_tail"


class CausalMask:
    """Stands for a causal mask, which our attention applies by itself."""

    def __getitem__(self, index: Any) -> "CausalMask":
        return self


class _AllKeys(nn.Module):
    """Replaces an indexer, whose choice nobody reads."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        return None


def see_all_keys(model: nn.Module, config: Any, fields: Fields) -> None:
    """Removes the indexers of a model. It must not run sequences of more than `index_topk`.

    Raises CheckpointError for a model whose indexers leave keys out of shorter sequences.
    """
    if not getattr(config, _HAS_TAIL, True):
        raise text_fields(fields).error(
            _HAS_TAIL, "false, no attention to the last keys, is not supported"
        )
    for module in model.modules():
        if is_latent(module) and hasattr(module, "indexer"):
            # Layers that share another layer's choice have no indexer of their own.
            module.indexer = _AllKeys()
            module.register_forward_pre_hook(_give_mask, with_kwargs=True)
            if hasattr(module, _MASK):
                setattr(module, _MASK, _all_keys)


def dense_tokens_of(config: Any) -> int | None:
    """Returns the longest sequence that sees all keys; None: any sequence does."""
    size = getattr(config, "index_topk", None)
    return size if isinstance(size, int) else None


def _give_mask(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs | {"attention_mask": CausalMask()}


def _all_keys(*args: Any, **kwargs: Any) -> CausalMask:
    return CausalMask()


def without_mask(mask: torch.Tensor | CausalMask | None) -> torch.Tensor | None:
    """Returns the mask that a module's attention must apply."""
    return None if isinstance(mask, CausalMask) else mask
