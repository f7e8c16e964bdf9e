"""Keeps the KV cache of latent attention (arXiv 2405.04434) as latents.

Transformers' modules expand each token's latent by `kv_b_proj` to keys and values of all heads.
Scores are linear in the keys, and results in the values. So the key half of the weight may multiply
the queries before attention, and the value half the results after it. Attention then reads one row
for all heads: the latent, which is also the value, and the shared part with positions. Decodes and
prompts take the same way.
"""

from typing import Any, Final

import torch
from torch import nn

from ..kernels.c import cpu

_SIZES: Final = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def keep_latents(model: nn.Module) -> None:
    """Makes the modules of latent attention pass latent rows to the attention function."""
    for module in model.modules():
        if is_latent(module):
            setattr(module, "expand_kv", _join)  # noqa: B010  # mypy refuses to assign to a method


def is_latent(module: nn.Module) -> bool:
    """Returns True for a module whose keys and values are linear in latents."""
    projection = getattr(module, "kv_b_proj", None)
    return (
        hasattr(module, "expand_kv")
        and isinstance(projection, nn.Linear)
        and projection.bias is None
        and all(isinstance(getattr(module, name, None), int) for name in _SIZES)
    )


def latent_projections(model: nn.Module) -> list[str]:
    """Returns the names of the linear maps whose weights `LatentHeads` takes."""
    return [f"{name}.kv_b_proj" for name, module in model.named_modules() if is_latent(module)]


def value_dim_of(module: nn.Module) -> int:
    """Returns the number of elements of a latent module's results, for each head."""
    size: int = getattr(module, _SIZES[3])
    return size


def _join(latent: torch.Tensor, shared: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces `expand_kv`: returns the row [1, 1, num_tokens, row] and its value."""
    row = torch.cat((latent, shared), dim=-1)
    return row, row[..., : latent.shape[-1]]


class LatentHeads:
    """Applies `kv_b_proj` to the queries and results of a rank's heads."""

    def __init__(self, module: Any, num_heads: int, heads: slice) -> None:
        """Takes the loaded weight out of the module.

        The weight is of `num_heads` heads, of which the rank has `heads`, or of the latter alone.
        """
        rank, key_dim, _, value_dim = (getattr(module, name) for name in _SIZES)
        weight = module.kv_b_proj.weight.data.view(-1, key_dim + value_dim, rank)
        if len(weight) == num_heads:
            weight = weight[heads]
        del module.kv_b_proj
        self._key_dim = key_dim
        self._absorb = _HeadLinear(weight[:, :key_dim].transpose(1, 2))
        self._expand = _HeadLinear(weight[:, key_dim:])

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Maps queries [num_tokens, heads, head_dim] to [num_tokens, heads, row]."""
        plain, shared = query.tensor_split((self._key_dim,), dim=-1)
        return torch.cat((self._absorb(plain), shared), dim=-1)

    def expand(self, results: torch.Tensor) -> torch.Tensor:
        """Maps results [num_tokens, heads, latent] to [num_tokens, heads, value_dim]."""
        return self._expand(results)


class _HeadLinear:
    """Multiplies each head by a weight of its own."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Takes the weight [heads, outputs, inputs]."""
        self._is_packed = cpu.can_multiply_heads(weight)
        self._weight = (
            cpu.pack_linear(weight.flatten(0, 1))
            if self._is_packed
            else weight.transpose(1, 2).contiguous()
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [num_tokens, heads, inputs] to [num_tokens, heads, outputs]."""
        if self._is_packed:
            return cpu.linear_by_head(x, self._weight)
        return torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1)
