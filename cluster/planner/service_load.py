"""Measures what a running service adds to the steps of its workers.

On CPUs, the processes of Ray, the router and the client share the cores with the workers. A step
therefore takes longer in a service than in an engine alone.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle
from typing import Final, NamedTuple

import numpy as np
import psutil

from ...proto.errors import Unavailable
from ...proto.inference_pb2 import Timeline
from ...router.client.client import AsyncClient
from ..bench.load import send_load
from ..bench.metrics import RequestRecord
from ..bench.options import LoadOptions, ServerAddress, Workload
from ..bench.target import StreamCompletion, open_target
from ..bench.workload import BenchPrompt, Prompts
from ..sim.cost import StepCosts, StepWork, nonnegative_least_squares, prompt_steps
from .profile import RouterProfile, TransferProfile

_STREAMS: Final = (1, 8)  # concurrent streams that tell the host's time between two steps
_PROMPT_TOKENS: Final = 16  # of streams, and of the shortest prompt
_OUTPUT_TOKENS: Final = 32
# Longer than prompts that a decode worker computes itself (`router.local_prefill_tokens`).
_TRANSFER_TOKENS: Final = (128, 256, 1024)
_TRANSFERS: Final = 3  # of each length
_STREAMS_BESIDE: Final = 4  # streams beside which prompts are measured
# Shares of the time. The loads without a share of their own divide the rest.
_CONNECT_SHARE: Final = 0.03
_IDLE_SHARE: Final = 0.07
_SHORT_SHARE: Final = 0.1  # the kernel counts a process's CPU time in steps of 10 ms
# The speed of a machine changes within seconds, so each load is sent in parts, in turns with the
# others.
_PASSES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTimes:
    """Holds the measurements of one service."""

    background: float  # how much longer a step takes than in an engine alone
    prefill_contention: float  # how much longer still a prompt takes beside streams of others
    decode_contention: float  # how much longer a token of such a stream takes
    request_seconds: float  # of a request until its first token, besides its steps
    host_seconds: float  # between two steps of a served stream
    host_seconds_per_sequence: float
    router: RouterProfile
    transfer: TransferProfile | None  # None: without a prefill worker


class RouterLoad(NamedTuple):
    """Holds the requests of a load, none in a pause, and the CPU time of the router meanwhile."""

    sent: Sequence[RequestRecord]
    seconds: float  # that the load took
    cpu_seconds: float


class _Prompt(NamedTuple):
    """Holds a prompt that was sent alone."""

    length: int  # in tokens
    ttft: float  # in seconds


@dataclass(slots=True)
class _Loads:
    """Collects what the passes send."""

    streams: dict[int, list[RouterLoad]] = field(
        default_factory=lambda: {number: [] for number in _STREAMS}
    )
    """Of each number of concurrent streams."""

    prompts: list[_Prompt] = field(default_factory=list)
    prompts_beside: list[float] = field(default_factory=list)
    """Seconds of TTFT of prompts beside streams, each as long as a chunk."""

    streams_beside: list[RequestRecord] = field(default_factory=list)


class ServiceLoad:
    """Sends the loads of a measurement to one service."""

    def __init__(
        self,
        address: str,
        router: psutil.Process,
        costs: StepCosts,
        *,
        chunk_tokens: int,
        context_tokens: int,
        vocab_size: int,
    ) -> None:
        """`address`: HOST:PORT of the gRPC server of `router`; `costs`: of its workers' steps."""
        self._url = f"grpc://{address}"
        self._router = router
        self._costs = costs
        self._chunk_tokens = chunk_tokens
        self._longest = context_tokens // 2  # of a prompt
        self._chunk = min(chunk_tokens, self._longest)  # tokens of the longest timed prompt
        self._vocab_size = vocab_size
        self._seeds = count(1)  # of timed prompts, each other than all before

    async def measure(self, seconds: float, *, has_prefill: bool) -> ServiceTimes:
        """Measures for about `seconds`. Raises Unavailable if a request fails.

        `has_prefill`: a prefill worker computes the prompts.
        """
        rest = (1 - _CONNECT_SHARE - _IDLE_SHARE - _SHORT_SHARE) * seconds
        part = rest / _PASSES / (len(_STREAMS) + 1 + has_prefill)
        async with open_target(ServerAddress(url=self._url), ignore_eos=True) as target:
            # Not measured: the processes connect.
            await self._send(target, 1, 2, _CONNECT_SHARE * seconds)
            idle = await self._with_router(asyncio.sleep(_IDLE_SHARE * seconds, []))
            short = await self._with_router(
                self._send(target, max(_STREAMS), 1, _SHORT_SHARE * seconds)
            )
            found = _Loads()
            for _ in range(_PASSES):
                for number in _STREAMS:
                    load = self._send(target, number, _OUTPUT_TOKENS, part)
                    found.streams[number].append(await self._with_router(load))
                await self._prompts_alone(target, part, found)
                if has_prefill:
                    await self._prompts_beside(target, part, found)
        streams = [load for loads in found.streams.values() for load in loads]
        router = router_profile([idle, short, *streams])
        return self._fit(found, router, await self._transfers() if has_prefill else None)

    def _fit(
        self, found: _Loads, router: RouterProfile, transfer: TransferProfile | None
    ) -> ServiceTimes:
        """Returns the measurements of all passes."""
        request_seconds, background = fit_requests(
            [self._prompt_seconds(self._costs, each.length) for each in found.prompts],
            [each.ttft for each in found.prompts],
        )
        costs = self._costs.scaled(background)
        streams = [
            [record for load in loads for record in load.sent] for loads in found.streams.values()
        ]
        host, host_each = host_time(costs, streams)
        prefill_contention = decode_contention = 1.0
        if found.prompts_beside:
            ttft = statistics.median(found.prompts_beside)
            prompt = self._prompt_seconds(costs, self._chunk)
            prefill_contention = max((ttft - request_seconds) / prompt, 1.0)
            token = stream_seconds(costs.with_host(host, host_each), _STREAMS_BESIDE)
            decode_contention = max(median_tpot(found.streams_beside) / token, 1.0)
        return ServiceTimes(
            background=background,
            prefill_contention=prefill_contention,
            decode_contention=decode_contention,
            request_seconds=request_seconds,
            host_seconds=host,
            host_seconds_per_sequence=host_each,
            router=router,
            transfer=transfer,
        )

    async def _send(
        self, target: StreamCompletion, streams: int, max_tokens: int, seconds: float
    ) -> list[RequestRecord]:
        """Keeps streams of short prompts in progress."""
        options = LoadOptions(concurrency=streams, seconds=seconds)
        prompts = self._prompts(_PROMPT_TOKENS, max_tokens)
        return _completed(await send_load(target, prompts, options))

    async def _with_router(self, load: Awaitable[list[RequestRecord]]) -> RouterLoad:
        """Waits for a load, and measures the router meanwhile."""
        started, used = time.monotonic(), self._cpu_seconds()
        sent = await load
        return RouterLoad(sent, time.monotonic() - started, self._cpu_seconds() - used)

    async def _prompts_alone(self, target: StreamCompletion, seconds: float, found: _Loads) -> None:
        """Sends prompts of some lengths, one after another, at least one of each."""
        lengths = sorted({min(_PROMPT_TOKENS, self._chunk), self._chunk // 4, self._chunk})
        end = time.monotonic() + seconds
        for number, length in enumerate(cycle(lengths)):
            if number >= len(lengths) and time.monotonic() >= end:
                return
            ttft = await self._ttft(target, length)
            found.prompts.append(_Prompt(length, ttft))

    async def _prompts_beside(
        self, target: StreamCompletion, seconds: float, found: _Loads
    ) -> None:
        """Sends prompts, one after another and at least one, while streams decode.

        On CPUs the decode worker, the router and the client go before the prefill worker, which
        gets what they leave of the cores; and they move between the cores, which delays the decode
        worker.
        """
        streams = asyncio.create_task(self._send(target, _STREAMS_BESIDE, _OUTPUT_TOKENS, seconds))
        try:
            ttfts = [await self._ttft(target, self._chunk)]
            while not streams.done():
                ttfts.append(await self._ttft(target, self._chunk))
            found.prompts_beside += ttfts
            found.streams_beside += await streams
        finally:
            streams.cancel()

    async def _ttft(self, target: StreamCompletion, length: int) -> float:
        """Sends one prompt, which is no other one's prefix; returns its TTFT in seconds."""
        prompts = self._prompts(length, 1, count=1, seed=next(self._seeds))
        one = LoadOptions(concurrency=1, num_prompts=1)
        (record,) = _completed(await send_load(target, prompts, one))
        return record.ttft

    def _prompt_seconds(self, costs: StepCosts, length: int) -> float:
        """Returns the predicted seconds of a prompt's steps."""
        return sum(map(costs.seconds, prompt_steps(length, self._chunk_tokens)))

    async def _transfers(self) -> TransferProfile:
        """Measures KV transfers of some prompts between the workers."""
        found: list[Timeline] = []
        async with AsyncClient(self._url) as client:
            for length in _TRANSFERS * _TRANSFER_TOKENS:
                num_tokens = min(length, self._longest)
                (prompt,) = self._prompts(num_tokens, 4, count=1, seed=next(self._seeds))
                completion = await client.generate(
                    prompt.prompt, max_tokens=4, ignore_eos=True, temperature=0.0
                )
                found.append(completion.timeline)
        moved = [each for each in found if each.kv_transfer_bytes]
        if not moved:
            raise Unavailable("no KV cache moved between the workers of the measurement")
        rates = [each.kv_transfer_bytes / each.kv_transfer_active_seconds for each in moved]
        return TransferProfile(
            seconds=statistics.median(each.kv_transfer_seconds for each in moved),
            bytes_per_second=statistics.median(rates),
            transport=moved[0].kv_transport,
        )

    def _prompts(
        self, input_len: int, output_len: int, *, count: int | None = None, seed: int = 0
    ) -> Iterator[BenchPrompt]:
        """Returns random prompts, without end if `count` is None."""
        workload = Workload(input_len=input_len, output_len=output_len, vocab_size=self._vocab_size)
        return Prompts(workload).of_round(seed, LoadOptions(num_prompts=count, seconds=1.0))

    def _cpu_seconds(self) -> float:
        """Returns the CPU time of the router's process."""
        times = self._router.cpu_times()
        return times.user + times.system


def fit_requests(predicted: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    """Fits measured times to the first token to a fixed time and a factor of predicted times.

    Returns the fixed seconds, and the factor, which is at least 1.
    """
    times = np.array(measured)
    rows = np.stack([1 / times, np.array(predicted) / times], axis=1)  # [prompts, 2]
    fixed, factor = nonnegative_least_squares(rows, np.ones(len(times)))
    if factor >= 1:
        return float(fixed), float(factor)
    rest = [took - steps for took, steps in zip(measured, predicted, strict=True)]
    return max(statistics.median(rest), 0.0), 1.0


def host_time(costs: StepCosts, streams: Sequence[Sequence[RequestRecord]]) -> tuple[float, float]:
    """Returns the part of the streams' time per token that their steps do not explain.

    `streams`: the requests of each of `_STREAMS`. Returns seconds, and seconds for each sequence.
    """
    rest = [
        max(median_tpot(sent) - stream_seconds(costs, num_streams), 0.0)
        for num_streams, sent in zip(_STREAMS, streams, strict=True)
    ]
    each = max(rest[1] - rest[0], 0.0) / (_STREAMS[1] - _STREAMS[0])
    return max(rest[0] - each, 0.0), each


def stream_seconds(costs: StepCosts, num_streams: int) -> float:
    """Returns the mean seconds of a step that decodes streams of short prompts."""
    context = _PROMPT_TOKENS + _OUTPUT_TOKENS // 2
    return costs.seconds(StepWork(sequences=num_streams, context_tokens=num_streams * context))


def median_tpot(sent: Sequence[RequestRecord]) -> float:
    """Returns the median of the requests' seconds per token."""
    return statistics.median(each.tpot or 0.0 for each in sent)


def router_profile(loads: Sequence[RouterLoad]) -> RouterProfile:
    """Fits the CPU time of a pause and of some loads to times per request and per token.

    The fit has a third term, the share of a core that the router uses without requests, which the
    pause tells. Without this term, a token of a slow stream would seem to cost more.
    """
    rows = np.array(
        [
            [len(each.sent), sum(record.output_tokens for record in each.sent), each.seconds]
            for each in loads
        ],
        dtype=float,
    )  # [loads, 3]
    used = np.array([each.cpu_seconds for each in loads])  # [loads]
    request, token, _ = nonnegative_least_squares(rows, used)
    return RouterProfile(seconds_per_request=float(request), seconds_per_token=float(token))


def _completed(records: list[RequestRecord]) -> list[RequestRecord]:
    """Returns the same records. Raises Unavailable if a request has failed."""
    for each in records:
        if each.failure is not None:
            raise Unavailable(f"a request of the measurement failed: {each.failure.detail}")
    return records
