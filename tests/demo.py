"""`make demo`: serves the demo model with two workers and sends four prompts at once.

Prints the answers and their timelines.
"""

import asyncio
import sys
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tandem.cluster.cli.answers import timeline_table
from tandem.cluster.cli.serve import stopped_by_signals
from tandem.cluster.config import load_config
from tandem.cluster.eval.gather import map_concurrently
from tandem.cluster.serve.environment import prepare_ray_environment
from tandem.cluster.store.store import resolve_model
from tandem.cluster.tables import table_console
from tandem.proto.errors import TandemError
from tandem.router.client.client import AsyncClient
from tandem.router.client.types import Completion
from tandem.router.telemetry.requests import PARTS
from tandem.workers.model.config import CheckpointError
from tandem.workers.model.loader import check_checkpoint

MODEL: Final = "smollm2-135m-instruct"
PROMPTS: Final = (
    # In the answer the likeliest token is always far ahead: rounding does not change it.
    "What is the name of the capital of France?",
    "Name three fruits and say what colour each of them has.",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about two friends who share their work.",
)
MAX_TOKENS: Final = 80
TOLERANCE: Final = 0.05  # relative difference of a timeline's total and the sum of its parts


class Answers:
    """Holds the prompts and the answers so far, in the form that rich shows."""

    def __init__(self) -> None:
        self.texts = [""] * len(PROMPTS)

    def __rich__(self) -> Text:
        shown = Text()
        for number, (prompt, text) in enumerate(zip(PROMPTS, self.texts, strict=True), 1):
            shown.append(f"[{number}] {prompt}\n", "bold").append(f"{text}\n\n")
        return shown


def main() -> int:
    """Runs the demo; returns 0 if every request completed and its timeline adds up."""
    console = table_console()
    with stopped_by_signals() as stopped:
        try:
            folder = resolve_model(MODEL)
            check_checkpoint(folder)
            return _serve_and_ask(console, str(folder))
        except (TandemError, CheckpointError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 130 if stopped.is_set() else 1


def _serve_and_ask(console: Console, folder: str) -> int:
    prepare_ray_environment(None)
    from tandem.cluster.serve.launch import (
        start_service,  # imports Ray, which reads the environment
    )

    overrides: dict[str, object] = {
        "model": MODEL,
        "name": "demo",
        "router.grpc_port": 0,
        "router.http_port": 0,
    }
    # The decode worker would prefill prompts as short as these; the demo shows the transfer between
    # the pools.
    config = load_config(None, overrides | {"router.local_prefill_tokens": 0})
    console.print(f"Starting {MODEL}: 1 prefill worker, 1 decode worker ...")
    with start_service(config, folder) as service:
        console.print(f"ready: {service.addresses}\n", highlight=False)
        answers = Answers()
        # Without a terminal the answers are printed once, at the end.
        with Live(answers, console=console, refresh_per_second=12):
            completions = asyncio.run(_ask_all(service.grpc_address, answers))
        rows = [(f"[{i + 1}]", completion.timeline) for i, completion in enumerate(completions)]
        console.print(timeline_table(rows))
        problems = verify(completions)
        console.print("Stopping ...")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


async def _ask_all(address: str, answers: Answers) -> list[Completion]:
    async with AsyncClient(address) as client:

        async def ask(request: int) -> Completion:
            messages = [{"role": "user", "content": PROMPTS[request]}]
            async with client.stream_chat(
                messages, temperature=0.0, max_tokens=MAX_TOKENS
            ) as stream:
                async for delta in stream:
                    answers.texts[request] += delta.text
                return await stream.completion()

        return await map_concurrently(ask, range(len(PROMPTS)), len(PROMPTS))


def verify(completions: Sequence[Completion]) -> list[str]:
    """Returns one line for each wrong completion or timeline."""
    problems = []
    if "Paris" not in completions[0].text:
        problems.append(f"[1] does not name Paris: {completions[0].text!r}")
    for i, completion in enumerate(completions):
        parts = sum(getattr(completion.timeline, f"{part}_seconds") for part in PARTS)
        total = completion.timeline.end_to_end_seconds
        if total <= 0 or abs(parts - total) > TOLERANCE * total:
            problems.append(
                f"[{i + 1}] the parts of the timeline add up to {parts:.4f} s; the total is "
                f"{total:.4f} s"
            )
    return problems


if __name__ == "__main__":
    sys.exit(main())
