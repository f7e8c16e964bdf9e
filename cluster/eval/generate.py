"""Generates completions for `tandem eval generate`: prompts with references, from a JSONL file."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from ...proto.errors import InvalidArgument
from ...router.client.client import AsyncClient
from ...router.client.types import Completion, Options
from ..text_files import write_text
from .gather import map_concurrently


class Case(BaseModel):
    """Holds a line of the file: `prompt` or `messages`, `reference` or `references`.

    More keys are ignored.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    prompt: str = ""
    messages: list[dict[str, Any]] = []
    reference: str | None = None
    references: list[str] = []

    @model_validator(mode="after")
    def _check_exclusive(self) -> "Case":
        if bool(self.prompt) == bool(self.messages):
            raise ValueError("one of prompt and messages must be given")
        if (self.reference is None) == (not self.references):
            raise ValueError("one of reference and references must be given")
        return self

    @property
    def all_references(self) -> list[str]:
        return self.references if self.reference is None else [self.reference]


async def complete_cases(
    client: AsyncClient,
    cases: Sequence[Case],
    options: Options,
    concurrency: int,
    on_completion: Callable[[], None],
) -> list[Completion]:
    """Returns the completions in the order of the cases; calls `on_completion` after each.

    Raises a TandemError; InvalidArgument names the case, from 1.
    """

    async def complete(numbered: tuple[int, Case]) -> Completion:
        number, case = numbered
        call = (
            client.chat(case.messages, **options)
            if case.messages
            else client.generate(case.prompt, **options)
        )
        try:
            completion = await call
        except InvalidArgument as error:
            raise InvalidArgument(error.message, f"case {number}") from None
        on_completion()
        return completion

    return await map_concurrently(complete, enumerate(cases, 1), concurrency)


def write_completions(path: Path, cases: Sequence[Case], completions: Sequence[Completion]) -> None:
    """Writes one line of JSON for each case. Raises InvalidArgument if the file is not writable."""
    lines = []
    for case, completion in zip(cases, completions, strict=True):
        given = case.model_dump(exclude_unset=True)
        given |= {"text": completion.text, "finish_reason": completion.finish_reason}
        lines.append(json.dumps(given, ensure_ascii=False) + "\n")
    write_text(path, "".join(lines), "--output")
