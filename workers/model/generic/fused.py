"""Replaces small modules of transformers by one call of our kernels.

These are norms, rotary positions and the token embedding. A norm is replaced only if it gives the
kernel's result for random numbers.
"""

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from ..kernels.c import cpu
from .config import LAYER_TYPES, text_config
from .tensor_parallel import TpPlan

_MAX_TABLE_BYTES: Final = 1 << 28
_TOLERANCES: Final = {torch.float32: 1e-5, torch.bfloat16: 2**-7}

Forward = Callable[..., Any]


def use_kernels(model: PreTrainedModel, dtype: torch.dtype, plan: TpPlan) -> None:
    """Replaces the `forward` of modules by our kernels for CPUs, after the weights are loaded."""
    if not cpu.usable(next(model.parameters())):
        return
    for name, module in list(model.named_modules()):
        forward: Forward | None = None
        if type(module) is nn.Embedding and module is model.get_input_embeddings():
            forward = None if plan.is_split(f"{name}.weight") else _embedding(module)
        elif type(module).__name__.endswith("RMSNorm"):
            forward = _norm(module, dtype)
        elif "RotaryEmbedding" in type(module).__name__:
            forward = _rotary(module, text_config(model.config), dtype)
        if forward is not None:
            setattr(module, "forward", forward)  # noqa: B010  # mypy refuses to assign to a method


def _embedding(module: nn.Embedding) -> Forward:
    weight = module.weight.data
    return lambda token_ids: cpu.gather(weight, token_ids[0].int())[None]


def _norm(module: nn.Module, dtype: torch.dtype) -> Forward | None:
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if (
        not isinstance(weight, nn.Parameter)
        or weight.dtype != dtype
        or not isinstance(epsilon, float)
    ):
        return None
    plain = module.forward
    data = weight.data

    # x is [1, num_tokens, dim] or [1, num_tokens, heads, dim].
    def forward(x: torch.Tensor) -> torch.Tensor:
        has_rows = x.ndim == 3 or (x.ndim == 4 and x.stride(2) == x.shape[3])
        fits = x.dtype == dtype and len(x) == 1 and x.stride(-1) == 1 and has_rows
        result: torch.Tensor = cpu.rms_norm(x[0], data, epsilon)[None] if fits else plain(x)
        return result

    x = torch.randn(1, 8, weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(dtype)
    tolerance = _TOLERANCES[dtype]
    return forward if torch.allclose(forward(x), plain(x), rtol=tolerance, atol=tolerance) else None


def _rotary(module: nn.Module, config: Any, dtype: torch.dtype) -> Forward | None:
    """Returns a look-up in tables of the module's results for all positions.

    Returns None if the module has another interface, or the tables would be too large.
    """
    given = list(inspect.signature(module.forward).parameters)
    if given[:2] != ["x", "position_ids"] or given[2:] not in ([], ["layer_type"]):
        return None
    kinds: list[tuple[str, ...]] = [()]
    if given[2:]:
        # Layers of a kind without parameters have no rotary positions.
        parameters = getattr(config, "rope_parameters", None) or {}
        kinds = [
            (kind,)
            for kind in sorted(set(config.layer_types))
            if kind in LAYER_TYPES and parameters.get(kind, parameters) is not None
        ]
        if not kinds:
            return None
    like = torch.zeros(1, 1, 1, dtype=dtype)
    positions = torch.arange(config.max_position_embeddings)[None]
    try:
        first = module(like, positions[:, :1], *kinds[0])
    except (IndexError, RuntimeError):  # it needs positions on several axes
        return None
    is_pair = isinstance(first, tuple) and all(
        each.shape[:2] == (1, 1) and each.ndim == 3 for each in first
    )
    if not is_pair:
        return None
    if sum(each.nbytes for each in first) * len(kinds) * positions.shape[1] > _MAX_TABLE_BYTES:
        return None
    tables = {
        kind: [each[0].contiguous() for each in module(like, positions, *kind)] for kind in kinds
    }

    def forward(
        x: torch.Tensor, position_ids: torch.Tensor, *kind: str, **named: str
    ) -> tuple[torch.Tensor, ...]:
        # Positions on several axes, [axes, 1, num_tokens], are equal for text.
        rows = position_ids.flatten(0, -2)[0].int()
        return tuple(cpu.gather(each, rows)[None] for each in tables[kind or tuple(named.values())])

    return forward
