"""Splits a transformers model over ranks by its plan `base_model_tp_plan`, with our process group.

The plan has a style for each module or parameter. As in Megatron-LM (arXiv 1909.08053), a `colwise`
module keeps the rank's outputs and a `rowwise` module the rank's inputs; the outputs of the latter
are summed over the ranks.
"""

import re
import sys
from collections.abc import Mapping
from inspect import getsource
from typing import Final, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ..parallel import TensorParallel
from ..quant.base import LinearMethod, LinearPartition
from .config import text_config
from .linear import PackedLinear, plain_method
from .states.mixers import forward_of_mixer

Slices = tuple[slice, ...]

_GATHER: Final = ("colwise_gather_output", "colwise_rep")
_SPLIT_INPUT: Final = ("rowwise_split_input", "rowwise_rep")
_COLUMNS: Final = ("colwise", *_GATHER)
_ROWS: Final = ("rowwise", *_SPLIT_INPUT)
_SUMMED: Final = ("moe_tp_experts", "all_reduce")
_WHOLE: Final = (
    "replicated_with_grad_allreduce",
    "mla_kv_a_proj",
    "replicate",
    "local_params",
    "embedding_colwise",
    "moe_identity_expert",
    *_SUMMED,
)
_PACKED: Final = ("packed_colwise", "packed_rowwise")
STYLES: Final = {*_COLUMNS, *_ROWS, *_PACKED, *_WHOLE, "embedding_rowwise"}


