"""Computes mixtures of experts: a router selects experts per token (arXiv 1701.06538)."""

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
    """Routes each token to the experts with the highest scores and adds their weighted outputs.

    Every rank has its part of each expert. A token's output does not depend on the other tokens of
    the batch, to the last bit: neither do an expert's products, and the outputs are added in the
    order of the experts.
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
        """Takes `router`, the router's name in the checkpoint."""
        self._config = config
        self._tp = build.tp
        self.router: LinearMethod = UnquantizedLinearMethod(batch_invariant=build.batch_invariant)
        outputs = ((router, config.num_experts, slice(None)),)
        partition = LinearPartition(outputs=outputs, num_inputs=hidden, has_bias=router_bias)
        self.router.create_weights(partition, build.dtype)

    @abstractmethod
    def compute(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Maps x [num_rows, hidden] to the output of this rank's part of expert `number`."""

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
        """Returns each token's experts and float32 weights, both [num_tokens, num_chosen]."""
        scores = self.router.apply(x).float().softmax(dim=-1)
        weights, chosen = scores.topk(self._config.num_chosen, dim=-1)
        if self._config.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return chosen, weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names the parts of a layer of experts in the checkpoint."""

    router: str
    experts: str  # prefix of an expert's number
    gate: str
    up: str
    down: str


class GatedExpert(Module):
    """Computes this rank's summand of down(activation(gate(x)) * up(x)).

    It covers the rank's part of the intermediate size.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        hidden: int,
        names: ExpertNames,
        number: int,
        build: BuildOptions,
    ) -> None:
        prefix = f"{names.experts}.{number}"
        size = config.intermediate_size
        part = build.tp.part(size)
        down = f"{prefix}.{names.down}"
        outputs = [(f"{prefix}.{name}", size, part) for name in (names.gate, names.up)]
        # Adapters do not change experts: an expert's rows are not the rows of the step.
        build = replace(build, lora=LoraStep())
        self.gate_up_proj = ColumnParallelLinear(outputs, hidden, build, gated=True)
        self.down_proj = build.linear_method(down)
        partition = LinearPartition(
            outputs=((down, hidden, slice(None)),), num_inputs=size, inputs=part
        )
        self.down_proj.create_weights(partition, build.dtype)


class GatedExperts(RoutedExperts):
    """Routes tokens to MLPs like Llama's."""

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
        expert = self.experts[number]
        return expert.down_proj.apply(expert.gate_up_proj.method.apply_gated(x, self._activation))
