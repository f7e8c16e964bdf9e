"""Asks a service four questions at once, and shows the answers and their timelines."""

import asyncio
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ....router.client.client import AsyncClient
from ....router.client.types import Completion
from ....router.telemetry.requests import PARTS
from ...eval.gather import map_concurrently
from ..answers import timeline_table

PROMPTS: Final = (
    # In the answer the likeliest token is always far ahead: rounding does not change it.
    "What is the name of the capital of France?",
    "Name three fruits and say what colour each of them has.",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about two friends who share their work.",
)
_MAX_TOKENS: Final = 80
_TOLERANCE: Final = 0.05  # relative difference of a timeline's total and the sum of its parts


class Answers:
    """Holds the prompts and the answers so far, in the form that rich shows."""

    def __init__(self) -> None:
        self.texts = [""] * len(PROMPTS)

    def __rich__(self) -> Text:
        shown = Text()
        for number, (prompt, text) in enumerate(zip(PROMPTS, self.texts, strict=True), 1):
            shown.append(f"[{number}] {prompt}\n", "bold").append(f"{text}\n\n")
        return shown


def ask_questions(address: str, console: Console) -> list[str]:
    """Prints the answers and their timelines; returns a line for each fault of a timeline."""
    answers = Answers()
    # Without a terminal the answers are printed once, at the end.
    with Live(answers, console=console, refresh_per_second=12):
        completions = asyncio.run(_ask_all(address, answers))
    rows = [(f"[{i + 1}]", completion.timeline) for i, completion in enumerate(completions)]
    console.print(timeline_table(rows))
    return _wrong_timelines(completions)


async def _ask_all(address: str, answers: Answers) -> list[Completion]:
    async with AsyncClient(address) as client:

        async def ask(request: int) -> Completion:
            messages = [{"role": "user", "content": PROMPTS[request]}]
            async with client.stream_chat(
                messages, temperature=0.0, max_tokens=_MAX_TOKENS
            ) as stream:
                async for delta in stream:
                    answers.texts[request] += delta.text
                return await stream.completion()

        return await map_concurrently(ask, range(len(PROMPTS)), len(PROMPTS))


def _wrong_timelines(completions: Sequence[Completion]) -> list[str]:
    """Returns one line for each timeline whose parts do not add up to its total."""
    problems = []
    for i, completion in enumerate(completions):
        parts = sum(getattr(completion.timeline, f"{part}_seconds") for part in PARTS)
        total = completion.timeline.end_to_end_seconds
        if total <= 0 or abs(parts - total) > _TOLERANCE * total:
            problems.append(
                f"[{i + 1}] the parts of the timeline add up to {parts:.4f} s; the total is "
                f"{total:.4f} s"
            )
    return problems
