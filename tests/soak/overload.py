"""Overloads a running service for a while, and compares its goodput during and after that with the
one before.

    python -m tandem.tests.soak.overload --url http://127.0.0.1:8080 --rate 4 --slo
    ttft=3000,tpot=100

Three phases follow each other without a pause, each with Poisson arrivals: `--rate` requests/s, ten
times as many, and `--rate` again. A request is good if it completes within every limit of `--slo`;
goodput is good requests/s, counted by when they were sent. Choose the highest rate at which all are
good, so that the first phase shows the service's peak.

Passes if the goodput under overload is at least 90 % of the first phase's, and the share of good
requests from 5 s after the overload on at least the first phase's. A service keeps that only if no
request waits longer than `--slo`
allows before its first token: serve it with `router.max_queue_seconds` below that, by a prompt's
time and a margin.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from typing import Final

from tandem.cluster.bench.load import send_load
from tandem.cluster.bench.metrics import RequestRecord, count_failures, distribution, meets
from tandem.cluster.bench.options import LoadOptions, Workload, parse_address, parse_slo
from tandem.cluster.bench.target import StreamCompletion, open_target
from tandem.cluster.bench.workload import Prompts
from tandem.proto.errors import TandemError

LEAST_SHARE: Final = 0.9  # of the peak, under overload
RECOVERY_SECONDS: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Counts the requests sent from one moment to another."""

    name: str
    seconds: float
    records: Sequence[RequestRecord]
    num_good: int

    @classmethod
    def of(
        cls,
        name: str,
        records: Sequence[RequestRecord],
        begin: float,
        end: float,
        slo: dict[str, float],
    ) -> "Phase":
        """Takes those of the records that were sent from `begin` until before `end`."""
        sent = [record for record in records if begin <= record.started < end]
        return cls(
            name=name,
            seconds=end - begin,
            records=sent,
            num_good=sum(meets(each, slo) for each in sent),
        )

    @property
    def goodput(self) -> float:
        """Returns good requests/s."""
        return self.num_good / self.seconds

    @property
    def share(self) -> float:
        """Returns the share of good requests."""
        return self.num_good / len(self.records) if self.records else 0.0

    def __str__(self) -> str:
        counts = (
            f"{len(self.records)} requests in {self.seconds:.0f} s, {self.num_good} good "
            f"({self.share:.1%})"
        )
        if ttft := distribution(
            "ttft", [record.ttft for record in self.records if record.failure is None]
        ):
            counts += f", TTFT p50 {ttft['p50_ttft_ms']:.0f} and p99 {ttft['p99_ttft_ms']:.0f} ms"
        failures = ", ".join(
            f"{each.kind} {each.count}" for each in count_failures(r.failure for r in self.records)
        )
        return f"{self.name:10}{self.goodput:8.2f} good requests/s  {counts}" + (
            f"; {failures}" if failures else ""
        )


@dataclass(frozen=True, kw_only=True)
class Overload:
    """Holds the phases of a run."""

    before: Phase
    during: Phase
    after: Phase  # from RECOVERY_SECONDS after the overload on

    @property
    def passed(self) -> bool:
        holds = self.during.goodput >= LEAST_SHARE * self.before.goodput
        return bool(self.before.num_good) and holds and self.after.share >= self.before.share

    def __str__(self) -> str:
        ratio = self.during.goodput / self.before.goodput if self.before.goodput else 0.0
        verdict = (
            f"under overload {ratio:.0%} of the goodput before; from {RECOVERY_SECONDS:g} s after "
            "it on"
        )
        verdict += (
            f" {self.after.share:.1%} of the requests are good, before it {self.before.share:.1%}"
        )
        return "\n".join([*map(str, (self.before, self.during, self.after)), verdict])


def judge(
    records: Sequence[RequestRecord], bounds: Sequence[float], slo: dict[str, float]
) -> Overload:
    """Returns the phases; `bounds` are the times at which the first, the second and the third
    began, and the end.
    """
    begin, overload, normal, end = bounds
    return Overload(
        before=Phase.of("before", records, begin, overload, slo),
        during=Phase.of("overload", records, overload, normal, slo),
        after=Phase.of("after", records, normal + RECOVERY_SECONDS, end, slo),
    )


async def overload(
    target: StreamCompletion, prompts: Prompts, options: argparse.Namespace
) -> Overload:
    """Sends the three phases, and waits for every answer."""
    begin = perf_counter()
    lengths = (options.seconds, options.overload_seconds, RECOVERY_SECONDS + options.seconds)
    rates = (options.rate, options.factor * options.rate, options.rate)
    bounds = [begin]
    sent: list[asyncio.Task[list[RequestRecord]]] = []
    for number, (seconds, rate) in enumerate(zip(lengths, rates, strict=True)):
        load = LoadOptions(rate=rate, num_prompts=None, seconds=seconds, timeout=options.timeout)
        sent.append(
            asyncio.create_task(
                send_load(
                    target, prompts.of_round(number, load), load, prompts.arrivals(load, number)
                )
            )
        )
        bounds.append(bounds[-1] + seconds)
        await asyncio.sleep(bounds[-1] - perf_counter())
    records = list(chain.from_iterable(await asyncio.gather(*sent)))
    return judge(records, bounds, options.slo)


async def run(options: argparse.Namespace) -> Overload:
    """Connects, warms up and measures."""
    lengths = {"input_len": options.input_len, "output_len": options.output_len}
    prompts = Prompts(Workload(vocab_size=options.vocab_size, **lengths))
    async with open_target(options.url, ignore_eos=True) as target:
        for _, prompt in zip(range(3), prompts.warmup(), strict=False):
            await target(prompt, [])
        return await overload(target, prompts, options)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tandem.tests.soak.overload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", type=lambda text: parse_address(text, "--url"), required=True)
    parser.add_argument("--rate", type=float, required=True, help="requests/s before and after")
    parser.add_argument(
        "--slo", type=parse_slo, required=True, help="limits in ms, as ttft=3000,tpot=100"
    )
    parser.add_argument("--factor", type=float, default=10.0, help="of the rate under overload")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="before and, from 5 s on, after"
    )
    parser.add_argument("--overload-seconds", type=float, default=60.0)
    parser.add_argument("--timeout", type=float, default=120.0, help="of a request")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=32, help="tokens to generate")
    parser.add_argument("--vocab-size", type=int, default=8_192)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    try:
        found = asyncio.run(run(parse(arguments)))
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(found)
    print("passed" if found.passed else "FAILED")
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
