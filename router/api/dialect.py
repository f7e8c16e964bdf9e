"""Defines what an operator chooses about the bodies and answers of the HTTP APIs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ReasoningField = Literal["reasoning_content", "reasoning", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Holds the choices of one service."""

    # Of messages and deltas in answers to chats. Some clients show the text twice if both are set.
    reasoning_field: ReasoningField = "reasoning_content"

    # Unknown fields of a body are left out, and named in a header; otherwise they are refused.
    ignores_unknown: bool = False

    @property
    def reasoning_names(self) -> Sequence[str]:
        """Returns the names of all fields that have the reasoning."""
        if self.reasoning_field == "both":
            return ("reasoning_content", "reasoning")
        return (self.reasoning_field,)
