"""Computes maps of one input that a checkpoint stores in different ways, each by its own method.

For example, a checkpoint has a plain v_proj beside a quantized q_proj.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import groupby

import torch

from .base import LinearMethod, LinearMethodOf, LinearPartition


class SideBySideLinearMethod(LinearMethod):
    """Multiplies by several weights of the same input and concatenates their outputs.

    A step with such a layer is not recorded as a program: joining outputs has no kernel.
    """

    def __init__(self, methods: dict[str, LinearMethod]) -> None:
        """`methods` has the method of each map by its name; adjacent maps may share one."""
        self._by_name = methods
        self.methods: list[LinearMethod] = []

    def create_weights(self, partition: LinearPartition, dtype: torch.dtype) -> None:
        for _, group in groupby(partition.outputs, lambda output: id(self._by_name[output[0]])):
            outputs = tuple(group)
            part = replace(partition, outputs=outputs, gated=False)
            # A copy: other maps may lie between parts of one map, such as queries and their gates.
            method = copy(self._by_name[outputs[0][0]])
            method.create_weights(part, dtype)
            self.methods.append(method)

    def apply(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        parts = torch.cat([method.apply(x) for method in self.methods], dim=-1)
        return parts if residual is None else residual + parts


def method_of_maps(method_of: LinearMethodOf, names: Sequence[str]) -> LinearMethod:
    """Returns one method for maps of the same input, or several if their formats differ.

    Raises CheckpointError.
    """
    methods: dict[str, LinearMethod] = {}
    last: LinearMethod | None = None
    for name in names:
        made = method_of(name)
        if last is None or (type(made), vars(made)) != (type(last), vars(last)):
            last = made
        methods[name] = last
    if last is not None and len({*map(id, methods.values())}) == 1:
        return last
    return SideBySideLinearMethod(methods)
