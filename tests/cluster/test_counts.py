"""Tests that counters equal the clients' counts.

Hundreds of requests of every kind run over both APIs of two routers.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tandem.cluster.serve.runtime import RouterRuntime
from tandem.proto.errors import TandemError
from tandem.router.client.client import AsyncClient
from tandem.tests.cluster.test_metrics import folder, start
from tandem.tests.fleet import fake_rank, fleet
from tandem.tests.metrics_page import MetricsPage, scrape, scrape_until
from tandem.tests.tiny_tokenizer import make_tokenizer
from tandem.tests.waits import WAIT

__all__ = ["folder"]

NUM_AT_ONCE: Final = 120  # requests, at the end: more than may wait
MAX_QUEUED: Final = 8
MAX_SEQUENCES: Final = 16
TOKENS: Final = 24
LONG: Final = 1_500  # tokens of a request whose client leaves


@dataclass
class Counts:
    """Adds up the observations of the clients of one router or of several."""

    answered: int = 0
    prompt: int = 0  # tokens, here and below
    cached: int = 0
    generated: int = 0
    left: int = 0  # clients, after the first token
    left_prompt: int = 0
    reasons: Counter[str] = field(default_factory=Counter)  # of completions
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)

    def answer(self, prompt: int, generated: int, cached: int, reasons: list[str]) -> None:
        self.answered += 1
        self.prompt += prompt
        self.generated += generated
        self.cached += cached
        self.reasons.update(reasons)

    def leave(self, prompt: int) -> None:
        self.left += 1
        self.left_prompt += prompt

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{name: value + getattr(other, name) for name, value in vars(self).items()})


class Caller:
    """Sends requests to one router and counts the results."""

    def __init__(self, router: RouterRuntime, grpc: AsyncClient, http: httpx.AsyncClient) -> None:
        self.router = router
        self.counts = Counts()
        self._grpc = grpc
        self._http = http

    async def ask_grpc(self, prompt: list[int], *, leaves: bool = False, **options: Any) -> None:
        settings: dict[str, Any] = {
            "temperature": 0,
            "max_tokens": LONG if leaves else TOKENS,
            "timeout": WAIT,
        }
        try:
            async with self._grpc.stream(prompt, **settings | options) as stream:
                await anext(stream)
                if leaves:
                    self.counts.leave(len(prompt))
                    return
                answer = await stream.completion()
        except TandemError as error:
            self.counts.errors["grpc", error.code] += 1
            return
        usage, reasons = answer.usage, [str(choice.finish_reason) for choice in answer.choices]
        self.counts.answer(
            usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, reasons
        )

    async def ask_http(self, prompt: list[int], *, leaves: bool = False, **fields: Any) -> None:
        body = {
            "model": "m",
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": LONG if leaves else TOKENS,
        } | fields
        body |= (
            {"stream": True, "stream_options": {"include_usage": True}}
            if leaves or "stream" in fields
            else {}
        )
        async with self._http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                self.counts.errors["http", str(reply.status_code)] += 1
                return
            chunks = []
            async for chunk in events(reply) if "stream" in body else whole(reply):
                if leaves:
                    self.counts.leave(len(prompt))
                    return
                chunks.append(chunk)
        usage = chunks[-1]["usage"]
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        ended = [reason for reason in reasons if reason]
        self.counts.answer(usage["prompt_tokens"], usage["completion_tokens"], cached, ended)


async def events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in reply.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


async def whole(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    yield json.loads(await reply.aread())


KINDS: Final[list[Callable[[Caller, list[int]], Coroutine[Any, Any, None]]]] = [
    lambda caller, prompt: caller.ask_grpc(prompt),
    lambda caller, prompt: caller.ask_grpc(prompt, n=3),
    lambda caller, prompt: caller.ask_grpc(prompt, stop=["e"]),
    lambda caller, prompt: caller.ask_grpc(prompt, temperature=-1),
    lambda caller, prompt: caller.ask_grpc(prompt, leaves=True),
    lambda caller, prompt: caller.ask_http(prompt),
    lambda caller, prompt: caller.ask_http(prompt, stream=True),
    lambda caller, prompt: caller.ask_http(prompt, stream=True, n=2, stop=["e"]),
    lambda caller, prompt: caller.ask_http(prompt, model="other"),
    lambda caller, prompt: caller.ask_http(prompt, leaves=True),
]


def check(page: MetricsPage, counts: Counts) -> None:
    """Fails unless the metrics page agrees with the clients' counts."""
    for reason in ("stop", "length"):
        assert (
            page.value("vllm:request_success_total", finished_reason=reason)
            == counts.reasons[reason]
        )
    assert page.value("vllm:request_success_total", finished_reason="abort") == counts.left
    assert page.value("vllm:request_success_total", finished_reason="error") == 0
    for name in ("vllm:prompt_tokens_total", "vllm:prefix_cache_queries_total"):
        assert page.value(name) == counts.prompt + counts.left_prompt
    assert (
        counts.cached
        <= page.value("vllm:prefix_cache_hits_total")
        <= counts.cached + counts.left_prompt
    )
    for_those_who_left = page.value("vllm:generation_tokens_total") - counts.generated
    assert counts.left <= for_those_who_left <= counts.left * LONG
    assert page.value("vllm:time_to_first_token_seconds_count") == counts.answered + counts.left
    assert page.value("vllm:e2e_request_latency_seconds_count") == counts.answered
    assert page.value("vllm:request_prompt_tokens_sum") == counts.prompt
    assert page.value("vllm:request_generation_tokens_sum") == counts.generated
    for (api, code), number in counts.errors.items():
        assert page.value("tandem_errors_total", api=api, code=code) == number
    assert page.value("tandem_errors_total") == counts.errors.total()
    refused = counts.errors["grpc", "RESOURCE_EXHAUSTED"] + counts.errors["http", "429"]
    assert page.value("tandem_refusals_total") == refused
    assert page.value("vllm:num_requests_running") == page.value("vllm:num_requests_waiting") == 0


