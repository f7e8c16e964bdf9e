"""Computes mixtures of experts: a router selects experts per token (arXiv 1701.06538)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import kernels
from ..config import ExpertsConfig
from ..module import Module
from ..quant.base import LinearMethod, LinearPartition, activate_and_mul
from ..quant.side_by_side import method_of_maps
from ..quant.unquantized import UnquantizedLinearMethod
from .grouped import (
    ExpertRows,
    GroupedLinear,
    add_outputs,
    can_stack,
    multiplies_in_one_launch,
)
from .linear import BuildOptions

ExpertMaps = tuple[list[LinearMethod], list[LinearMethod]]
"""The gate and up map of each expert, and the down map of each."""


class RoutedExperts(Module, ABC):
    """Routes each token to the experts with the highest scores and adds their weighted outputs.

    Every rank has its part of each expert. On CPUs, and on GPUs with `batch_invariant`, a token's
    output does not depend on the other tokens of the batch, to the last bit: neither do an expert's
    products, and the outputs are added in a fixed order. GPUs multiply the rows of all experts in
    one launch: of torch, which is faster, or of our kernel.
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
        self._batch_invariant = build.batch_invariant
        self._grouped: tuple[GroupedLinear, GroupedLinear] | None = None
        self._by_torch = False
        self.router: LinearMethod = UnquantizedLinearMethod(batch_invariant=build.batch_invariant)
        outputs = ((router, config.num_experts, slice(None)),)
        partition = LinearPartition(outputs=outputs, num_inputs=hidden, has_bias=router_bias)
        self.router.create_weights(partition, build.dtype)

    @abstractmethod
    def maps(self) -> ExpertMaps:
        """Returns the loaded maps; the lists are empty after `group`."""

    @abstractmethod
    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Maps the output of the gate and up maps, [num_rows, 2 * size], to [num_rows, size]."""

    def compute(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Maps x [num_rows, hidden] to the output of this rank's part of expert `number`."""
        gate_up, down = self.maps()
        return down[number].apply(self.activate(gate_up[number].apply(x)))

    def process_after_load(self) -> None:
        """Stacks the experts' weights on GPUs, where one launch then multiplies by all of them."""
        router = self.router.plain_form()
        if router is None or not kernels.on_gpu(router[0]):
            return
        if not all(map(can_stack, self.maps())):
            self.waits_for_device = True
            return
        is_one_launch = all(map(multiplies_in_one_launch, self.maps()))
        self.group(by_torch=is_one_launch and not self._batch_invariant)

    def group(self, *, by_torch: bool) -> None:
        """Moves the experts' weights into stacks, for `grouped_mm` or for our kernel."""
        gate_up, down = self.maps()
        self._grouped = (GroupedLinear(gate_up), GroupedLinear(down))
        self._by_torch = by_torch

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Maps x [num_tokens, hidden] to the same shape, added to `residual`."""
        chosen, weights = self._route(x)
        if self._grouped is None:
            total = self._one_by_one(x, chosen, weights)
        elif self._by_torch:
            total = self._by_grouped_mm(x, chosen, weights, *self._grouped)
        else:
            total = self._in_fixed_order(x, chosen, weights, *self._grouped)
        result = self._tp.all_reduce(total.to(x.dtype))
        return result if residual is None else residual + result

    def _one_by_one(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns the sums of the experts' outputs, float32 [num_tokens, hidden]."""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for number in sorted(set(chosen.flatten().tolist())):
            rows, places = torch.where(chosen == number)
            total.index_add_(
                0, rows, self.compute(number, x[rows]).float() * weights[rows, places, None]
            )
        return total

    def _by_grouped_mm(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        gate_up: GroupedLinear,
        down: GroupedLinear,
    ) -> torch.Tensor:
        """Computes the same sums as `_one_by_one` without waiting for the device."""
        rows = ExpertRows.sort(chosen, self._config.num_experts)
        num_tokens, num_chosen = chosen.shape
        hidden = self.activate(gate_up.sorted(x[rows.order // num_chosen], rows))
        outputs = down.sorted(hidden, rows)
        by_token = torch.empty_like(outputs).index_copy_(0, rows.order, outputs)
        return (by_token.view(num_tokens, num_chosen, -1) * weights[:, :, None]).sum(1)

    def _in_fixed_order(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        gate_up: GroupedLinear,
        down: GroupedLinear,
    ) -> torch.Tensor:
        """Computes the sums in the dtype of x; a token's sum depends on no other token."""
        rows = ExpertRows.sort(chosen, self._config.num_experts)
        num_chosen = chosen.shape[1]
        hidden = self.activate(gate_up.from_tokens(x, rows, num_chosen))
        return add_outputs(down.to_places(hidden, rows, num_chosen), weights.contiguous())

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


class GatedExperts(RoutedExperts):
    """Routes tokens to MLPs like Llama's: down(activation(gate(x)) * up(x)).

    A rank computes the summand of its part of the intermediate size. Adapters do not change
    experts, because an expert's rows are not the rows of the step.
    """

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
        size = config.intermediate_size
        part = build.tp.part(size)

        def make(names: Sequence[str], partition: LinearPartition) -> LinearMethod:
            made = method_of_maps(build.linear_method, names)
            made.create_weights(partition, build.dtype)
            return made

        self.gate_up: list[LinearMethod] = []
        self.down: list[LinearMethod] = []
        for number in range(config.num_experts):
            prefix = f"{names.experts}.{number}"
            inner = [f"{prefix}.{names.gate}", f"{prefix}.{names.up}"]
            outputs = tuple((name, size, part) for name in inner)
            partition = LinearPartition(
                outputs=outputs, num_inputs=hidden, gated=True, is_expert=True
            )
            self.gate_up.append(make(inner, partition))
            outer = f"{prefix}.{names.down}"
            outputs = ((outer, hidden, slice(None)),)
            partition = LinearPartition(
                outputs=outputs, num_inputs=size, inputs=part, is_expert=True
            )
            self.down.append(make([outer], partition))

    def maps(self) -> ExpertMaps:
        return self.gate_up, self.down

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return activate_and_mul(gate_up, self._activation)

    def compute(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return self.down[number].apply(self.gate_up[number].apply_gated(x, self._activation))
