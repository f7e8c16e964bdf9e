"""Measures one figure of docs/learn.md: `python -m tandem.tests.bench.learn FIGURE`.

Prints a table, and writes a plot. Needs no service: `stalls` starts its own.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from tandem.tests.bench.learn import (
    batching,
    cost,
    kv_cache,
    precision,
    prefix_cache,
    speculation,
    stalls,
    windows,
)
from tandem.tests.bench.learn.figure import LearnFigure
from tandem.tests.bench.learn.plots import draw

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

Model = Annotated[str, typer.Option(help="A MODEL of `tandem serve`.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Out = Annotated[Path, typer.Option(help="The folder for the plot.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")]
Numbers = Annotated[str, typer.Option(help="Numbers with commas.")]

_DEMO = "smollm2-135m-instruct"
_OUT = Path("docs/learn")


def _finish(figure: LearnFigure, out: Path, as_json: bool) -> None:
    typer.echo(figure.as_json() if as_json else figure.as_text())
    if find_spec("matplotlib") is None:
        typer.echo("no plot: matplotlib is missing (pip install 'tandem-llm[bench]')", err=True)
        raise typer.Exit(1)
    draw(figure, out / f"{figure.name}.png")


def _numbers(text: str) -> list[int]:
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"must be numbers with commas, got {text!r}") from None
    if min(found) < 0:
        raise typer.BadParameter(f"must not be below 0, got {text!r}")
    return found


@app.command("kv-cache")
def kv_cache_command(
    model: Model = _DEMO,
    dtype: Dtype = "bfloat16",
    tokens: Annotated[int, typer.Option(min=2, help="Output tokens.")] = 1000,
    every: Annotated[int, typer.Option(min=1, help="Compute every Nth token again.")] = 10,
    out: Out = _OUT,
    as_json: Json = False,
) -> None:
    """Time of an output with KV cache, and by computing every token from the start."""
    _finish(kv_cache.measure(model, dtype=dtype, num_tokens=tokens, every=every), out, as_json)


@app.command("batching")
def batching_command(
    model: Model = _DEMO,
    dtype: Dtype = "bfloat16",
    batches: Numbers = "1,2,4,8,16,32",
    requests: Annotated[int, typer.Option(min=2, help="Requests at once.")] = 32,
    mean_tokens: Annotated[int, typer.Option(min=4, help="Output tokens, on average.")] = 40,
    out: Out = _OUT,
    as_json: Json = False,
) -> None:
    """Throughput and latency by batch size, with static and continuous batching."""
    sizes = _numbers(batches)
    figure = batching.measure(
        model, dtype=dtype, batches=sizes, num_requests=requests, mean_tokens=mean_tokens
    )
    _finish(figure, out, as_json)


@app.command("stalls")
def stalls_command(
    model: Model = _DEMO,
    dtype: Dtype = "bfloat16",
    streams: Annotated[int, typer.Option(min=1, help="Streams of short prompts.")] = 4,
    long_tokens: Annotated[int, typer.Option(min=16, help="Tokens of a long prompt.")] = 1500,
    seconds: Annotated[float, typer.Option(min=1, help="For each of three services.")] = 10.0,
    out: Out = _OUT,
    as_json: Json = False,
) -> None:
    """Gaps of streams beside long prompts: whole, in chunks, and in a separate worker."""
    figure = stalls.measure(
        model, dtype=dtype, num_streams=streams, long_tokens=long_tokens, seconds=seconds
    )
    _finish(figure, out, as_json)


@app.command("prefix-cache")
def prefix_cache_command(
    model: Model = _DEMO,
    dtype: Dtype = "bfloat16",
    prefixes: Numbers = "0,128,256,512,1024,1536,2048",
    repeat: Annotated[int, typer.Option(min=1, help="Pairs of prompts for each length.")] = 5,
    out: Out = _OUT,
    as_json: Json = False,
) -> None:
    """Time to the first token of prompts with an equal beginning."""
    lengths = _numbers(prefixes)
    figure = prefix_cache.measure(model, dtype=dtype, prefixes=lengths, repeat=repeat)
    _finish(figure, out, as_json)


@app.command("precision")
def precision_command(
    model: Model = _DEMO,
    tokens: Annotated[int, typer.Option(min=2, help="Output tokens of a round.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each precision.")] = 3,
    characters: Annotated[int, typer.Option(min=16, help="Of the text that is scored.")] = 6000,
    out: Out = _OUT,
    as_json: Json = False,
) -> None:
    """Bytes, tokens/s and perplexity in float32, bfloat16, int8 and int4."""
    figure = precision.measure(model, num_tokens=tokens, rounds=rounds, num_characters=characters)
    _finish(figure, out, as_json)


@app.command("speculation")
def speculation_command(
    model: Model = _DEMO,
    dtype: Dtype = "bfloat16",
    tokens: Annotated[int, typer.Option(min=2, help="Output tokens of a round.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each text and draft.")] = 3,
    out: Out = _OUT,
    as_json: Json = False,
) -> None:
    """Tokens/s with n-gram drafts of several lengths."""
    figure = speculation.measure(model, dtype=dtype, num_tokens=tokens, rounds=rounds)
    _finish(figure, out, as_json)


@app.command("windows")
def windows_command(
    model: Model = _DEMO,
    dtype: Dtype = "bfloat16",
    sizes: Numbers = "1024,256",
    contexts: Numbers = "256,1024,2048,4096,8000",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Steps at each context.")] = 30,
    out: Out = _OUT,
    as_json: Json = False,
) -> None:
    """Time and KV cache of a decode step with sliding windows."""
    figure = windows.measure(
        model,
        dtype=dtype,
        windows=_numbers(sizes),
        contexts=_numbers(contexts),
        batch=batch,
        steps=steps,
    )
    _finish(figure, out, as_json)


@app.command("cost")
def cost_command(
    price: Annotated[float, typer.Option(min=0, help="Of the machine per hour, any currency.")],
    model: Model = _DEMO,
    dtype: Dtype = "bfloat16",
    concurrencies: Numbers = "1,2,4,8,16,32",
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 128,
    output_len: Annotated[int, typer.Option(min=2, help="Output tokens of a request.")] = 64,
    out: Out = _OUT,
    as_json: Json = False,
) -> None:
    """Cost of a million tokens, from a price per hour."""
    figure = cost.measure(
        model,
        dtype=dtype,
        price_per_hour=price,
        concurrencies=_numbers(concurrencies),
        input_len=input_len,
        output_len=output_len,
    )
    _finish(figure, out, as_json)


if __name__ == "__main__":
    app()
