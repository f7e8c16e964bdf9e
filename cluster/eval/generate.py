"""Generates completions for the prompts of a JSONL file, which holds a reference for each: `tandem eval generate`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ...proto.errors import InvalidArgument
from ...router.client.client import AsyncClient
from ...router.client.types import Options
from .gather import map_concurrently


class Case(BaseModel):
    """Holds a line of the file: `prompt` or `messages`, `reference` or `references`. More keys are ignored."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedCase:
    """Holds a case and the completion that is to be scored."""

    case: Case
    text: str
    finish_reason: str

    def as_json(self) -> dict[str, Any]:
        given = self.case.model_dump(exclude_unset=True)
        return given | {"text": self.text, "finish_reason": self.finish_reason}


def parse_cases(text: str, path: Path) -> list[Case]:
    """Returns the cases of a JSONL file's text, without its empty lines. Raises InvalidArgument, which names the line
    of `path`."""
    cases = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            cases.append(Case.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise InvalidArgument(f"{place + ': ' if place else ''}{first['msg']}", f"{path}:{number}") from None
    if not cases:
        raise InvalidArgument("has no cases", str(path))
    return cases


async def answer_cases(
    client: AsyncClient,
    cases: Sequence[Case],
    options: Options,
    concurrency: int,
    on_answer: Callable[[], None] = lambda: None,
) -> list[CompletedCase]:
    """Returns the completions in the order of the cases. `on_answer` is called after each. Raises a TandemError."""

    async def answer(case: Case) -> CompletedCase:
        asked = client.chat(case.messages, **options) if case.messages else client.generate(case.prompt, **options)
        completion = await asked
        on_answer()
        return CompletedCase(case=case, text=completion.text, finish_reason=completion.finish_reason)

    return await map_concurrently(answer, cases, concurrency)


def write_answers(path: Path, answers: Sequence[CompletedCase]) -> None:
    """Writes one line of JSON for each. Raises InvalidArgument if the file cannot be written."""
    lines = [json.dumps(each.as_json(), ensure_ascii=False) + "\n" for each in answers]
    try:
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", "output") from None
