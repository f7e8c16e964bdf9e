"""Splits a transformers model over ranks by its own plan, `base_model_tp_plan`, with our process
group.

The plan names a style for modules and parameters. Megatron-LM's pairs (arXiv 1909.08053): what is
`colwise` keeps the rank's outputs, what is `rowwise` keeps its inputs, and the outputs of the
latter are summed over the ranks.
"""

import re
import sys
from inspect import getsource
from typing import Final, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from ..parallel import TensorParallel
from .linear import PackedLinear

Slices = tuple[slice, ...]

_GATHER: Final = ("colwise_gather_output", "colwise_rep")
_SPLIT_INPUT: Final = ("rowwise_split_input", "rowwise_rep")
_COLUMNS: Final = ("colwise", *_GATHER)
_ROWS: Final = ("rowwise", *_SPLIT_INPUT)
_SUMMED: Final = ("moe_tp_experts", "all_reduce")
_WHOLE: Final = (
    *(
        "replicated_with_grad_allreduce",
        "mla_kv_a_proj",
        "replicate",
        "local_params",
        "embedding_colwise",
    ),
    *("moe_identity_expert", *_SUMMED),
)
_PACKED: Final = ("packed_colwise", "packed_rowwise")
STYLES: Final = {*_COLUMNS, *_ROWS, *_PACKED, *_WHOLE, "embedding_rowwise"}


class TpPlan:
    """Says which part of each weight a rank keeps, and what is exchanged where."""

    def __init__(self, model: PreTrainedModel, tp: TensorParallel) -> None:
        """Raises ValueError, with one line for the user, if there is no plan, or one that we cannot
        follow.
        """
        self._tp = tp
        plan = model.tp_plan if tp.size > 1 else {}
        problem = f"tp: {tp.size}: transformers has no plan to split {type(model).__name__} that is supported"
        if tp.size > 1 and (not model.config.base_model_tp_plan or set(plan.values()) - STYLES):
            raise ValueError(problem)
        names = [each for each, _ in (*model.named_modules(), *model.named_parameters())]
        self._styles = {
            each: plan[pattern]
            for each in names
            if (pattern := replace_layer_number_by_wildcard(each)) in plan
        }
        for each, module in model.named_modules():
            if (
                self._styles.get(each, "replicate") in (*_COLUMNS, *_ROWS, *_PACKED)
                and type(module) is not nn.Linear
            ):
                raise ValueError(problem)

    def slices(self, name: str, shape: tuple[int, ...], stacks: int) -> list[Slices] | None:
        """Returns the parts of a source of the weight `name` that this rank keeps, side by side
        along the first dimension; None if they have to be cut out of the whole weight by `cut`.

        `shape` is the source's; `stacks` as in `WeightGroup.stacks`.
        """
        num_dims = len(shape) + bool(
            stacks
        )  # a source of a stack lacks the dimension of the experts
        dim, num_parts = self._split(name, num_dims)
        if dim is None:
            return [()]
        if stacks:
            fits = num_parts == stacks or (num_parts == 1 and dim == num_dims - 1)
            return [_at(dim - 1, self._tp.part(shape[dim - 1]))] if fits else None
        if num_parts == 1 or dim == 0:
            return [_at(dim, part) for part in self._parts(shape[dim], num_parts)]
        return None

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a whole weight."""
        dim, num_parts = self._split(name, tensor.ndim)
        if dim is None:
            return tensor
        parts = [tensor[_at(dim, part)] for part in self._parts(tensor.shape[dim], num_parts)]
        return torch.cat(parts, dim=dim).contiguous()

    def install(self, model: PreTrainedModel) -> None:
        """Makes the modules of a loaded model exchange what the plan says, and packs its linear
        maps.
        """
        source = getsource(sys.modules[type(model).__module__])
        for name, module in list(model.named_modules()):
            style = self._styles.get(name, "")
            if type(module) is nn.Linear:
                # What other code multiplies by itself stays as it is.
                if style or not re.search(
                    rf"self\.[\w.]*\b{name.rpartition('.')[2]}\.weight\b", source
                ):
                    linear = PackedLinear(
                        module,
                        self._tp,
                        split_input=style in _SPLIT_INPUT,
                        sums=style in _ROWS,
                        gathers=style in _GATHER,
                    )
                    setattr(module, "forward", linear)  # noqa: B010  # a method, which mypy lets nobody assign to
            elif style == "embedding_rowwise":
                self._split_embedding(module)
            elif style in _SUMMED:
                module.register_forward_hook(
                    lambda module, args, output: self._tp.all_reduce(output)
                )
            elif style == "moe_identity_expert":
                module.register_forward_pre_hook(
                    lambda module, args: (args[0] / self._tp.size, *args[1:])
                )

    def is_split(self, name: str) -> bool:
        """Returns whether the ranks keep parts of a weight [outputs, inputs]."""
        return self._split(name, 2)[0] is not None

    def _split(self, name: str, num_dims: int) -> tuple[int | None, int]:
        """Returns the dimension in which a weight is split, and of how many maps side by side it is
        in that.
        """
        module, _, kind = name.rpartition(".")
        style = self._styles.get(name) or self._styles.get(module, "")
        if style in _COLUMNS or style == "packed_colwise":
            return max(num_dims - 2, 0), 2 if style == "packed_colwise" else 1
        if style in _ROWS or style == "packed_rowwise":
            is_whole = num_dims == 1 and kind == "bias"
            return (None if is_whole else num_dims - 1), 2 if style == "packed_rowwise" else 1
        return (0 if style == "embedding_rowwise" else None), 1

    def _parts(self, size: int, num_parts: int) -> list[slice]:
        """Returns the rank's part of each of several maps that fill a dimension."""
        one = size // num_parts
        mine = self._tp.part(one)
        return [
            slice(index * one + mine.start, index * one + mine.stop) for index in range(num_parts)
        ]

    def _split_embedding(self, module: nn.Module) -> None:
        """Each rank looks up what lies in its part of the vocabulary."""
        look_up, mine = module.forward, self._tp.part(cast(nn.Embedding, module).num_embeddings)

        def forward(token_ids: torch.Tensor) -> torch.Tensor:
            is_local = (token_ids >= mine.start) & (token_ids < mine.stop)
            return self._tp.all_reduce(
                look_up((token_ids - mine.start).where(is_local, 0)) * is_local[..., None]
            )

        setattr(module, "forward", forward)  # noqa: B010  # a method, which mypy lets nobody assign to


def _at(dim: int, part: slice) -> Slices:
    return (*[slice(None)] * dim, part)
