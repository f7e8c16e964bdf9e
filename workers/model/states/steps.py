"""Describes where the sequences of a step read and write their states.

A state is never written in place. A step reads a slot and writes other slots. So a kernel may
compute an item twice, and a step that fails leaves the state that it read.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStep:
    """Describes the rows of one sequence in a step, and the slots of its states."""

    first_row: int
    num_tokens: int
    source: int | None  # the slot of the state before the step; None: the state is 0
    # (number of tokens, slot): after that many tokens of the step, the slot gets the state.
    targets: tuple[tuple[int, int], ...]  # by ascending number of tokens


class StateSteps:
    """Holds the states of a step's sequences, as a table at a fixed address for kernels."""

    def __init__(self, sequences: Sequence[StateStep] = ()) -> None:
        """Raises ValueError as `fill`."""
        # The address of the table; see kernels/c/scan/scan.h.
        self.address = torch.zeros(1, dtype=torch.int64)
        self.fill(sequences)

    def fill(self, sequences: Sequence[StateStep]) -> None:
        """Loads the sequences of the next step.

        Raises ValueError if a slot is written twice or is read and written, or if a state is wanted
        after a number of tokens that the step does not reach.
        """
        _check(sequences)
        self.sequences = tuple(sequences)
        targets: list[int] = []
        table = [len(sequences)]
        for each in sequences:
            source = -1 if each.source is None else each.source
            first_target = len(targets) // 2
            table += (each.first_row, each.num_tokens, source, first_target, len(each.targets))
            targets += (number for target in each.targets for number in target)
        self._table = array("q", table + targets)
        self.address[0] = self._table.buffer_info()[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepStates:
    """Holds the states of a step's sequences and the memory of all slots."""

    steps: StateSteps
    # Returns the slots of a part of a layer's state, [num_slots, planes, KV heads, row].
    memory: Callable[[int, str], torch.Tensor]


def _check(sequences: Sequence[StateStep]) -> None:
    read = {each.source for each in sequences}
    written = [slot for each in sequences for _, slot in each.targets]
    if len(set(written)) < len(written) or not read.isdisjoint(written):
        raise ValueError(f"slots {sorted(written)} are written twice, or read in the same step")
    for each in sequences:
        counts = [count for count, _ in each.targets]
        if counts != sorted(counts) or not all(0 < count <= each.num_tokens for count in counts):
            raise ValueError(f"states after {counts} of {each.num_tokens} tokens")
