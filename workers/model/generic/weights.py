"""Finds the checkpoint tensors of each weight of a transformers model by transformers' conversions.

Checkpoints, also on the hub, have the names that `save_pretrained` writes. When transformers loads
them it renames weights, stacks experts and splits fused projections; it does the reverse when it
saves.
"""

from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)


def set_tensor(model: PreTrainedModel, name: str, data: torch.Tensor) -> None:
    """Replaces a parameter or a buffer; the data may have another dtype, shape or device."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if leaf in owner._buffers:
        owner._buffers[leaf] = data
    else:
        owner._parameters[leaf] = nn.Parameter(data, requires_grad=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """Describes tensors of a checkpoint and the model's weights that they are converted to."""

    # Name, shape and, for the converter, the pattern that the name matches.
    sources: tuple[tuple[str, tuple[int, ...], str], ...]
    target: str  # the first, or only, weight
    converter: WeightConverter | None  # None: the source is the target

    def convert(
        self, model: PreTrainedModel, tensors: list[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns the weights by name. `tensors` are in the order of `sources`."""
        if self.converter is None:
            return {self.target: tensors[0]}
        converter = deepcopy(self.converter)
        for (name, _, pattern), tensor in zip(self.sources, tensors, strict=True):
            # The method also accepts a tensor itself.
            converter.add_tensor(self.target, name, pattern, cast(Future[Any], tensor))
        converted = converter.convert(self.target, model=model, config=model.config)
        return {
            name: each[0] if isinstance(each, list) else each for name, each in converted.items()
        }

    @property
    def stacks(self) -> int:
        """Returns the number of tensors of each expert that are stacked side by side.

        Returns 0 for any other conversion: then a rank's part of the sources is not its part of the
        target.
        """
        if self.converter is None or len(self.converter.target_patterns) > 1:
            return 0
        operations = [type(operation) for operation in self.converter.operations]
        num_patterns = len(self.converter.source_patterns)
        stacked = operations == [MergeModulelist] and num_patterns == 1
        side_by_side = operations == [MergeModulelist, Concatenate] and num_patterns == 2
        return num_patterns if stacked or side_by_side else 0


def find_weight_groups(model: PreTrainedModel) -> list[WeightGroup]:
    """Returns the groups of all weights of a model on `meta` that are not tied to other weights.

    Raises LookupError if transformers' conversions do not lead back to a weight.
    """
    every: dict[str, torch.Tensor] = dict(model.state_dict())
    wanted = {
        name: tensor for name, tensor in every.items() if name not in model.all_tied_weights_keys
    }
    transforms = get_model_conversion_mapping(model, add_legacy=False)
    transforms = [each for each in transforms if not isinstance(each, PrefixChange)]
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    stored = revert_weight_conversion(model, dict(wanted))
    sources: dict[str, list[tuple[str, tuple[int, ...], str]]] = {}
    found: dict[str, WeightConverter | None] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, every
        )
        if target not in every and name in every:
            target = name
            pattern = None
        sources.setdefault(target, []).append((name, tuple(stored[name].shape), pattern or ""))
        found[target] = by_pattern[pattern] if pattern else None
    groups = [
        WeightGroup(sources=tuple(parts), target=target, converter=found[target])
        for target, parts in sources.items()
    ]
    made = {name for group in groups for name in _targets(group, model)}
    if missing := wanted.keys() - made:
        raise LookupError(min(missing))
    return groups


def _targets(group: WeightGroup, model: PreTrainedModel) -> set[str]:
    if group.converter is None:
        return {group.target}
    tensors = [torch.empty(shape, device="meta") for _, shape, _ in group.sources]
    return set(group.convert(model, tensors))
