"""Holds the options of `tandem bench` and checks their bounds. Sends no load."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from ...proto.errors import InvalidArgument
from ...router.client.wire import ClientTls
from ..traces.read import UNSCALED, TraceScale, check_scale

WORKLOADS: Final = ("random", "shared-prefix", "file", "trace")
SCHEMES: Final = ("grpc", "grpcs", "http", "https")
SLO_FIGURES: Final = ("ttft", "tpot", "e2e")
DEFAULT_NUM_PROMPTS: Final = 100

_MAX_COUNT: Final = 10_000_000
_MAX_SECONDS: Final = 86_400.0


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """Describes a server to measure."""

    url: str  # grpc(s)://HOST:PORT, or http(s)://HOST:PORT without /v1
    model: str = ""  # empty: the first model that it serves
    api_key: str = field(default="", repr=False)
    tls: ClientTls = field(default_factory=ClientTls)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Describes the prompts and the number of tokens to generate."""

    kind: str = "random"  # one of WORKLOADS
    input_len: int = 128  # own tokens of a prompt
    prefix_len: int = 0  # tokens before them, shared by all prompts
    output_len: int = 128  # tokens to generate; with a file: for lines without max_tokens
    vocab_size: int = 8_192  # upper bound of random token ids
    file: Path | None = None
    trace: Path | None = None  # gives the lengths, the shared prefixes and the times
    trace_scale: TraceScale = UNSCALED
    ignore_eos: bool = True
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Describes when and how many requests are sent.

    One of `concurrency` and `rate` is set, except with a trace, which has its own times.
    """

    concurrency: int | None = None  # closed loop: requests in progress at any time
    rate: float | None = None  # open loop: requests/s, Poisson arrivals
    # In one round; None: all that fit into `seconds`, or all in the file or trace.
    num_prompts: int | None = DEFAULT_NUM_PROMPTS
    seconds: float | None = None  # after which no request of a round starts
    warmup: int = 1  # requests to each server before the first round, not measured
    timeout: float = 300.0  # seconds for one request


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Holds all options of one benchmark. `check_options` checks them."""

    addresses: Sequence[ServerAddress]  # one, or two to compare
    workload: Workload
    load: LoadOptions
    rounds: int = 1  # of each server
    slo: Mapping[str, float] = field(default_factory=dict)  # ms, by names of SLO_FIGURES


def parse_address(text: str, option: str, model: str = "") -> ServerAddress:
    """Parses URL[=MODEL]; MODEL overrides `model`. Raises InvalidArgument that names the option."""
    url, _, named = text.partition("=")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InvalidArgument(f"must have a valid host and port, got {url}", option) from None
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise InvalidArgument(
            f"must be grpc(s)://HOST:PORT or http(s)://HOST:PORT, got {url}", option
        )
    if parts.scheme in ("grpc", "grpcs") and port is None:
        raise InvalidArgument(f"must have a port, such as grpc://HOST:50051, got {url}", option)
    return ServerAddress(url=url.rstrip("/").removesuffix("/v1"), model=named or model)


def parse_slo(text: str) -> dict[str, float]:
    """Parses limits such as `ttft=1s,tpot=50ms` or `ttft=1000`; empty for "".

    Returns ms, which are also the default unit. Raises InvalidArgument.
    """
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.strip().partition("=")
        if name not in SLO_FIGURES:
            raise InvalidArgument(
                f"must name one of {', '.join(SLO_FIGURES)}, got {name!r}", "--slo"
            )
        if name in limits:
            raise InvalidArgument(f"{name} is given twice", "--slo")
        try:
            limits[name] = _parse_ms(number.strip())
        except ValueError:
            raise InvalidArgument(
                f"{name} must be a time such as 50, 50ms or 1s, got {number!r}", "--slo"
            ) from None
        if not 0 < limits[name] < math.inf:
            raise InvalidArgument(f"{name} must be above 0 ms", "--slo")
    return limits


def _parse_ms(text: str) -> float:
    """Returns a time in ms; raises ValueError."""
    if text.endswith("s") and not text.endswith("ms"):
        return 1000 * float(text.removesuffix("s"))
    return float(text.removesuffix("ms"))


def check_options(options: BenchOptions) -> BenchOptions:
    """Returns the same options. Raises InvalidArgument for the first one out of bounds."""
    load = options.load
    workload = options.workload
    is_trace = workload.trace is not None
    if is_trace and (load.concurrency, load.rate) != (None, None):
        raise InvalidArgument("has its own times; give neither --concurrency nor --rate", "--trace")
    if not is_trace and (load.concurrency is None) == (load.rate is None):
        raise InvalidArgument("give either --concurrency or --rate, or --trace")
    has_end = workload.file is not None or is_trace
    if load.num_prompts is None and load.seconds is None and not has_end:
        raise InvalidArgument("give --num-prompts or --seconds")
    shared = workload.kind == "shared-prefix"
    bounds: tuple[tuple[str, float | None, float, float], ...] = (
        ("--concurrency", load.concurrency, 1, 100_000),
        ("--rate", load.rate, 1e-6, 1e6),
        ("--num-prompts", load.num_prompts, 1, _MAX_COUNT),
        ("--seconds", load.seconds, 0.001, _MAX_SECONDS),
        ("--warmup", load.warmup, 0, _MAX_COUNT),
        ("--timeout", load.timeout, 0.001, _MAX_SECONDS),
        ("--rounds", options.rounds, 1, 1_000),
        ("--input-len", workload.input_len, 1, _MAX_COUNT),
        ("--output-len", workload.output_len, 1, _MAX_COUNT),
        ("--prefix-len", workload.prefix_len, 1 if shared else 0, _MAX_COUNT),
        ("--vocab-size", workload.vocab_size, 2, 2**31),
        ("--seed", workload.seed, 0, 2**63),
    )
    for option, number, low, high in bounds:
        if number is not None and not low <= number <= high:
            raise InvalidArgument(f"must be from {low:g} to {high:g}, got {number}", option)
    if workload.kind not in WORKLOADS:
        raise InvalidArgument(
            f"must be one of {', '.join(WORKLOADS)}, got {workload.kind!r}", "--workload"
        )
    if workload.prefix_len and not shared:
        raise InvalidArgument("needs --workload shared-prefix", "--prefix-len")
    if (workload.file is not None) != (workload.kind == "file"):
        raise InvalidArgument("--workload file and --file must be given together", "--file")
    if is_trace != (workload.kind == "trace"):
        raise InvalidArgument("--workload trace and --trace must be given together", "--trace")
    check_scale(workload.trace_scale, workload.trace)
    return options
