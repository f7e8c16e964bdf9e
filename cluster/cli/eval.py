"""`tandem eval`: evaluates the served model through the service's gRPC API."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ...router.client.client import AsyncClient
from ...router.client.types import Completion, Options
from ..eval.generate import Case, complete_cases, write_completions
from ..eval.perplexity import Perplexity, measure_perplexity
from ..eval.scores import import_libraries, score_texts
from ..service_url import GRPC_URL, ServiceAccess
from ..tables import progress_bar, table_console
from ..text_files import check_writable, parse_lines, read_text
from . import options as o

eval_app = typer.Typer(help="Evaluate the served model.", no_args_is_help=True)

Concurrency = Annotated[int, typer.Option(min=1, help="The number of concurrent requests.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


@eval_app.command()
@o.service_options(GRPC_URL)
def perplexity(
    file: Annotated[Path, typer.Argument(help="A text file in UTF-8.")],
    service: ServiceAccess,
    model: o.Model = None,
    window: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a window; by default the context less one.")
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens between starts of windows; by default half a window."),
    ] = None,
    concurrency: Concurrency = 4,
    as_json: AsJson = False,
) -> None:
    """Measure the perplexity of a text, in overlapping windows.

    Each token is scored after at least WINDOW - STRIDE tokens.
    """
    text = read_text(file, "file")

    async def measure() -> Perplexity:
        with progress_bar("windows") as update:
            async with service.connect(AsyncClient) as client:
                return await measure_perplexity(
                    client,
                    text,
                    window=window,
                    stride=stride,
                    model=model or "",
                    concurrency=concurrency,
                    on_window=lambda done, total: update(completed=done, total=total),
                )

    found = asyncio.run(measure())
    figures = {
        "tokens": found.num_tokens,
        "windows": found.num_windows,
        "mean_nll": found.mean_nll,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
    }
    _print_figures(figures, as_json)


@eval_app.command()
@o.request_options(
    "model", "max_tokens", "stop", "temperature", "seed", max_tokens=128, temperature=0.0
)
@o.service_options(GRPC_URL)
def generate(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(help="JSONL with prompt or messages, and reference or references.")
    ],
    service: ServiceAccess,
    concurrency: Concurrency = 8,
    output: Annotated[
        Path | None, typer.Option(help="Write the cases with their answers to this JSONL file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer the prompts of FILE and compare the answers with the references.

    Prints BLEU, chrF, ROUGE, exact match and F1.
    """
    # Fails here, not after minutes of answers.
    import_libraries()
    check_writable({"--output": output})
    cases = parse_lines(read_text(file, "file"), file, Case)
    options: Options = o.given_options(context.params)

    async def complete() -> list[Completion]:
        with progress_bar("completions", len(cases)) as update:
            async with service.connect(AsyncClient) as client:
                return await complete_cases(
                    client, cases, options, concurrency, lambda: update(advance=1)
                )

    completions = asyncio.run(complete())
    if output is not None:
        write_completions(output, cases, completions)
    scores = score_texts(
        [each.text for each in completions], [each.all_references for each in cases]
    )
    _print_figures({"cases": len(cases)} | scores, as_json)


def _print_figures(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(figures))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in figures.items():
        table.add_row(
            name.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"
        )
    table_console().print(table)
