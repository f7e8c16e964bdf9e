"""Measures the watermark: `python -m tandem.tests.bench.watermark`.

Generates texts with and without the watermark from the same prompts and seeds. Prints how many
texts of each kind are detected, the perplexity of the texts under the model, and the tokens/s.
Detection sees the text alone, as a user would give it. Figures of speed need a quiet machine.
"""

import asyncio
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from tandem.cluster.config import load_config
from tandem.cluster.eval.gather import map_concurrently
from tandem.cluster.local.engine import LocalEngine
from tandem.cluster.store.store import resolve_model
from tandem.proto import inference_pb2
from tandem.router.auth.authenticator import Caller
from tandem.router.client.types import Completion
from tandem.router.watermark.key import write_watermark_key

_SUBJECTS: Final = (
    "the history of bridges",
    "how bread is made",
    "a walk through an old city",
    "the life of bees",
    "learning to play the violin",
    "the weather in the mountains",
    "how a ship crosses an ocean",
    "a library at night",
    "growing tomatoes",
    "the invention of printing",
    "a long train journey",
    "how rivers shape the land",
    "the first telephone",
    "a small school in the country",
    "stars and navigation",
    "repairing an old clock",
    "a market in spring",
    "how glass is blown",
    "training for a marathon",
    "the migration of birds",
)
_FORMS: Final = (
    "An article about {}:\n\n",
    "This essay describes {}. ",
    "Chapter one of a book about {}.\n\n",
    "In a letter to a friend about {}, she wrote: ",
    "A lecture on {} began with these words: ",
    "The newspaper printed a report about {}. ",
    "Notes on {}, taken last year. ",
    "A story about {}. Once, ",
    "A guide for beginners: {}. First, ",
    "An interview about {}. Question: how did it begin? Answer: ",
)

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Holds the figures of one kind of texts."""

    num_texts: int
    num_detected: int  # with p below the threshold
    mean_z: float
    mean_scored_tokens: float
    perplexity: float  # of the texts under the model without the watermark
    tokens_per_second: float


def prompts(numbers: range) -> list[str]:
    """Returns openings of texts by their numbers; the first 200 differ."""
    every = [form.format(subject) for form in _FORMS for subject in _SUBJECTS]
    return [every[number % len(every)] for number in numbers]


async def measure(
    engine: LocalEngine,
    numbers: range,
    num_tokens: int,
    temperature: float,
    threshold: float,
    *,
    watermark: bool,
) -> Measured:
    """Generates texts of `num_tokens` tokens and tests each of them for the watermark.

    Their numbers choose the prompts and are the seeds.
    """

    async def generate(numbered: tuple[int, str]) -> Completion:
        seed, prompt = numbered
        return await engine.generate(
            prompt,
            seed=seed,
            temperature=temperature,
            max_tokens=num_tokens,
            min_tokens=num_tokens,
            logprobs=0,
            watermark=watermark,
        )

    begun = time.perf_counter()
    asked = zip(numbers, prompts(numbers), strict=True)
    texts = await map_concurrently(generate, asked, 2 * engine.max_sequences)
    seconds = time.perf_counter() - begun
    found = [await detect(engine, completion.text) for completion in texts]
    count = len(texts)
    return Measured(
        num_texts=count,
        num_detected=sum(each.p < threshold for each in found),
        mean_z=sum(each.z for each in found) / count,
        mean_scored_tokens=sum(each.num_tokens for each in found) / count,
        perplexity=_perplexity(texts),
        tokens_per_second=count * num_tokens / seconds,
    )


async def detect(engine: LocalEngine, text: str) -> inference_pb2.DetectWatermarkResponse:
    """Returns the evidence for the watermark in a text."""
    prompt = inference_pb2.Prompt(text=text)
    request = inference_pb2.DetectWatermarkRequest(prompt=prompt)
    return await engine.service.detect_watermark(request, Caller())


def _perplexity(texts: Sequence[Completion]) -> float:
    logprobs = [each.token.logprob for text in texts for each in text.logprobs or ()]
    known = [each for each in logprobs if each is not None]
    return math.exp(-sum(known) / len(known))


@app.command()
def main(
    model: Annotated[str, typer.Option(help="The model.")] = "smollm2-135m-instruct",
    texts: Annotated[int, typer.Option(help="Texts of each kind.")] = 200,
    first: Annotated[int, typer.Option(help="The number of the first text and its seed.")] = 0,
    tokens: Annotated[int, typer.Option(help="Tokens of each text.")] = 200,
    temperature: Annotated[float, typer.Option(help="Of the sampling.")] = 0.8,
    gamma: Annotated[float, typer.Option(help="The share of green tokens.")] = 0.25,
    delta: Annotated[float, typer.Option(help="The addition to their logits.")] = 2.0,
    context_width: Annotated[int | None, typer.Option(help="The tokens of a context.")] = None,
    threshold: Annotated[float, typer.Option(help="A text is detected if p is below.")] = 0.01,
    max_sequences: Annotated[int, typer.Option(help="In one batch.")] = 32,
    key: Annotated[Path | None, typer.Option(help="The key; otherwise a new one.")] = None,
) -> None:
    """Measure detection, false positives and the cost in perplexity and speed."""
    with tempfile.TemporaryDirectory() as folder:
        if key is None:
            key = Path(folder) / "key"
            write_watermark_key(key)
        settings: dict[str, object] = {
            "model": model,
            "prefill.replicas": 0,
            "kv_transports": (),
            "decode.max_sequences": max_sequences,
            "decode.mixed_step_factor": None,
            "hang_seconds": 120.0,
            "watermark.key_file": str(key),
            "watermark.gamma": gamma,
            "watermark.delta": delta,
            "watermark.context_width": context_width,
        }

        numbers = range(first, first + texts)

        async def run() -> dict[str, Measured]:
            engine = await LocalEngine.start(load_config(overrides=settings), resolve_model(model))
            try:
                await measure(engine, range(4), 8, temperature, threshold, watermark=True)
                return {
                    name: await measure(
                        engine, numbers, tokens, temperature, threshold, watermark=marked
                    )
                    for name, marked in (("without", False), ("with", True))
                }
            finally:
                await engine.close()

        for name, measured in asyncio.run(run()).items():
            typer.echo(json.dumps({"watermark": name} | asdict(measured)))


if __name__ == "__main__":
    app()
