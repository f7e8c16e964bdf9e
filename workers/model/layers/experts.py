"""Experts of which a router picks some for each token (mixture of experts, arXiv 1701.06538)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch

from ..config import ExpertsConfig
from ..module import Module
from ..quant.base import LinearMethod, LinearPartition
from ..quant.unquantized import UnquantizedLinearMethod
from .linear import BuildOptions, ColumnParallelLinear
from .lora import LoraStep


class RoutedExperts(Module, ABC):
    """Sends each token to the experts that the router scores best, and adds what they compute,
    weighted.

    Every rank has its part of each expert. What a token gets does not depend, to the last bit, on
    the tokens beside it: an expert's products do not, and their sum is in the order of the experts.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        hidden: int,
        router: str,
        build: BuildOptions,
        *,
        router_bias: bool = False,
    ) -> None:
        """`router` is its name in the checkpoint."""
        self._config, self._tp = config, build.tp
        self.router: LinearMethod = UnquantizedLinearMethod(batch_invariant=build.batch_invariant)
        outputs = ((router, config.num_experts, slice(None)),)
        partition = LinearPartition(outputs=outputs, num_inputs=hidden, has_bias=router_bias)
        self.router.create_weights(partition, build.dtype)

    @abstractmethod
    def compute(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Maps x [num_rows, hidden] by the rank's part of an expert to a summand of the same shape."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Maps x [num_tokens, hidden] to the same shape, added to `residual`."""
        chosen, weights = self._route(x)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for number in sorted(set(chosen.flatten().tolist())):
            rows, places = torch.where(chosen == number)
            total.index_add_(
                0, rows, self.compute(number, x[rows]).float() * weights[rows, places, None]
            )
        result = self._tp.all_reduce(total.to(x.dtype))
        return result if residual is None else residual + result

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the experts of each token and their weights, [num_tokens, num_chosen], the latter
        in float32.
        """
        scores = self.router.apply(x).float().softmax(dim=-1)
        weights, chosen = scores.topk(self._config.num_chosen, dim=-1)
        return chosen, weights / weights.sum(
            -1, keepdim=True
        ) if self._config.normalised else weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names the parts of a layer of experts in the checkpoint."""

    router: str
    experts: str  # before the number of an expert
    gate: str
    up: str
    down: str


class GatedExpert(Module):
    """Computes a summand of down(activation(gate(x)) * up(x)): over the rank's part of the
    intermediate size.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        hidden: int,
        names: ExpertNames,
        number: int,
        build: BuildOptions,
    ) -> None:
        prefix, size = f"{names.experts}.{number}", config.intermediate_size
        part, down = build.tp.part(size), f"{prefix}.{names.down}"
        outputs = [(f"{prefix}.{name}", size, part) for name in (names.gate, names.up)]
        build = replace(
            build, lora=LoraStep()
        )  # adapters do not change experts, whose rows are not the step's
        self.gate_up_proj = ColumnParallelLinear(outputs, hidden, build, gated=True)
        self.down_proj = build.linear_method(down)
        partition = LinearPartition(
            outputs=((down, hidden, slice(None)),), num_inputs=size, inputs=part
        )
        self.down_proj.create_weights(partition, build.dtype)


class GatedExperts(RoutedExperts):
    """Routes to MLPs like Llama's."""

    def __init__(
        self,
        config: ExpertsConfig,
        hidden: int,
        names: ExpertNames,
        build: BuildOptions,
        *,
        activation: str,
    ) -> None:
        super().__init__(config, hidden, names.router, build)
        self._activation = activation
        self.experts = [
            GatedExpert(config, hidden, names, number, build)
            for number in range(config.num_experts)
        ]

    def compute(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """See `RoutedExperts.compute`."""
        expert = self.experts[number]
        return expert.down_proj.apply(expert.gate_up_proj.method.apply_gated(x, self._activation))
