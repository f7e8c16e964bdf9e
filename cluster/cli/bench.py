"""`tandem bench`: measures a service from the client's side, alone or beside a second server."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from ...proto.errors import InvalidArgument, Unavailable
from ..bench.options import (
    DEFAULT_NUM_PROMPTS,
    BenchOptions,
    LoadOptions,
    Workload,
    check_options,
    parse_address,
    parse_slo,
)
from .timeline import TABLE_CHARACTERS

_ROUNDS_WITH_PEER = 3

DEFINITIONS: Final = """\
\b
TTFT        first token's arrival minus the sending of the request
end to end  last token's arrival minus the sending of the request
TPOT        (end to end - TTFT) / (output tokens - 1), one value a request
ITL         gap between successive chunks that bear tokens, one value a gap,
            however many tokens the chunk has, as in vllm bench serve
throughput  requests, output tokens, prompt and output tokens of completed
            requests / duration: first request's start to last one's end
refusal     answer RESOURCE_EXHAUSTED or 429 minus the sending of the request
goodput     requests/s that complete within every limit of --slo; a failure
            is a miss; slo_attainment is their share of all requests
quantiles   over all values of a round, interpolated; several rounds: the
            median of each figure over the rounds

Latencies are those of completed requests. Over HTTP, events that arrive in one read have one time. Tokens are
counted by the server (usage); where it sends none, a chunk is a token. A request fails if its answer has an error,
ends early, has no token or takes longer than --timeout. Prompts are sent with temperature 0.
"""


def bench(
    url: Annotated[str, typer.Option(help="grpc://HOST:PORT of a Tandem service or http://HOST:PORT of OpenAI's API.")],
    model: Annotated[str, typer.Option(help="The model's name; otherwise the first one served.")] = "",
    peer: Annotated[str, typer.Option(help="URL[=MODEL] of a second server: rounds in turn, ratios of medians.")] = "",
    rounds: Annotated[int | None, typer.Option(help="Rounds of each server; with a peer 3, else 1.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Closed loop: requests under way at any time.")] = None,
    rate: Annotated[float | None, typer.Option(help="Open loop: requests/s, with Poisson arrivals.")] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(help=f"Requests in a round; else until --seconds, or the file once, or {DEFAULT_NUM_PROMPTS}."),
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="No request of a round starts after so many seconds.")] = None,
    warmup: Annotated[int, typer.Option(help="Requests before the first round, not measured.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds for one request; then it counts as failed.")] = 300.0,
    workload: Annotated[str, typer.Option(help="random, shared-prefix or file.")] = "random",
    input_len: Annotated[int, typer.Option(help="Random tokens of a prompt.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens to generate.")] = 128,
    prefix_len: Annotated[int, typer.Option(help="shared-prefix: tokens before them, the same in all prompts.")] = 0,
    vocab_size: Annotated[int, typer.Option(help="Random token ids are below; the model's vocabulary or less.")] = 8192,
    file: Annotated[Path | None, typer.Option(help='file: lines of {"prompt": text or ids, "max_tokens": N}.')] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Generate --output-len tokens even past the end.")] = True,
    seed: Annotated[int, typer.Option(help="Same seed, same prompts (prefix caches may know them) and arrivals.")] = 0,
    slo: Annotated[str, typer.Option(help="Limits in ms for the goodput, as ttft=200,tpot=50,e2e=5000.")] = "",
    json_to: Annotated[str, typer.Option("--json", help="Write all results to this file; - is stdout.")] = "",
) -> None:
    """Measure a running service under load."""
    second = parse_address(peer, "--peer") if peer else None
    lengths = {"input_len": input_len, "prefix_len": prefix_len, "output_len": output_len}
    prompts = Workload(kind=workload, vocab_size=vocab_size, file=file, ignore_eos=ignore_eos, seed=seed, **lengths)
    if num_prompts is None and seconds is None and file is None:
        num_prompts = DEFAULT_NUM_PROMPTS
    load = LoadOptions(
        concurrency=concurrency, rate=rate, num_prompts=num_prompts, seconds=seconds, warmup=warmup, timeout=timeout
    )
    rounds = rounds if rounds is not None else _ROUNDS_WITH_PEER if second else 1
    target = parse_address(url, "--url", model)
    options = BenchOptions(address=target, peer=second, workload=prompts, load=load, rounds=rounds, slo=parse_slo(slo))
    _run(check_options(options), json_to)


def _run(options: BenchOptions, json_to: str) -> None:
    from ..bench.load import run_bench  # imports aiohttp and numpy, which other commands do not need
    from ..bench.report import report, round_line, to_json

    _check_writable(json_to)
    many = options.rounds > 1 or options.peer is not None
    measured = asyncio.run(
        run_bench(
            options,
            lambda address, number, summary: (
                typer.echo(f"round {number + 1} {address.url}: {round_line(summary)}", err=True) if many else None
            ),
        )
    )
    if json_to:
        _write(to_json(options, measured), json_to)
    if json_to != "-":
        console = Console(highlight=False, width=None if sys.stdout.isatty() else TABLE_CHARACTERS)
        for part in report(measured, options.slo):
            console.print(part, markup=False)
    for server in measured:
        if not any(each.num_completed for each in server.rounds):
            raise Unavailable(f"{server.address.url} completed no request: {server.rounds[0].failures[0].kind}")


def _check_writable(json_to: str) -> None:
    """Raises InvalidArgument before the measurement, which may take long, if its result could not be written."""
    if json_to in ("", "-"):
        return
    try:
        Path(json_to).open("a").close()
    except OSError as error:
        raise InvalidArgument(f"{json_to} cannot be written: {error.strerror}", "--json") from None


def _write(results: dict[str, Any], json_to: str) -> None:
    text = json.dumps(results, indent=2)
    if json_to == "-":
        typer.echo(text)
    else:
        Path(json_to).write_text(text + "\n")