class TpPlan:
    """Describes the part of each weight that a rank keeps, and what the ranks exchange."""

    def __init__(self, model: PreTrainedModel, tp: TensorParallel) -> None:
        """Raises ValueError, with one line for the user, if there is no plan that we support."""
        self._tp = tp
        plan = model.tp_plan if tp.size > 1 else {}
        problem = (
            f"tp: {tp.size}: transformers has no plan to split {type(model).__name__} that is "
            "supported"
        )
        base_plan = text_config(model.config).base_model_tp_plan
        if tp.size > 1 and (not base_plan or set(plan.values()) - STYLES):
            raise ValueError(problem)
        names = [each for each, _ in (*model.named_modules(), *model.named_parameters())]
        self._styles = {
            each: plan[pattern] for each in names if (pattern := _pattern(each)) in plan
        }
        self._split_tied_head(model)
        self._keep_sparse_whole(model)
        self._split_norms_of_heads(model)
        self._split_results_of_mixers(model)
        for each, module in model.named_modules():
            is_split = self._styles.get(each, "replicate") in (*_COLUMNS, *_ROWS, *_PACKED)
            if is_split and type(module) is not nn.Linear:
                raise ValueError(problem)

    def _split_tied_head(self, model: PreTrainedModel) -> None:
        """Splits a head that shares the weight of a split embedding.

        The plans of some multimodal models lack it, such as Gemma 3's in transformers 5.17.
        """
        names = {module: name for name, module in model.named_modules()}
        embedding = model.get_input_embeddings()
        head = cast(nn.Linear | None, model.get_output_embeddings())  # type: ignore[no-untyped-call]
        if head is None or self._styles.get(names[embedding]) != "embedding_rowwise":
            return
        if head.weight is embedding.weight:
            self._styles.setdefault(names[head], _GATHER[0])

    def _keep_sparse_whole(self, model: PreTrainedModel) -> None:
        """Computes the sparse MLPs of Gemma 3n on every rank.

        They set the activations below a quantile of all of a token's activations to zero, but the
        plan of transformers splits them.
        """
        for name, module in model.named_modules():
            if float(getattr(module, "activation_sparsity", 0.0)) > 0.0:
                for each in [each for each in self._styles if each.startswith(f"{name}.")]:
                    del self._styles[each]

    def _split_norms_of_heads(self, model: PreTrainedModel) -> None:
        """Splits the norms of queries and keys that have a row for each head, [heads, head_dim].

        The plan of Cohere splits the heads, but lacks these norms.
        """
        for name, parameter in model.named_parameters():
            match = re.fullmatch(r"(.*\b[qk]_)norm\.weight", name)
            if match and parameter.ndim == 2 and self._styles.get(f"{match[1]}proj") in _COLUMNS:
                self._styles[name] = self._styles[f"{match[1]}proj"]

    def _split_results_of_mixers(self, model: PreTrainedModel) -> None:
        """Makes each rank map its part of a mixer's results, which it computes as a whole.

        The plan of GLM-5.3 has one name for the last maps of mixers and of attention, and splits
        the heads of attention alone.
        """
        mixers = [f"{name}." for name, each in model.named_modules() if forward_of_mixer(each)]
        for name, style in self._styles.items():
            if style == _ROWS[0] and name.startswith(tuple(mixers)):
                self._styles[name] = _SPLIT_INPUT[0]

    def slices(self, name: str, shape: tuple[int, ...], stacks: int) -> list[Slices] | None:
        """Returns this rank's parts of a source of the weight `name`.

        They are concatenated along the first dimension. None: `cut` must cut them out of the whole
        weight. `shape` is the source's; `stacks` as in `WeightGroup.stacks`.
        """
        # A source of a stack lacks the dimension of the experts.
        num_dims = len(shape) + (1 if stacks else 0)
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

    def partition(self, name: str, plain: nn.Linear, stored_name: str) -> LinearPartition | None:
        """Returns this rank's part of a linear map, whose name in the checkpoint is `stored_name`.

        Returns None for a split that a linear method cannot have.
        """
        parts = self.slices(f"{name}.weight", tuple(plain.weight.shape), 0)
        if parts is None:
            return None
        kept = [(*part, slice(None), slice(None))[:2] for part in parts]
        adds_bias = self._styles.get(name) not in _ROWS or self._tp.rank == 0
        return LinearPartition(
            outputs=tuple((stored_name, plain.out_features, rows) for rows, _ in kept),
            num_inputs=plain.in_features,
            inputs=kept[0][1],
            has_bias=plain.bias is not None and adds_bias,
        )

    def install(self, model: PreTrainedModel, methods: Mapping[str, LinearMethod]) -> None:
        """Packs the linear maps of a loaded model, and makes its modules exchange results.

        Some modules have a linear method already, by their names.
        """
        alone = linears_alone(model)
        for name, module in list(model.named_modules()):
            style = self._styles.get(name, "")
            if type(module) is nn.Linear:
                if style or name in alone:
                    adds_bias = style not in _ROWS or self._tp.rank == 0
                    linear = PackedLinear(
                        module,
                        methods.get(name) or plain_method(module, has_bias=adds_bias),
                        self._tp,
                        split_input=style in _SPLIT_INPUT,
                        sums=style in _ROWS,
                        gathers=style in _GATHER,
                    )
                    # mypy refuses to assign to a method.
                    setattr(module, "forward", linear)  # noqa: B010
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
        """Returns True if the ranks keep parts of a weight [outputs, inputs]."""
        return self._split(name, 2)[0] is not None

    def _split(self, name: str, num_dims: int) -> tuple[int | None, int]:
        """Returns the dimension in which a weight is split, and the number of maps in it.

        The dimension is None for a weight that is not split.
        """
        module, _, kind = name.rpartition(".")
        style = self._styles.get(name) or self._styles.get(module, "")
        num_maps = 2 if style in _PACKED else 1
        if style in _COLUMNS or style == "packed_colwise":
            return max(num_dims - 2, 0), num_maps
        if style in _ROWS or style == "packed_rowwise":
            is_whole = num_dims == 1 and kind == "bias"
            return (None if is_whole else num_dims - 1), num_maps
        return (0 if style == "embedding_rowwise" else None), 1

    def _parts(self, size: int, num_parts: int) -> list[slice]:
        """Returns the rank's part of each of several equal maps in a dimension."""
        one = size // num_parts
        mine = self._tp.part(one)
        return [
            slice(index * one + mine.start, index * one + mine.stop) for index in range(num_parts)
        ]

    def _split_embedding(self, module: nn.Module) -> None:
        """Makes each rank look up the tokens of its part of the vocabulary."""
        look_up = module.forward
        mine = self._tp.part(cast(nn.Embedding, module).num_embeddings)

        def forward(token_ids: torch.Tensor) -> torch.Tensor:
            is_local = (token_ids >= mine.start) & (token_ids < mine.stop)
            found = look_up((token_ids - mine.start).where(is_local, 0))
            return self._tp.all_reduce(found * is_local[..., None])

        setattr(module, "forward", forward)  # noqa: B010  # mypy refuses to assign to a method


def linears_alone(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Returns the linear maps by name whose weight no other code multiplies by."""
    source = getsource(sys.modules[type(model).__module__])
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and not re.search(rf"self\.[\w.]*\b{name.rpartition('.')[2]}\.weight\b", source)
    }


def _at(dim: int, part: slice) -> Slices:
    return (*[slice(None)] * dim, part)


def _pattern(name: str) -> str:
    """Returns a module's or parameter's name with `*` for layer numbers, as plans have it.

    Releases of transformers differ in the module that has this function.
    """
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
