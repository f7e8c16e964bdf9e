"""`tandem bench`: measures a service from the client's side, alone or beside a second server."""

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ...proto.errors import Unavailable
from ...router.client.wire import ClientTls
from ..bench.options import (
    DEFAULT_NUM_PROMPTS,
    BenchOptions,
    LoadOptions,
    ServerAddress,
    Workload,
    check_options,
    parse_address,
    parse_slo,
)
from ..service_url import ServiceAccess
from ..tables import table_console
from ..text_files import check_writable, write_text
from ..traces.read import TraceScale, parse_scale
from . import options as o

if TYPE_CHECKING:
    from ..bench.metrics import Summary

_ROUNDS_WITH_PEER = 3

DEFINITIONS: Final = """\
\b
TTFT        first token's arrival minus the sending of the request
end to end  last token's arrival minus the sending of the request
TPOT        (end to end - TTFT) / (output tokens - 1), one value a request
ITL         gap between successive chunks that bear tokens, one value a gap,
            for any number of tokens in the chunk, as in vllm bench serve
throughput  requests, output tokens, prompt and output tokens of completed
            requests / duration: first request's start to last one's end
threads     of other processes of this machine that used a quarter of a core or
            more in the last round, by process: the threads of each server
refusal     answer RESOURCE_EXHAUSTED or 429 minus the sending of the request
goodput     requests/s that complete within every limit of --slo; a failure
            is a miss; slo_attainment is their share of all requests
quantiles   over all values of a round, interpolated; several rounds: the
            median of each figure over the rounds

Prompts of a trace are token ids, so their lengths are exact: each hash_id stands
for one block of random ids. A request that does not fit the model's context fails.
A request is late if it is sent 50 ms or more after its planned time.

Latencies are of completed requests. Over HTTP, events that arrive in one read have one time.
Tokens are counted by the server (usage); without usage, a chunk is a token. A request fails if its
answer has an error, ends early, has no token or takes longer than --timeout. Prompts are sent with
temperature 0.
"""


