"""`make demo`: serves the demo model with two workers, sends four prompts at once, and shows the
timeline of each.
"""

import asyncio
import sys
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ...proto.errors import TandemError
from ...router.client.client import AsyncClient
from ...router.client.types import Completion
from ...workers.model.config import CheckpointError
from ...workers.model.loader import check_checkpoint
from ..config import load_config
from ..eval.gather import map_concurrently
from ..serve.environment import prepare_ray_environment
from ..store.store import resolve_model
from ..tables import table_console
from .answers import timeline_table, total_of_parts
from .serve import stopped_by_signals

MODEL: Final = "smollm2-135m-instruct"
PROMPTS: Final = (
    # the first choice of each token is clear: no rounding changes it
    "What is the name of the capital of France?",
    "Name three fruits and say what colour each of them has.",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about two friends who share their work.",
)
MAX_TOKENS: Final = 80
TOLERANCE: Final = 0.05  # how far the parts of a timeline may be from the whole


class Answers:
    """Holds the prompts and what has come of each answer, as rich shows them."""

    def __init__(self) -> None:
        self.texts = [""] * len(PROMPTS)

    def __rich__(self) -> Text:
        shown = Text()
        for number, (prompt, text) in enumerate(zip(PROMPTS, self.texts, strict=True), 1):
            shown.append(f"[{number}] {prompt}\n", "bold").append(f"{text}\n\n")
        return shown


def main() -> int:
    """Runs the demo; returns the exit code: 0 if every request completed and its timeline adds up."""
    console = table_console()
    with stopped_by_signals() as stopped:
        try:
            folder = resolve_model(MODEL, progress=True)
            check_checkpoint(folder)
            return _serve_and_ask(console, str(folder))
        except (TandemError, CheckpointError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 130 if stopped.is_set() else 1


def _serve_and_ask(console: Console, folder: str) -> int:
    prepare_ray_environment(None)
    from ..serve.launch import start_service  # imports Ray, which reads the environment

    overrides: dict[str, object] = {
        "model": MODEL,
        "name": "demo",
        "router.grpc_port": 0,
        "router.http_port": 0,
    }
    # The prompts are short enough to be prefilled by the decode worker; the demo shows the transfer
    # between the pools.
    config = load_config(None, overrides | {"router.local_prefill_tokens": 0})
    console.print(f"Starting {MODEL}: 1 prefill worker, 1 decode worker ...")
    with start_service(config, folder) as service:
        console.print(f"ready: {service.addresses}\n", highlight=False)
        answers = Answers()
        with Live(
            answers, console=console, refresh_per_second=12
        ):  # not on a terminal: prints them once, at the end
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
        parts, whole = total_of_parts(completion.timeline), completion.timeline.end_to_end_seconds
        if whole <= 0 or abs(parts - whole) > TOLERANCE * whole:
            problems.append(
                f"[{i + 1}] the parts of the timeline make {parts:.4f} s of {whole:.4f} s"
            )
    return problems


if __name__ == "__main__":
    sys.exit(main())
