"""Keeps streams going through the gRPC client of all routers, and compares each with the fault-free
output.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tandem.cluster.cli.demo.differences import first_difference
from tandem.proto.errors import TandemError
from tandem.router.client.client import AsyncClient
from tandem.router.client.types import Choice

STREAM_SECONDS: Final = 180.0
"""The timeout of a stream: far above what one needs while a worker is replaced, so that only a hang
exceeds it.
"""

LENGTHS: Final = (5, 70, 190)  # of the prompts, in tokens


@dataclass(frozen=True, kw_only=True)
class Case:
    """Describes one distinct request, and its output without faults."""

    name: str
    prompt: Sequence[int]
    options: dict[str, Any]
    expected: tuple[Choice, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Describes one stream that has ended."""

    case: str
    num_tokens: int = 0
    first_seconds: float = 0.0  # from the start to the first token
    longest_gap: float = 0.0  # between two messages with tokens
    num_resumed: int = 0  # tries after the first
    error: str = ""  # of a stream that failed
    difference: str = ""  # from the fault-free output


@dataclass
class Traffic:
    """Counts the streams of a run."""

    ended: list[Ended] = field(default_factory=list)
    num_running: int = 0

    @property
    def failed(self) -> list[Ended]:
        return [each for each in self.ended if each.error]

    @property
    def altered(self) -> list[Ended]:
        return [each for each in self.ended if each.difference]


def make_cases(num_tokens: int, lengths: Sequence[int] = LENGTHS) -> list[Case]:
    """Returns one request of each kind for each length of prompt; `with_stops` adds those with stop
    strings.
    """
    options: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0, "ignore_eos": True},
        "sampled": {
            "seed": 11,
            "top_p": 0.95,
            "presence_penalty": 0.3,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
        },
        "n=2": {"seed": 12, "n": 2, "max_tokens": max(num_tokens // 2, 2), "ignore_eos": True},
        "grammar": {"seed": 13, "regex": r"([a-z]{2,9} ){400}"},
        "logprobs": {"temperature": 0.8, "seed": 14, "logprobs": 2, "ignore_eos": True},
    }
    return [
        Case(
            name=f"{name}/{length}",
            prompt=_prompt(length, number),
            options={"max_tokens": num_tokens} | given,
        )
        for number, (name, given) in enumerate(options.items())
        for length in lengths
    ]


def with_stops(cases: Sequence[Case]) -> Iterator[Case]:
    """Yields the greedy requests again, each with a stop string from the last third of its known
    output.
    """
    for case in cases:
        if case.name.startswith("greedy"):
            text = case.expected[0].text
            stop = text[len(text) * 2 // 3 :][:4]
            yield Case(
                name=case.name.replace("greedy", "stop"),
                prompt=case.prompt,
                options=case.options | {"stop": stop},
            )


async def fault_free(addresses: Sequence[str], cases: Sequence[Case]) -> list[Case]:
    """Returns the cases with their outputs. Each is asked for twice, alone and beside the others;
    raises AssertionError
    if the two differ: then nothing could be said of an output under faults.
    """
    known = []
    async with AsyncClient(addresses) as client:

        async def generate(case: Case) -> tuple[Choice, ...]:
            return (
                await client.generate(case.prompt, timeout=STREAM_SECONDS, **case.options)
            ).choices

        together = await asyncio.gather(*map(generate, cases))
        for case, choices in zip(cases, together, strict=True):
            assert await generate(case) == choices, f"{case.name} has two outputs without a fault"
            known.append(
                Case(name=case.name, prompt=case.prompt, options=case.options, expected=choices)
            )
    return known


async def keep_going(
    addresses: Sequence[str],
    cases: Sequence[Case],
    traffic: Traffic,
    *,
    concurrency: int,
    is_over: Callable[[], bool],
) -> None:
    """Runs so many streams at a time, the cases in turn, until `is_over`; then lets those that run
    end.
    """
    following = itertools.cycle(cases)

    async def one_after_the_other() -> None:
        async with AsyncClient(addresses) as client:  # each begins with a random router
            while not is_over():
                traffic.num_running += 1
                traffic.ended.append(await _stream(client, next(following)))
                traffic.num_running -= 1

    await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))


async def _stream(client: AsyncClient, case: Case) -> Ended:
    """Reads one stream to its end, whatever that is."""
    started = last = time.monotonic()
    first_seconds = longest_gap = 0.0
    num_tokens = num_resumed = 0
    stream: Any = client.stream(case.prompt, timeout=STREAM_SECONDS, **case.options)
    call = stream._call
    error = difference = ""
    try:
        async for delta in stream:
            num_resumed += stream._call is not call
            call = stream._call
            if delta.token_ids:
                now = time.monotonic()
                if num_tokens:
                    longest_gap = max(longest_gap, now - last)
                else:
                    first_seconds = now - started
                last, num_tokens = now, num_tokens + len(delta.token_ids)
        difference = first_difference((await stream.completion()).choices, case.expected)
    except TandemError as raised:
        error = (
            f"{type(raised).__name__}: {raised} (after {num_tokens} tokens, "
            f"{time.monotonic() - started:.1f} s)"
        )
    return Ended(
        case=case.name,
        num_tokens=num_tokens,
        first_seconds=first_seconds,
        longest_gap=longest_gap,
        num_resumed=num_resumed,
        error=error,
        difference=difference,
    )


def _prompt(length: int, number: int) -> list[int]:
    return [(17 * i + 29 * number + 5 * length) % 400 + 3 for i in range(length)]