def check_console(router: RouterRuntime, page: MetricsPage) -> None:
    """Fails unless the console's samples of the router add up to its counters."""
    router.console.sample()
    samples = [each.of_all() for _, each in router.console.log.samples.after(0)]
    assert sum(sample["tokens"] for sample in samples) == page.value("vllm:generation_tokens_total")
    assert sum(sample["prompt_tokens"] for sample in samples) == page.value(
        "vllm:prompt_tokens_total"
    )
    assert sum(sample["begun"] - sample["ended"] for sample in samples) == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_requests", [240, pytest.param(500, marks=pytest.mark.soak)])
async def test_after_many_requests_counters_equal_what_clients_counted(
    folder: Path, num_requests: int
) -> None:
    """Sends streams, whole responses, several choices, stop strings, wrong and refused requests.

    Some clients disconnect.
    """
    size = len(make_tokenizer())
    rank = lambda role: fake_rank(vocab_size=size)  # noqa: E731
    async with (
        fleet(1, 1, rank=rank, max_sequences=MAX_SEQUENCES) as running,
        AsyncExitStack() as scope,
    ):
        callers = []
        for _ in range(2):
            router = await start(folder, running, **{"router.max_queued_requests": MAX_QUEUED})
            scope.push_async_callback(router.stop, 0)
            grpc = await scope.enter_async_context(AsyncClient(router.grpc_address, max_retries=0))
            url = f"http://{router.http_address}"
            http = await scope.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=WAIT, limits=MANY)
            )
            callers.append(Caller(router, grpc, http))
        turns = asyncio.Semaphore(2 * MAX_QUEUED)

        async def ask(number: int) -> None:
            which = number % 12  # so that some are cached
            prompt = [(7 * i + 31 * which) % 300 + 3 for i in range(20 + 9 * which)]
            await KINDS[number // 2 % len(KINDS)](callers[number % 2], prompt)

        async def ask_in_turn(number: int) -> None:
            async with turns:
                await ask(number)

        num_in_turn = num_requests - NUM_AT_ONCE
        await asyncio.gather(*map(ask_in_turn, range(num_in_turn)))
        await asyncio.gather(*map(ask, range(num_in_turn, num_requests)))
        counts = callers[0].counts + callers[1].counts
        assert counts.answered + counts.left + counts.errors.total() == num_requests
        kinds = {
            ("grpc", "INVALID_ARGUMENT"),
            ("http", "404"),
            ("grpc", "RESOURCE_EXHAUSTED"),
            ("http", "429"),
        }
        assert counts.errors.keys() == kinds
        assert counts.reasons.keys() == {"stop", "length"}
        assert counts.cached > 0
        addresses = [caller.router.ops_address for caller in callers]
        page = await scrape_until(
            lambda page: page.value("vllm:num_requests_running") == 0, *addresses
        )
        check(page, counts)
        for caller in callers:
            page = await scrape(caller.router.ops_address)
            check(page, caller.counts)
            check_console(caller.router, page)


MANY: Final = httpx.Limits(max_connections=None, max_keepalive_connections=None)
