"""Measures what a running service adds to the steps of its workers.

On CPUs, the processes of Ray, the router and the client share the cores with the workers. A step
therefore takes longer in a service than in an engine alone.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
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
_LEAST_PROMPTS: Final = 6  # prompts that tell the latency of a request
_STREAMS_BESIDE: Final = 4  # streams beside which prompts are measured
_PARTS: Final = 5 + len(_STREAMS)  # loads, and a pause, that share the time


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
        self._vocab_size = vocab_size

    async def measure(self, seconds: float, *, has_prefill: bool) -> ServiceTimes:
        """Measures for about `seconds`. Raises Unavailable if a request fails.

        `has_prefill`: a prefill worker computes the prompts.
        """
        part = seconds / _PARTS
        async with open_target(ServerAddress(url=self._url), ignore_eos=True) as target:
            await self._send(target, 1, 2, part)  # not measured: the processes connect
            idle = await self._with_router(asyncio.sleep(part, []))
            short = await self._with_router(self._send(target, max(_STREAMS), 1, part))
            streams = [
                await self._with_router(self._send(target, each, _OUTPUT_TOKENS, part))
                for each in _STREAMS
            ]
            request_seconds, background = await self._prompts_alone(target, part)
            costs = self._costs.scaled(background)
            host, host_each = host_time(costs, [each.sent for each in streams])
            prefill_contention = decode_contention = 1.0
            if has_prefill:
                alone = stream_seconds(costs.with_host(host, host_each), _STREAMS_BESIDE)
                prompts, beside = await self._prompts_beside(target, part, request_seconds, costs)
                prefill_contention = max(prompts, 1.0)
                decode_contention = max(median_tpot(beside) / alone, 1.0)
        return ServiceTimes(
            background=background,
            prefill_contention=prefill_contention,
            decode_contention=decode_contention,
            request_seconds=request_seconds,
            host_seconds=host,
            host_seconds_per_sequence=host_each,
            router=router_profile([idle, short, *streams]),
            transfer=await self._transfers() if has_prefill else None,
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

    async def _prompts_alone(self, target: StreamCompletion, seconds: float) -> tuple[float, float]:
        """Sends prompts of some lengths, one after another, at least two of each."""
        lengths = sorted(
            {
                min(each, self._longest)
                for each in (_PROMPT_TOKENS, self._chunk_tokens // 4, self._chunk_tokens)
            }
        )
        end = time.monotonic() + seconds
        predicted: list[float] = []
        measured: list[float] = []
        for number, length in enumerate(cycle(lengths)):
            if number >= _LEAST_PROMPTS and time.monotonic() >= end:
                break
            predicted.append(self._prompt_seconds(self._costs, length))
            measured.append(await self._ttft(target, length, 1 + number))
        return fit_requests(predicted, measured)

    async def _prompts_beside(
        self, target: StreamCompletion, seconds: float, request_seconds: float, costs: StepCosts
    ) -> tuple[float, list[RequestRecord]]:
        """Returns how much longer prompts take while streams decode, and these streams.

        `costs`: of steps without streams. On CPUs the decode worker, the router and the client go
        before the prefill worker, which gets what they leave of the cores; and they move between
        the cores, which delays the decode worker.
        """
        length = min(self._chunk_tokens, self._longest)
        alone = self._prompt_seconds(costs, length)
        found: list[float] = []
        streams = asyncio.create_task(self._send(target, _STREAMS_BESIDE, _OUTPUT_TOKENS, seconds))
        try:
            while not (found and streams.done()):
                ttft = await self._ttft(target, length, 1_000 + len(found))
                found.append((ttft - request_seconds) / alone)
            return statistics.median(found), await streams
        finally:
            streams.cancel()

    async def _ttft(self, target: StreamCompletion, length: int, seed: int) -> float:
        """Sends one prompt, which is random by its seed; returns its TTFT in seconds."""
        prompts = self._prompts(length, 1, count=1, seed=seed)
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
                (prompt,) = self._prompts(num_tokens, 4, count=1, seed=len(found))
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