def bench(
    url: Annotated[
        str,
        typer.Option(
            envvar=o.URL_VARIABLE,
            help="grpc(s)://HOST:PORT of a Tandem service, http(s)://HOST:PORT of OpenAI's API, or "
            "the status page of a Tandem service, for its HTTP API.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(help="The model's name; by default the first model that the server lists."),
    ] = "",
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with the API key for --url; otherwise TANDEM_API_KEY. A peer gets no key."
        ),
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="A PEM file with the CA of the certificate of --url.")
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(help="A PEM file with your certificate for --url. A peer gets none."),
    ] = None,
    tls_key: o.TlsKey = None,
    peer: Annotated[
        str,
        typer.Option(
            help="URL[=MODEL] of a second server, measured in turn with the first one; prints "
            "ratios of medians."
        ),
    ] = "",
    rounds: Annotated[
        int | None,
        typer.Option(help="Rounds of each server; by default 3 with --peer, otherwise 1."),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Closed loop: the number of requests in progress.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Open loop: requests per second, with Poisson arrivals.")
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            help="Requests in a round; by default all that start within --seconds, or all of "
            f"--file or --trace, otherwise {DEFAULT_NUM_PROMPTS}."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Seconds of a round; then no request starts any more."),
    ] = None,
    warmup: Annotated[
        int, typer.Option(help="Requests before the first round, which are not measured.")
    ] = 1,
    timeout: Annotated[
        float, typer.Option(help="The maximum time of a request in seconds; then it fails.")
    ] = 300.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replay a trace in Mooncake's or Azure's form, which may be a .gz file: its times "
            "(open loop), lengths and, with hash_ids, shared prefixes."
        ),
    ] = None,
    length_scale: o.LengthScale = "1",
    speed: o.Speed = 1.0,
    spread_arrivals: o.SpreadArrivals = False,
    workload: Annotated[
        str,
        typer.Option(
            help="random, shared-prefix, file or trace; by default random, or trace with --trace."
        ),
    ] = "",
    input_len: Annotated[int, typer.Option(help="Random tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 128,
    prefix_len: Annotated[
        int,
        typer.Option(
            help="With --workload shared-prefix: tokens of the common prefix, besides --input-len."
        ),
    ] = 0,
    vocab_size: Annotated[
        int,
        typer.Option(
            help="Random token ids are below this number; at most the model's vocabulary."
        ),
    ] = 8192,
    file: Annotated[
        Path | None,
        typer.Option(
            help='With --workload file: lines of {"prompt": text or ids, "max_tokens": N}.'
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(help="Generate all --output-len tokens, also after an end-of-text token."),
    ] = True,
    seed: Annotated[
        int,
        typer.Option(
            help="The seed of prompts and arrivals. After a run with the same seed, the prefix "
            "cache of the server may still have the prompts."
        ),
    ] = 0,
    slo: Annotated[
        str, typer.Option(help="Limits for the goodput, such as ttft=200ms,tpot=50ms,e2e=5s.")
    ] = "",
    json_to: Annotated[
        str, typer.Option("--json", help="Write all results to this file; - is stdout.")
    ] = "",
) -> None:
    """Measure a running service under load."""
    check_writable({"--json": _file(json_to)})
    tls = ClientTls(ca=tls_ca, certificate=tls_certificate, key=tls_key)
    server = _find_server(url, model, o.read_api_key(api_key_file), tls)
    addresses = [server, *([parse_address(peer, "--peer")] if peer else [])]
    lengths = {"input_len": input_len, "prefix_len": prefix_len, "output_len": output_len}
    prompts = Workload(
        kind=workload or ("random" if trace is None else "trace"),
        vocab_size=vocab_size,
        file=file,
        trace=trace,
        trace_scale=TraceScale(parse_scale(length_scale), speed, spread_arrivals),
        ignore_eos=ignore_eos,
        seed=seed,
        **lengths,
    )
    if num_prompts is None and seconds is None and file is None and trace is None:
        num_prompts = DEFAULT_NUM_PROMPTS
    load = LoadOptions(
        concurrency=concurrency,
        rate=rate,
        num_prompts=num_prompts,
        seconds=seconds,
        warmup=warmup,
        timeout=timeout,
    )
    if rounds is None:
        rounds = _ROUNDS_WITH_PEER if peer else 1
    options = BenchOptions(
        addresses=addresses, workload=prompts, load=load, rounds=rounds, slo=parse_slo(slo)
    )
    _run(check_options(options), json_to)


def _file(json_to: str) -> Path | None:
    """Returns the file that `--json` names, if it names one."""
    return None if json_to in ("", "-") else Path(json_to)


def _find_server(url: str, model: str, api_key: str, tls: ClientTls) -> ServerAddress:
    """Returns the API to measure, whose address may be told by a status page at `url`."""
    given = replace(parse_address(url, "--url", model), api_key=api_key, tls=tls)
    if given.url.startswith("grpc"):
        return given
    service = ServiceAccess(url=given.url, api_key=api_key, tls=tls)
    return replace(given, url=service.api_url())


def _run(options: BenchOptions, json_to: str) -> None:
    # Imports aiohttp and numpy, which other commands do not need.
    from ..bench.load import run_bench
    from ..bench.report import report, round_line, to_json

    def report_round(address: ServerAddress, number: int, summary: "Summary") -> None:
        if options.rounds > 1 or len(options.addresses) > 1:
            typer.echo(f"round {number + 1} {address.url}: {round_line(summary)}", err=True)

    measured = asyncio.run(run_bench(options, report_round, partial(typer.echo, err=True)))
    results = json.dumps(to_json(options, measured), indent=2, default=str)
    if (file := _file(json_to)) is not None:
        write_text(file, results + "\n", "--json")
    if json_to == "-":
        typer.echo(results)
    else:
        console = table_console()
        for part in report(options, measured):
            console.print(part)
    for address, rounds in zip(options.addresses, measured, strict=True):
        if not any(each.num_completed for each in rounds):
            raise Unavailable(f"{address.url} completed no request: {rounds[0].failures[0].kind}")
