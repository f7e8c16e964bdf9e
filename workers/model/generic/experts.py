"""Multiplies the stacked experts of transformers' modules by our kernels for CPUs.

Transformers' code chooses the experts. The modules are those that its `ExpertsInterface` serves.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from ..kernels.c import cpu
from ..kernels.c.experts import MAX_EXPERTS, combine, sort_choices
from ..layers.grouped import PackedExperts, can_pack
from ..quant.base import LinearMethod
from ..quant.unquantized import UnquantizedLinearMethod

_SILU: Final = ("SiLU", "SiLUActivation")
# Options of transformers' `use_experts_implementation`, with which weights are as our kernels need
# them: [experts, outputs, inputs], the gate first, and nothing after the down map.
_OPTIONS: Final = {"has_gate": True, "is_concatenated": True, "is_transposed": False}
_REFUSED_OPTION: Final = "has_post_expert_norm"  # transformers 5.17 does not have it


class ExpertsForward:
    """Replaces the `forward` of a module with experts."""

    def __init__(self, module: Any, gate_up: PackedExperts, down: PackedExperts) -> None:
        self._num_experts: int = module.num_experts
        self._gate_up = gate_up
        self._down = down
        self._apply_gate: Callable[[torch.Tensor], torch.Tensor] = module._apply_gate
        is_silu = type(getattr(module, "act_fn", None)).__name__ in _SILU
        is_plain = type(module)._apply_gate.__name__ == "_default_apply_gate"
        self._activation = "silu" if is_silu and is_plain and gate_up.alternates else None

    def __call__(
        self,
        hidden_states: torch.Tensor,  # [num_tokens, hidden]
        top_k_index: torch.Tensor,  # [num_tokens, num_chosen], the experts of each token
        top_k_weights: torch.Tensor,  # of the same shape
    ) -> torch.Tensor:
        """Returns the weighted sum of each token's outputs, [num_tokens, hidden]."""
        choices = sort_choices(top_k_index.int().contiguous(), self._num_experts)
        rows = cpu.gather(hidden_states.contiguous(), choices.tokens)
        if self._activation:
            hidden = self._gate_up.multiply(rows, choices, self._activation)
        else:
            hidden = self._apply_gate(self._gate_up.multiply(rows, choices)).contiguous()
        outputs = self._down.multiply(hidden, choices)
        return combine(outputs, choices.places, top_k_weights.float().contiguous())


def use_packed_experts(model: PreTrainedModel) -> None:
    """Replaces the `forward` of loaded experts that our kernels support, and frees their weights.

    The weights of one module at a time are in memory twice.
    """
    for module in model.modules():
        if not _is_supported(module):
            continue
        maps = [_methods(module, name) for name in ("gate_up_proj", "down_proj")]
        if not all(map(can_pack, maps)):
            continue
        forward = ExpertsForward(module, *map(PackedExperts, maps))
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(module, name)
            empty = torch.empty(0, dtype=weight.dtype, device=weight.device)
            setattr(module, name, nn.Parameter(empty, requires_grad=False))
        setattr(module, "forward", forward)  # noqa: B010  # mypy refuses to assign to a method


def _is_supported(module: nn.Module) -> bool:
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return (
        all(getattr(module, name, None) is value for name, value in _OPTIONS.items())
        and not getattr(module, _REFUSED_OPTION, False)
        and getattr(module, "num_experts", MAX_EXPERTS + 1) <= MAX_EXPERTS
        and all(
            isinstance(each, nn.Parameter) and each.ndim == 3 and cpu.can_multiply(each.data[0])
            for each in weights
        )
    )


def _methods(module: nn.Module, name: str) -> list[LinearMethod]:
    """Returns a linear method for each expert's weight; the stored weights are not changed."""
    biases = getattr(module, f"{name}_bias", None)
    made: list[LinearMethod] = []
    for number, weight in enumerate(getattr(module, name).data):
        bias = None if biases is None else biases.data[number].clone()
        gated = name == "gate_up_proj"
        made.append(UnquantizedLinearMethod.from_tensors(weight.clone(), bias, gated=gated))
    return made
