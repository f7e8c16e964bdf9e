"""Computes mixtures of experts: a router selects experts per token (arXiv 1701.06538)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import kernels
from ..config import ExpertsConfig
from ..kernels.c import cpu, gates
from ..kernels.c import experts as native
from ..module import Module, Parameter, WeightSlice
from ..quant.base import LinearMethod, LinearPartition, activate_and_mul
from ..quant.side_by_side import method_of_maps
from ..quant.unquantized import UnquantizedLinearMethod
from .grouped import (
    ExpertRows,
    GroupedLinear,
    PackedExperts,
    add_outputs,
    can_pack,
    can_stack,
    multiplies_in_one_launch,
)
from .linear import BuildOptions
from .scaling import relu_squared

ExpertMaps = tuple[list[LinearMethod], list[LinearMethod]]
"""The gate and up map of each expert, and the down map of each."""


class RoutedExperts(Module, ABC):
    """Routes each token to the experts with the highest scores and adds their weighted outputs.

    Every rank has its part of each expert. On CPUs, and on GPUs with `batch_invariant`, a token's
    output does not depend on the other tokens of the batch, to the last bit: neither do an expert's
    products, and the outputs are added in a fixed order. GPUs multiply the rows of all experts in
    one launch: of torch, which is faster, or of our kernel. CPUs do so in one call if there is a
    kernel for the weights; then the step can be recorded.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        hidden: int,
        router: str,
        build: BuildOptions,
        *,
        router_bias: bool = False,
        score_bias: str | None = None,
    ) -> None:
        """Takes the names of `router` and, if experts are chosen by scores with a bias, of that."""
        self._config = config
        self._tp = build.tp
        self._batch_invariant = build.batch_invariant
        self._grouped: tuple[GroupedLinear, GroupedLinear] | None = None
        self._packed: tuple[PackedExperts, PackedExperts] | None = None
        self._by_torch = False
        self.router: LinearMethod = UnquantizedLinearMethod(batch_invariant=build.batch_invariant)
        outputs = ((router, config.num_experts, slice(None)),)
        partition = LinearPartition(outputs=outputs, num_inputs=hidden, has_bias=router_bias)
        # As in transformers; the choice among many experts with similar scores needs it.
        dtype = torch.float32 if config.sigmoid else build.dtype
        self.router.create_weights(partition, dtype)
        self.score_bias: Parameter | None = None
        if score_bias is not None:
            self.score_bias = Parameter(
                WeightSlice(score_bias, (config.num_experts,)), dtype=torch.float32
            )

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
        """Joins the experts' weights, so that one launch or call multiplies by all of them."""
        if self._config.num_experts <= native.MAX_EXPERTS and all(map(can_pack, self.maps())):
            gate_up, down = self.maps()
            self._packed = (PackedExperts(gate_up), PackedExperts(down))
            return
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

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, inputs: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Maps x [num_tokens, hidden] to the same shape, added to `residual`.

        With `inputs` [num_tokens, size], experts are chosen by x and map these.
        """
        chosen, weights = self._route(x)
        if inputs is None:
            inputs = x
        if self._packed is not None:
            return self._by_panels(inputs, chosen, weights, residual, *self._packed)
        if self._grouped is None:
            total = self._one_by_one(inputs, chosen, weights)
        elif self._by_torch:
            total = self._by_grouped_mm(inputs, chosen, weights, *self._grouped)
        else:
            total = self._in_fixed_order(inputs, chosen, weights, *self._grouped)
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

    def _by_panels(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        residual: torch.Tensor | None,
        gate_up: PackedExperts,
        down: PackedExperts,
    ) -> torch.Tensor:
        """Returns the sums of all ranks in the dtype of x, added to `residual`."""
        choices = native.sort_choices(chosen, self._config.num_experts)
        hidden = self.inner(cpu.gather(x, choices.tokens), choices, gate_up)
        outputs = down.multiply(hidden, choices)
        if self._tp.group is None:
            return native.combine(outputs, choices.places, weights, residual)
        total = self._tp.all_reduce(native.combine(outputs, choices.places, weights))
        return total if residual is None else residual + total

    def inner(
        self, x: torch.Tensor, choices: native.SortedChoices, gate_up: PackedExperts
    ) -> torch.Tensor:
        """Maps sorted rows x [num_rows, hidden] to inputs of the down maps, [num_rows, size]."""
        return self.activate(gate_up.multiply(x, choices))

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
        config = self._config
        scores = self._sigmoid_scores(x) if config.sigmoid else self.router.apply(x)
        if native.can_route(scores):
            return native.route(
                scores,
                config.num_chosen,
                softmax=not config.sigmoid,
                normalised=config.normalised,
                factor=config.scale,
                bias=None if self.score_bias is None else self.score_bias.data,
                num_groups=config.num_groups,
                num_chosen_groups=config.num_chosen_groups,
            )
        if config.sigmoid:
            ranked = scores if self.score_bias is None else scores + self.score_bias.data
            chosen = self._of_best_groups(ranked).topk(config.num_chosen, dim=-1).indices
            weights = scores.gather(1, chosen)
        else:
            scores = scores.float().softmax(dim=-1)
            weights, chosen = scores.topk(config.num_chosen, dim=-1)
        if config.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return chosen, weights if config.scale == 1.0 else weights * config.scale

    def _sigmoid_scores(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the scores of all experts, float32 [num_tokens, num_experts]."""
        form = self.router.plain_form()
        if cpu.usable(x) and form is not None:
            return gates.sigmoid_scores(x, form[0])
        return self.router.apply(x.float()).sigmoid()

    def _of_best_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """Replaces scores [num_tokens, num_experts] of the groups that are not chosen by -inf."""
        config = self._config
        if config.num_groups == 1:
            return scores
        grouped = scores.view(len(scores), config.num_groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(config.num_chosen_groups, dim=-1).indices
        is_left_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device)
        is_left_out.scatter_(1, best, False)
        return grouped.masked_fill(is_left_out[:, :, None], -torch.inf).view(scores.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names the parts of a layer of experts in the checkpoint."""

    router: str
    experts: str  # prefix of an expert's number
    gate: str | None  # None: experts have no gate
    up: str
    down: str
    score_bias: str | None = None  # None: experts are chosen by their scores alone


class MlpExperts(RoutedExperts):
    """Routes tokens to MLPs: down(activation(gate(x)) * up(x)), or down(relu(up(x)) ** 2).

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
        activation: str = "silu",
        inputs: int | None = None,
    ) -> None:
        """Takes the `activation` of gates, and the size of the `inputs` if not `hidden`."""
        super().__init__(config, hidden, names.router, build, score_bias=names.score_bias)
        self._activation = activation
        self._has_gate = names.gate is not None
        width = hidden if inputs is None else inputs
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
            inner = [f"{prefix}.{name}" for name in (names.gate, names.up) if name is not None]
            outputs = tuple((name, size, part) for name in inner)
            partition = LinearPartition(
                outputs=outputs, num_inputs=width, gated=self._has_gate, is_expert=True
            )
            self.gate_up.append(make(inner, partition))
            outer = f"{prefix}.{names.down}"
            outputs = ((outer, width, slice(None)),)
            partition = LinearPartition(
                outputs=outputs, num_inputs=size, inputs=part, is_expert=True
            )
            self.down.append(make([outer], partition))

    def maps(self) -> ExpertMaps:
        return self.gate_up, self.down

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        if not self._has_gate:
            return relu_squared(gate_up)
        return activate_and_mul(gate_up, self._activation)

    def inner(
        self, x: torch.Tensor, choices: native.SortedChoices, gate_up: PackedExperts
    ) -> torch.Tensor:
        if not gate_up.alternates:
            return super().inner(x, choices, gate_up)
        return gate_up.multiply(x, choices, self._activation)

    def compute(self, number: int, x: torch.Tensor) -> torch.Tensor:
        if not self._has_gate:
            return super().compute(number, x)
        return self.down[number].apply(self.gate_up[number].apply_gated(x, self._activation))
