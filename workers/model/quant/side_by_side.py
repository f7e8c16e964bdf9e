"""Computes maps of one input that a checkpoint stores in different ways, such as a plain v_proj
beside a
quantised q_proj: each by a method of its own.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch

from .base import LinearMethod, LinearMethodOf, LinearPartition


class SideBySideLinearMethod(LinearMethod):
    """Multiplies by several weights of the same input, and puts their outputs side by side.

    A step with such a layer is not recorded as a program: joining outputs has no kernel."""

    def __init__(self, methods: dict[str, LinearMethod]) -> None:
        """`methods` are those of the maps by their names; maps in a row may share one."""
        self._by_name = methods
        self.methods = list({id(each): each for each in methods.values()}.values())

    def create_weights(self, partition: LinearPartition, dtype: torch.dtype) -> None:
        """See `LinearMethod.create_weights`."""
        for _, group in groupby(partition.outputs, lambda output: id(self._by_name[output[0]])):
            outputs = tuple(group)
            part = replace(partition, outputs=outputs, gated=False)
            self._by_name[outputs[0][0]].create_weights(part, dtype)

    def apply(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See `LinearMethod.apply`."""
        parts = torch.cat([method.apply(x) for method in self.methods], dim=-1)
        return parts if residual is None else residual + parts


def method_of_maps(method_of: LinearMethodOf, names: Sequence[str]) -> LinearMethod:
    """Returns the method of maps that take the same input: one for all, unless the checkpoint
    stores some in another way than others. Raises CheckpointError.
    """
    methods: dict[str, LinearMethod] = {}
    last: LinearMethod | None = None
    for name in names:
        made = method_of(name)
        if last is None or (type(made), vars(made)) != (type(last), vars(last)):
            last = made
        methods[name] = last
    return (
        last
        if last is not None and len({*map(id, methods.values())}) == 1
        else SideBySideLinearMethod(methods)
    )
