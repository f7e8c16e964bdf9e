"""Lets decoders with sparse attention (arXiv 2512.02556) see all keys.

Their indexer chooses `index_topk` keys for each query. Up to this number of tokens it chooses all
of them, so attention is dense and needs no indexer. Longer sequences are refused.
"""

from typing import Any

import torch
from torch import nn

from .latent import is_latent


class CausalMask:
    """Stands for a causal mask, which our attention applies by itself."""

    def __getitem__(self, index: Any) -> "CausalMask":
        return self


class _AllKeys(nn.Module):
    """Replaces an indexer, whose choice nobody reads."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        return None


def see_all_keys(model: nn.Module) -> None:
    """Removes the indexers of a model. It must not run sequences of more than `index_topk`."""
    for module in model.modules():
        if is_latent(module) and hasattr(module, "indexer"):
            # Layers that share another layer's choice have no indexer of their own.
            module.indexer = _AllKeys()
            module.register_forward_pre_hook(_give_mask, with_kwargs=True)


def dense_tokens_of(config: Any) -> int | None:
    """Returns the longest sequence that sees all keys; None: any sequence does."""
    size = getattr(config, "index_topk", None)
    return size if isinstance(size, int) else None


def _give_mask(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs | {"attention_mask": CausalMask()}


def without_mask(mask: torch.Tensor | CausalMask | None) -> torch.Tensor | None:
    """Returns the mask that a module's attention must apply."""
    return None if isinstance(mask, CausalMask) else mask
