"""Simulates routers with real admission and registries in front of a pool of known speed.

Time is simulated. Prefill workers compute their prompts in chunks, first come, first served, and
report as real ones do. Decode workers run up to their maximum number of sequences. Nothing here
reads the wall clock.
"""

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tandem.proto import worker_pb2
from tandem.proto.errors import Overloaded
from tandem.proto.worker_pb2 import ROLE_DECODE, ROLE_PREFILL
from tandem.router.request import TokenRequest
from tandem.router.scheduling.admission import Admission
from tandem.router.scheduling.capacity import required_capacity
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.tests.router.pools import info, request

NUM_BLOCKS: Final = 65_536
DELAY_SECONDS: Final = 0.005  # how old a worker's report, or a submit to it, is when it comes

NEWEST_WEIGHT: Final = 0.1  # of a step in the moving means that a worker reports
LEAST_AHEAD: Final = 512  # prompt tokens that a worker gets, however slow it is


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Describes the workers and their requests."""

    prefill: int = 1
    decode: int = 1
    step_seconds: float = 0.01  # of a step, fixed
    token_seconds: float = 4e-4  # of each prompt token of a step, besides
    chunk_tokens: int = 512
    max_sequences: int = 64
    decode_seconds: float = 0.3  # of a sequence
    prompt_tokens: tuple[int, int] = (128, 128)
    max_tokens: int = 32

    @property
    def seconds_of_token(self) -> float:
        """Returns the seconds of a prompt token in full chunks."""
        return self.step_seconds / self.chunk_tokens + self.token_seconds

    @property
    def capacity(self) -> float:
        """Returns the maximum number of requests/s that the workers finish.

        A sequence holds its place at a decode worker from the time its prompt is sent. The minimum
        look-ahead of the prefill workers counts as well.
        """
        by_prompts = self.prefill / (self.seconds_of_token * sum(self.prompt_tokens) / 2)
        seconds = self.decode_seconds + self.seconds_of_token * (
            LEAST_AHEAD + self.prompt_tokens[1]
        )
        return min(by_prompts, self.decode * self.max_sequences / seconds)


@dataclass(eq=False, kw_only=True)
class SimulatedPrompt:
    """Holds a prompt at a prefill worker."""

    uncomputed: int
    first_token: "asyncio.Future[None]"
    begun: float | None = None


@dataclass(eq=False)
class SimulatedWorker:
    """Reports its load to all routers with a delay."""

    worker_id: str
    pool: Pool
    registries: Sequence[WorkerRegistry]
    version: int = 1

    def report(self, **fields: float) -> None:
        self.version += 1
        load = worker_pb2.WorkerLoad(
            free_blocks=NUM_BLOCKS,
            total_blocks=NUM_BLOCKS,
            version=self.version,
            **fields,  # type: ignore[arg-type]
        )
        message = worker_pb2.SessionResponse(load=load)
        for registry in self.registries:
            asyncio.get_running_loop().call_later(
                DELAY_SECONDS, registry.report, self.worker_id, 1, message
            )


@dataclass(eq=False)
class PrefillWorker(SimulatedWorker):
    """Computes prompts in chunks, several in one if they are short."""

    prompts: deque[SimulatedPrompt] = field(default_factory=deque)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    mean_tokens: float = 0.0  # of a step
    mean_seconds: float = 0.0

    async def compute(self) -> None:
        """Computes prompts until it is cancelled."""
        while True:
            self.arrived.clear()
            if self.prompts:
                await self._step()
            else:
                await self.arrived.wait()

    def add(self, prompt: SimulatedPrompt) -> None:
        self.prompts.append(prompt)
        self.arrived.set()
        self.report_prompts()

    async def _step(self) -> None:
        now, budget = asyncio.get_running_loop().time(), self.pool.chunk_tokens
        parts: list[tuple[SimulatedPrompt, int]] = []
        for prompt in self.prompts:
            if budget:
                prompt.begun = now if prompt.begun is None else prompt.begun
                parts.append((prompt, min(prompt.uncomputed, budget)))
                budget -= parts[-1][1]
        num_tokens = self.pool.chunk_tokens - budget
        seconds = self.pool.step_seconds + num_tokens * self.pool.token_seconds
        await asyncio.sleep(seconds)
        weight = NEWEST_WEIGHT if self.mean_tokens else 1.0
        self.mean_tokens += weight * (num_tokens - self.mean_tokens)
        self.mean_seconds += weight * (seconds - self.mean_seconds)
        for prompt, count in parts:
            prompt.uncomputed -= count
            if not prompt.uncomputed:
                self.prompts.remove(prompt)
                prompt.first_token.set_result(None)
        self.report_prompts()

    def report_prompts(self) -> None:
        self.report(
            num_waiting=len(self.prompts),
            waiting_tokens=sum(prompt.uncomputed for prompt in self.prompts),
            prompt_token_seconds=self.mean_seconds / self.mean_tokens if self.mean_tokens else 0.0,
        )


class DecodeWorker(SimulatedWorker):
    """Runs sequences for a fixed time each, first come, first served."""

    def __init__(self, worker_id: str, pool: Pool, registries: Sequence[WorkerRegistry]) -> None:
        super().__init__(worker_id, pool, registries)
        self._slots = asyncio.Semaphore(pool.max_sequences)
        self._num_running = 0

    async def decode(self, seconds: float) -> None:
        async with self._slots:
            self._num_running += 1
            self.report(num_running=self._num_running)
            await asyncio.sleep(seconds)
            self._num_running -= 1
            self.report(num_running=self._num_running)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """Records the outcome of one request."""

    at: float
    ttft: float | None = None  # None: it was refused
    retry_after: float = 0.0


class SimulatedService:
    """Holds several routers, each with a queue, and the workers of one pool.

    Used in a SimulatedTimeLoop.
    """

    def __init__(
        self, pool: Pool, *, max_queue_seconds: float, routers: int = 1, seed: int = 0
    ) -> None:
        clock = asyncio.get_running_loop().time
        self.pool = pool
        self.sent: list[SentRequest] = []
        self._rng = random.Random(seed)
        self._registries = [
            WorkerRegistry(rng=random.Random(seed + n), clock=clock) for n in range(routers)
        ]
        self._prefill = {
            f"p{n}": PrefillWorker(f"p{n}", pool, self._registries) for n in range(pool.prefill)
        }
        self._decode = {
            f"d{n}": DecodeWorker(f"d{n}", pool, self._registries) for n in range(pool.decode)
        }
        infos = [info(name, ROLE_PREFILL, num_blocks=NUM_BLOCKS) for name in self._prefill]
        infos += [
            info(name, ROLE_DECODE, num_blocks=NUM_BLOCKS, max_sequences=pool.max_sequences)
            for name in self._decode
        ]
        for registry in self._registries:
            registry.update(infos)
        self._routers = [
            (registry, Admission(registry, max_queue_seconds=max_queue_seconds, clock=clock))
            for registry in self._registries
        ]
        self._computing = [
            asyncio.create_task(worker.compute()) for worker in self._prefill.values()
        ]

    async def load(self, *phases: tuple[float, float]) -> None:
        """Sends requests in phases of (seconds, requests/s), and waits for the end of all."""
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[None]] = []
        at = loop.time()
        for seconds, rate in phases:
            end = at + seconds
            while (at := at + self._rng.expovariate(rate)) < end:
                await asyncio.sleep(at - loop.time())
                num_tokens = self._rng.randint(*self.pool.prompt_tokens)
                asked = request(
                    [len(tasks)] * num_tokens, str(len(tasks)), max_tokens=self.pool.max_tokens
                )
                tasks.append(asyncio.create_task(self._send(asked)))
            at = end
        await asyncio.gather(*tasks)
        for task in self._computing:
            task.cancel()
        for registry, admission in self._routers:
            assert admission.num_active == len(admission.queue) == 0
            assert registry.capacity._reserved == {}

    def goodput(self, begin: float, end: float, slo: float) -> float:
        """Returns the rate of requests from `begin` to `end` with a first token within `slo` s."""
        return sum(self._are_good(begin, end, slo)) / (end - begin)

    def share(self, begin: float, end: float, slo: float) -> float:
        """Returns the share of these requests among all requests that were sent in this time."""
        good = self._are_good(begin, end, slo)
        return sum(good) / len(good)

    def _are_good(self, begin: float, end: float, slo: float) -> list[bool]:
        return [
            one.ttft is not None and one.ttft <= slo for one in self.sent if begin <= one.at < end
        ]

    async def _send(self, asked: TokenRequest) -> None:
        loop = asyncio.get_running_loop()
        registry, admission = self._rng.choice(self._routers)
        at = loop.time()
        try:
            admission.check_early(required_capacity(asked), asked.tenant)
            async with admission.permit(asked):
                await self._serve(asked, registry, at)
        except Overloaded as error:
            self.sent.append(SentRequest(at=at, retry_after=error.retry_after))

    async def _serve(self, asked: TokenRequest, registry: WorkerRegistry, at: float) -> None:
        loop = asyncio.get_running_loop()
        placement = registry.place(asked)
        assert placement is not None
        assert placement.prefill is not None
        registry.dispatched(placement.prefill, asked, len(asked.submit.token_ids))
        registry.dispatched(placement.decode, asked, 0)
        worker = self._prefill[placement.prefill]
        prompt = SimulatedPrompt(
            uncomputed=len(asked.submit.token_ids), first_token=loop.create_future()
        )
        await asyncio.sleep(DELAY_SECONDS)
        worker.add(prompt)
        await prompt.first_token
        await asyncio.sleep(DELAY_SECONDS)
        self.sent.append(SentRequest(at=at, ttft=loop.time() - at))
        registry.prefilled(placement.prefill, asked.request_id)
        registry.record_prefill(
            placement.prefill, len(asked.submit.token_ids), loop.time() - (prompt.begun or 0.0)
        )
        registry.ended(placement.prefill, asked.request_id)
        await self._decode[placement.decode].decode(
            self.pool.decode_seconds * self._rng.uniform(0.5, 1.5)
        )
        registry.ended(placement.decode, asked.request_id)
