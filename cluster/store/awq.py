"""Rounds linear weights after activation-aware scaling (AWQ, arXiv 2306.00978).

Inputs that are large on a calibration text get larger weights, which lose less when they are
rounded. The layer before is scaled by the inverse, so the model computes the same. Knows nothing of
files.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from ...workers.model.config import CheckpointError
from .rounding import Grid, Rounded, round_to_best_range, round_to_nearest

_STEPS: Final = 20  # of the exponent of the scales, from 0 to 1
_LEAST_MEAN: Final = 1e-4  # of an input: others are always about 0
_CHECKED_TOKENS: Final = 64
_TOLERANCE: Final = 1e-2  # of the scaled model's outputs, relative to their norm


@dataclass(frozen=True, slots=True)
class AwqResult:
    """Holds the rounded weights by the name of the linear map, and other tensors by their name."""

    rounded: dict[str, Rounded] = field(default_factory=dict)
    # Norms and biases, in the dtype of the checkpoint.
    changed: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Shared:
    """Describes the input that some linear maps of a layer have in common."""

    x: torch.Tensor  # [.., inputs]
    names: list[str]
    norm: str | None  # whose output the input is

    def hessian(self) -> torch.Tensor:
        """Returns the sum of x x^T, [inputs, inputs]."""
        rows = self.x.flatten(0, -2)
        return rows.t() @ rows

    def magnitudes(self) -> torch.Tensor:
        """Returns the mean magnitude of each input, [inputs]."""
        return self.x.flatten(0, -2).abs().mean(0)


def round_by_awq(
    model: Any,
    sequences: torch.Tensor,  # [sequences, tokens]
    names: list[str],
    grid: Callable[[int], Grid],
    dtype: torch.dtype,
    on_layer: Callable[[int, int], None],
) -> AwqResult:
    """Scales and rounds the linear maps `names` of a transformers model in float32, in place.

    `grid` returns the grid for a number of inputs; `dtype` is the checkpoint's, of norms and
    biases. Raises CheckpointError if the model does not compute the same after scaling.
    """
    decoder = model.get_decoder()
    checked = sequences[:1, :_CHECKED_TOKENS]
    with torch.no_grad():
        expected = decoder(input_ids=checked, use_cache=False).last_hidden_state
        work = _Layers(model, names, grid, dtype, on_layer)
        decoder(input_ids=sequences, use_cache=False)
        work.remove()
        found = decoder(input_ids=checked, use_cache=False).last_hidden_state
    if not (found - expected).norm() <= _TOLERANCE * expected.norm():
        raise CheckpointError(
            "awq: the layers of this model do not compute the same after their inputs are scaled; "
            "use --method gptq"
        )
    return work.result


class _Layers:
    """Scales and rounds each layer of a model as soon as the model has computed it."""

    def __init__(
        self,
        model: Any,
        names: list[str],
        grid: Callable[[int], Grid],
        dtype: torch.dtype,
        on_layer: Callable[[int, int], None],
    ) -> None:
        """Watches the model's computation until `remove`."""
        self.result = AwqResult()
        self._model = model
        self._grid = grid
        self._dtype = dtype
        self._names = set(names)
        self._inputs: list[_Shared] = []  # of the current layer
        self._normed: list[tuple[str, torch.Tensor]] = []  # outputs of norms in the current layer
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            if name in self._names:
                self._hooks.append(module.register_forward_pre_hook(self._see_input(name)))
            elif _is_norm(module):
                self._hooks.append(module.register_forward_hook(self._see_norm(name)))
        layers = model.get_decoder().layers
        for index, layer in enumerate(layers):
            self._hooks.append(
                layer.register_forward_hook(
                    lambda *_, done=index + 1: self._finish(lambda: on_layer(done, len(layers)))
                )
            )

    def remove(self) -> None:
        """Stops watching."""
        for hook in self._hooks:
            hook.remove()

    def _see_input(self, name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def see(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0]
            for shared in self._inputs:
                if shared.x is x:
                    shared.names.append(name)
                    return
            norms = [norm for norm, output in self._normed if output is x]
            self._inputs.append(_Shared(x, [name], norms[0] if norms else None))

        return see

    def _see_norm(self, name: str) -> Callable[[nn.Module, object, torch.Tensor], None]:
        def see(_: nn.Module, args: object, output: torch.Tensor) -> None:
            self._normed.append((name, output))

        return see

    def _finish(self, report: Callable[[], None]) -> None:
        importance: dict[str, torch.Tensor] = {}
        for shared in self._inputs:
            hessian = shared.hessian()
            scales = self._scale(shared, hessian)
            for name in shared.names:
                importance[name] = hessian.diagonal() / scales.square()
        for name, weights in importance.items():
            weight = self._model.get_submodule(name).weight
            grid = self._grid(weight.shape[1])
            self.result.rounded[name] = round_to_best_range(weight, weights, grid)
        self._inputs.clear()
        self._normed.clear()
        report()

    def _scale(self, shared: _Shared, hessian: torch.Tensor) -> torch.Tensor:
        """Scales the weights of maps with equal inputs, and by the inverse the layer before.

        Returns the scales [inputs], 1 if the layer before cannot be scaled.
        """
        linears = [self._model.get_submodule(name) for name in shared.names]
        before = self._values_before(shared.names)
        if shared.norm is None and before is None:
            return torch.ones(len(hessian))
        weight = torch.cat([linear.weight for linear in linears])  # [outputs, inputs]
        scales = best_scales(weight, hessian, shared.magnitudes(), self._grid(len(hessian)))
        if shared.norm is not None:
            scales = self._shrink_norm(shared.norm, scales)
        elif before is not None:
            self._shrink_outputs(before, scales)
        for linear in linears:
            linear.weight.mul_(scales)
        return scales

    def _values_before(self, names: list[str]) -> str | None:
        """Returns the map whose outputs are factors of the only map's inputs, or None.

        A gated feed-forward network (arXiv 2002.05202) multiplies the outputs of `up_proj` by
        gates.
        """
        prefix, _, last = names[0].rpartition(".")
        parts = {f"{prefix}.gate_proj", f"{prefix}.up_proj"}
        if len(names) > 1 or last != "down_proj" or not parts <= self._names:
            return None
        return f"{prefix}.up_proj"

    def _shrink_norm(self, name: str, scales: torch.Tensor) -> torch.Tensor:
        """Divides a norm's weight [inputs]; returns the scales that its stored form really has."""
        norm = self._model.get_submodule(name)
        offset = _offset(norm)
        factor = norm.weight + offset
        stored = (factor / scales - offset).to(self._dtype)
        divided = stored.float() + offset
        can_divide = (factor != 0) & (divided != 0)
        scales = torch.where(can_divide, factor / divided, 1.0)
        self._set(f"{name}.weight", norm.weight, torch.where(can_divide, divided, factor) - offset)
        if getattr(norm, "bias", None) is not None:
            self._set(f"{name}.bias", norm.bias, norm.bias / scales)
        return scales

    def _shrink_outputs(self, name: str, scales: torch.Tensor) -> None:
        linear = self._model.get_submodule(name)
        linear.weight.div_(scales[:, None])
        if linear.bias is not None:
            self._set(f"{name}.bias", linear.bias, linear.bias / scales)

    def _set(self, name: str, parameter: torch.Tensor, value: torch.Tensor) -> None:
        self.result.changed[name] = value.to(self._dtype)
        parameter.copy_(self.result.changed[name])


def best_scales(
    weight: torch.Tensor, hessian: torch.Tensor, magnitudes: torch.Tensor, grid: Grid
) -> torch.Tensor:
    """Returns the scales [inputs] of a weight [outputs, inputs] that lose least when it is rounded.

    They are the mean `magnitudes` [inputs] of the inputs to a power from 0 to 1, without their
    middle. `hessian` [inputs, inputs] is the sum of x x^T over the inputs x.
    """
    best = torch.ones_like(magnitudes)
    least = torch.inf
    for step in range(_STEPS + 1):
        scales = magnitudes.clamp(min=_LEAST_MEAN) ** (step / _STEPS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        errors = round_to_nearest(weight * scales, grid).restored() / scales - weight
        loss = float((errors @ hessian * errors).sum())
        if loss < least:
            best = scales
            least = loss
    return best


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 1 and not list(module.children())


def _offset(norm: nn.Module) -> float:
    """Returns the number that a norm adds to its weight: 1 in Gemma, otherwise 0."""
    weight: Any = norm.weight
    kept = weight.clone()
    weight.zero_()
    bias: Any = getattr(norm, "bias", None)
    outputs = norm(torch.eye(2, len(weight)))
    weight.copy_(kept)
    return float(bool((outputs != (0.0 if bias is None else bias)).any()))
