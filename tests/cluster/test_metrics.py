"""Tests metrics and probes of a router.

Servers, sessions and KV transfers are real; workers have no model.
"""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tandem.cluster.bench.load import run_bench
from tandem.cluster.bench.options import BenchOptions, LoadOptions, ServerAddress, Workload
from tandem.cluster.config import load_config
from tandem.cluster.serve.runtime import RouterRuntime
from tandem.cluster.serve.telemetry.monitor import RouterMonitor
from tandem.proto import inference_pb2
from tandem.proto.errors import InvalidArgument, NotFound
from tandem.router.api.browsers import BrowserRules
from tandem.router.client.client import AsyncClient
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.request import TokenRequest
from tandem.router.scheduling.admission import Admission
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.router.telemetry.prometheus import PrometheusMetrics
from tandem.tests.fleet import Fleet, fake_rank, fleet
from tandem.tests.matrix.proxy import Proxy
from tandem.tests.metrics_page import MetricsPage, scrape, scrape_until
from tandem.tests.peers import IDENTITY
from tandem.tests.router import pools
from tandem.tests.router_runtime import start_router
from tandem.tests.tiny_tokenizer import make_router_folder, make_tokenizer
from tandem.tests.waits import NEVER, SLOW_STEP, WAIT
from tandem.tests.workers.engine.fake import expected_tokens
from tandem.workers.engine import scheduler
from tandem.workers.engine.config import SpeculativeConfig
from tandem.workers.engine.ngram import Drafter
from tandem.workers.tp.rank import Rank

HOST: Final = "127.0.0.1"
TOKENS: Final = 24


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_router_folder(tmp_path)


async def start(folder: Path, running: Fleet | None, **overrides: object) -> RouterRuntime:
    """Starts a router with all workers, if there are any."""
    ports = dict.fromkeys(("router.grpc_port", "router.http_port", "router.ops_port"), 0)
    config = load_config(None, {"model": "m", "router.local_prefill_tokens": 0} | ports | overrides)
    router = await start_router(config, folder)
    await router.serve_ops(config.router.ops_port)
    if running is not None:
        await router.update([worker.info() for worker in running.workers])
    return router


@asynccontextmanager
async def routers(
    folder: Path,
    count: int = 1,
    speculative: SpeculativeConfig | None = None,
    step_seconds: float = 0.0,
    **overrides: object,
) -> AsyncIterator[list[RouterRuntime]]:
    """Starts routers that share a prefill and a decode worker."""
    size = len(make_tokenizer())

    def rank(role: str) -> Rank:
        return fake_rank(vocab_size=size, step_seconds=step_seconds)

    workers = fleet(1, 1, rank=rank, speculative=speculative)
    async with workers as running, AsyncExitStack() as scope:
        found = []
        for _ in range(count):
            found.append(await start(folder, running, **overrides))
            scope.push_async_callback(found[-1].stop, 0)
        yield found


@dataclass
class Counted:
    """Adds up the responses to clients."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    kv_bytes: int = 0
    reasons: Counter[str] | None = None

    def add(self, prompt: int, generated: int, cached: int, *reasons: str) -> None:
        self.requests += 1
        self.prompt += prompt
        self.generated += generated
        self.cached += cached
        self.reasons = (self.reasons or Counter()) + Counter(reasons)


def prompt(number: int) -> list[int]:
    return [(7 * i + 31 * number) % 300 + 3 for i in range(20 + 17 * number)]


async def ask_grpc(address: str, counted: Counted, number: int, **options: Any) -> None:
    async with AsyncClient(address, max_retries=0) as client:
        answer = await client.generate(
            prompt(number), max_tokens=TOKENS, temperature=0, timeout=WAIT, **options
        )
    usage = answer.usage
    counted.kv_bytes += answer.timeline.kv_transfer_bytes
    reasons = [completion.finish_reason for completion in answer.choices]
    counted.add(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, *reasons)


async def ask_http(address: str, counted: Counted, number: int, **fields: Any) -> None:
    body = {"model": "m", "prompt": prompt(number), "max_tokens": TOKENS, "temperature": 0} | fields
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT) as http:
        answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    reasons = [choice["finish_reason"] for choice in answer["choices"]]
    counted.add(usage["prompt_tokens"], usage["completion_tokens"], cached, *reasons)


def check(page: MetricsPage, counted: Counted) -> None:
    """Fails unless the metrics page agrees with the clients' counts."""
    assert counted.reasons is not None
    assert page.value("vllm:request_success_total") == counted.reasons.total()
    for reason, number in counted.reasons.items():
        assert page.value("vllm:request_success_total", finished_reason=reason) == number
    assert page.value("vllm:prompt_tokens_total") == counted.prompt
    assert page.value("vllm:prefix_cache_queries_total") == counted.prompt
    assert page.value("vllm:prefix_cache_hits_total") == counted.cached
    assert page.value("vllm:prompt_tokens_cached_total") == counted.cached
    assert page.value("vllm:generation_tokens_total") == counted.generated
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_prompt_tokens",
    ):
        assert page.value(f"vllm:{name}_count") == counted.requests
    assert page.value("vllm:request_prompt_tokens_sum") == counted.prompt
    assert page.value("vllm:request_generation_tokens_sum") == counted.generated
    assert (
        page.value("vllm:inter_token_latency_seconds_count")
        == counted.generated - counted.reasons.total()
    )
    assert (
        page.value("vllm:iteration_tokens_total_sum") >= counted.generated - counted.reasons.total()
    )
    assert page.value("tandem_kv_transfer_seconds_count") == counted.requests
    assert page.value("vllm:num_requests_running") == page.value("vllm:num_requests_waiting") == 0


async def test_counters_equal_what_clients_count(folder: Path) -> None:
    """Requests go over both APIs of two routers, whose metrics add up."""
    limits: dict[str, Any] = {"slo.default.ttft_ms": 1e6, "slo.fast.e2e_ms": 0.001}
    async with routers(folder, 2, **limits) as both:
        counted, one, two = Counted(), both[0], both[1]
        page = await scrape(one.ops_address)
        assert page.value("tandem_slo_requests_total", slo_class="fast", outcome="refused") == 0
        for _ in range(2):  # the second time from the prefix cache
            asked = [
                ask_grpc(each.grpc_address, counted, number) for each in both for number in range(4)
            ]
            await asyncio.gather(*asked, ask_grpc(one.grpc_address, counted, 5, n=3, best_of=3))
        ops = one.ops_address, two.ops_address
        page = await scrape_until(lambda page: page.value("vllm:num_requests_running") == 0, *ops)
        check(page, counted)
        assert page.value("tandem_kv_transfer_bytes_total", transport="grpc") == counted.kv_bytes
        await asyncio.gather(
            *(
                ask_http(each.http_address, counted, number, n=2, service_tier="fast")
                for each in both
                for number in (6, 7)
            )
        )
        page = await scrape_until(lambda page: page.value("vllm:num_requests_running") == 0, *ops)
        check(page, counted)
        for slo_class, outcome, count in (("default", "met", 18), ("fast", "e2e", 4)):
            labels = {"slo_class": slo_class, "outcome": outcome}
            assert page.value("tandem_slo_requests_total", slo_class=slo_class) == count
            assert page.value("tandem_slo_requests_total", **labels) == count
            assert page.value("tandem_slo_tokens_total", **labels) > 0
        apart = [await scrape(address) for address in ops]
        assert all(page.value("vllm:generation_tokens_total") > 0 for page in apart)


async def test_errors_and_clients_that_leave_are_counted(folder: Path) -> None:
    async with (
        routers(folder, step_seconds=SLOW_STEP) as (router,),
        AsyncClient(router.grpc_address, max_retries=0) as client,
    ):
        for _ in range(3):
            with pytest.raises(InvalidArgument):
                await client.generate(prompt(1), temperature=-1)
        with pytest.raises(NotFound):
            await client.generate(prompt(1), model="other")
        async with httpx.AsyncClient(
            base_url=f"http://{router.http_address}", timeout=WAIT
        ) as http:
            statuses = [
                (await http.post("/v1/completions", json=each)).status_code for each in BAD_BODIES
            ]
            assert statuses == [400, 400, 404]
            async with http.stream("POST", "/v1/completions", json=LONG) as answer:
                await anext(answer.aiter_lines())
        async with client.stream(prompt(2), max_tokens=1_500, ignore_eos=True) as stream:
            await anext(stream)
        page = await scrape_until(
            lambda page: page.value("vllm:request_success_total", finished_reason="abort") == 2,
            router.ops_address,
        )
        assert page.value("tandem_errors_total", api="grpc", code="INVALID_ARGUMENT") == 3
        assert page.value("tandem_errors_total", api="grpc", code="NOT_FOUND") == 1
        assert page.value("tandem_errors_total", api="http", code="400") == 2
        assert page.value("tandem_errors_total", api="http", code="404") == 1
        assert page.value("tandem_errors_total") == 7
        assert page.value("vllm:request_success_total") == 2
        assert page.value("vllm:e2e_request_latency_seconds_count") == 0
        assert page.value("vllm:prompt_tokens_total") == 2 * len(prompt(2))


LONG: Final = {
    "model": "m",
    "prompt": prompt(2),
    "max_tokens": 1_500,
    "stream": True,
    "ignore_eos": True,
}
BAD_BODIES: Final[list[dict[str, Any]]] = [
    {"model": "m", "prompt": "x", "temperature": -1},
    {"model": "m", "prompt": "x", "unknown": 1},
    {"model": "other", "prompt": "x"},
]


async def test_tokens_are_seen_while_a_stream_runs(folder: Path) -> None:
    async with (
        routers(folder, step_seconds=SLOW_STEP) as (router,),
        AsyncClient(router.grpc_address) as client,
        client.stream(prompt(2), max_tokens=1_000, ignore_eos=True) as stream,
    ):
        await anext(stream)
        page = await scrape(router.ops_address)
        assert page.value("vllm:num_requests_running") == 1
        assert page.value("vllm:prompt_tokens_total") == len(prompt(2))
        assert 1 <= page.value("vllm:generation_tokens_total") < 1_000
        assert page.value("vllm:request_success_total") == 0
        used = await scrape_until(
            lambda page: page.value("vllm:kv_cache_usage_perc") > 0, router.ops_address
        )
        assert used.value("vllm:kv_cache_usage_perc") < 1
        assert used.value("tandem_workers", pool="decode", state="ready") == 1
        assert used.value("tandem_workers", pool="prefill", state="draining") == 0


async def test_a_worker_whose_session_has_broken_is_not_ready(folder: Path) -> None:
    async with fleet(1, 2) as running:
        router = await start(folder, running)
        async with asyncio.timeout(WAIT):  # a first message would end the loss
            while not all(each.heard for each in router._dispatcher._clients.values()):
                await asyncio.sleep(0.01)
        lost = running.workers[-1].info()
        router._registry.session_lost(lost.worker_id, lost.epoch)
        page = await scrape(router.ops_address)
        counts = [
            page.value("tandem_workers", pool="decode", state=state)
            for state in ("ready", "draining", "lost")
        ]
        assert counts == [1, 0, 1]
        await router.stop(0)


async def test_lines_of_batches_that_wait_are_counted_apart() -> None:
    registry = WorkerRegistry()
    pools.fill(registry, prefill=1, decode=1, max_sequences=1, num_blocks=256)
    admission = Admission(registry)
    dispatcher = Dispatcher(registry, admission, identity=IDENTITY)
    monitor = RouterMonitor(
        "m",
        counts=True,
        browsers=BrowserRules(),
        spans=None,
        trace_file=None,
        slo_classes=(),
        logs_requests=False,
    )
    monitor.watch(admission, dispatcher, registry)

    async def hold(asked: TokenRequest) -> None:
        async with admission.permit(asked):
            pass

    async with admission.permit(pools.request([1] * 9, "runs")):
        asked = [pools.request([2] * 9, name) for name in ("one", "two", "line")]
        asked[-1] = replace(asked[-1], is_batch=True)
        waiting = [asyncio.create_task(hold(each)) for each in asked]
        async with asyncio.timeout(WAIT):
            while len(admission.queue) < 3:
                await asyncio.sleep(0)
        assert isinstance(monitor.metrics, PrometheusMetrics)
        page = MetricsPage(monitor.metrics.render().decode())
    assert page.value("vllm:num_requests_waiting") == 3
    for reason, count in (("capacity", 2), ("batch", 1), ("deferred", 0)):
        assert page.value("vllm:num_requests_waiting_by_reason", reason=reason) == count
    await asyncio.gather(*waiting)
    await dispatcher.close()


async def test_nothing_is_counted_where_metrics_are_off(folder: Path) -> None:
    async with routers(folder, metrics=False) as (router,):
        await ask_grpc(router.grpc_address, Counted(), 1)
        async with httpx.AsyncClient(base_url=f"http://{router.ops_address}", timeout=WAIT) as http:
            assert (await http.get("/metrics")).status_code == 404
            assert (await http.get("/ready")).status_code == 200


async def recorded(path: Path, count: int) -> list[dict[str, Any]]:
    """Waits until the file of requests has so many lines."""
    async with asyncio.timeout(WAIT):
        while len(lines := read_lines(path)) < count:
            await asyncio.sleep(0.01)
    return lines


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_recorded_trace_is_replayed(folder: Path, tmp_path: Path) -> None:
    """The replay, which is recorded too, has the same lengths and the same shared blocks."""
    path = tmp_path / "trace.jsonl"
    options: dict[str, Any] = {"router.trace_file": str(path), "router.trace_block_tokens": 16}
    async with routers(folder, **options) as (router,):
        for number, length in enumerate((40, 40, 33, 70)):  # 0 to 2 share two blocks
            ids = [*prompt(2)[:32], *prompt(3)[number : number + length - 32]]
            await complete(router, ids if number < 3 else prompt(9)[:length])
        lines = await recorded(path, 4)
        replay = BenchOptions(
            addresses=[ServerAddress(url=f"http://{router.http_address}")],
            workload=Workload(kind="trace", trace=path, vocab_size=256),
            load=LoadOptions(num_prompts=None, warmup=0),
        )
        ((summary,),) = await run_bench(replay, lambda _address, _number, _summary: None)
        assert (summary.num_completed, summary.failures) == (4, ())
        again = (await recorded(path, 8))[4:]
    for name in ("input_length", "output_length"):
        assert sorted(each[name] for each in again) == sorted(each[name] for each in lines)
    assert shared_blocks(again) == shared_blocks(lines) == Counter({3: 2, 1: 8})
    assert set(ids_of(lines)).isdisjoint(ids_of(again))


async def complete(router: RouterRuntime, ids: list[int]) -> None:
    async with AsyncClient(router.grpc_address) as client:
        await client.generate(ids, max_tokens=len(ids) // 8, ignore_eos=True, timeout=WAIT)


def ids_of(lines: Sequence[dict[str, Any]]) -> list[int]:
    return [block for line in lines for block in line["hash_ids"]]


def shared_blocks(lines: Sequence[dict[str, Any]]) -> Counter[int]:
    """Returns how many blocks occur in so many prompts."""
    return Counter(Counter(ids_of(lines)).values())


async def state_of(router: RouterRuntime, path: str) -> tuple[int, str]:
    async with httpx.AsyncClient(base_url=f"http://{router.ops_address}", timeout=WAIT) as http:
        answer = await http.get(path)
    return answer.status_code, answer.json()["status"]


async def health_of(router: RouterRuntime, service: str) -> int:
    async with grpc.aio.insecure_channel(router.grpc_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT)
    return int(answer.status)


async def test_a_router_is_ready_while_it_can_answer(folder: Path) -> None:
    serving = health_pb2.HealthCheckResponse
    async with fleet(1, 1) as running:
        router = await start(folder, None)
        assert await state_of(router, "/live") == (200, "ok")
        assert await state_of(router, "/ready") == (503, "starting")
        assert await health_of(router, "tandem.v1.Inference") == serving.NOT_SERVING
        # A prefill worker does both while there is no decode worker.
        await router.update(
            [worker.info() for worker in running.workers if worker.role == "prefill"]
        )
        assert await state_of(router, "/ready") == (200, "ok")
        await router.update([])
        assert await state_of(router, "/ready") == (503, "no worker")
        await router.update([worker.info() for worker in running.workers])
        assert await state_of(router, "/ready") == (200, "ok")
        assert (
            await health_of(router, "tandem.v1.Inference")
            == await health_of(router, "")
            == serving.SERVING
        )
        router.fail()
        assert [await state_of(router, path) for path in ("/live", "/ready")] == [
            (503, "failed")
        ] * 2
        await router.stop(0)


async def test_a_router_that_reaches_no_worker_is_not_ready_until_it_reaches_one(
    folder: Path,
) -> None:
    """The directory lists lost workers for seconds, and longer while it cannot be reached."""
    link = Proxy()
    async with fleet(0, 1, rank=lambda role: fake_rank(vocab_size=300)) as running:
        (decode,) = running.workers
        await link.start()
        link.target = decode.address
        decode._server.answer_to(link.address)
        infos = [decode.info()]
        infos[0].address = link.address
        router = await start(folder, None)
        keeping = asyncio.create_task(router.keep_ready())
        await router.update(infos)
        async with AsyncClient(router.grpc_address) as client:
            await client.generate(prompt(1), max_tokens=2, timeout=WAIT)
        assert await state_of(router, "/ready") == (200, "ok")
        link.target = "127.0.0.1:1"
        link.cut()
        await wait_until_ready(router, (503, "no worker"))
        assert (await scrape(router.ops_address)).value("tandem_lost_workers_total") == 1
        link.target = decode.address
        await wait_until_ready(router, (200, "ok"))
        assert (await scrape(router.ops_address)).value("tandem_lost_workers_total") == 1
        keeping.cancel()
        await router.stop(0)
        await link.close()


async def wait_until_ready(router: RouterRuntime, wanted: tuple[int, str]) -> None:
    """Waits until /ready answers."""
    async with asyncio.timeout(WAIT):
        while await state_of(router, "/ready") != wanted:
            await asyncio.sleep(0.02)


async def test_a_router_that_drains_is_not_ready_and_lets_its_streams_end(folder: Path) -> None:
    async with fleet(
        1, 1, rank=lambda role: fake_rank(vocab_size=300, step_seconds=SLOW_STEP)
    ) as running:
        router = await start(folder, running)
        async with AsyncClient(router.grpc_address) as client:
            async with client.stream(prompt(2), max_tokens=1_000, ignore_eos=True) as stream:
                await anext(stream)
                stopping = asyncio.create_task(router.stop(NEVER))
                await asyncio.sleep(0)
                assert await state_of(router, "/ready") == (503, "draining")
                assert await state_of(router, "/live") == (200, "ok")
                await router.update([worker.info() for worker in running.workers])  # it stays so
                assert await state_of(router, "/ready") == (503, "draining")
                assert (await scrape(router.ops_address)).value("tandem_ready") == 0
                running.hurry()
                received = 1 + sum([len(delta.token_ids) async for delta in stream])
            assert received >= 1_000
        async with asyncio.timeout(WAIT):
            await stopping


class Foreseeing(Drafter):
    """Drafts two right tokens and a wrong one."""

    def draft(self, tokens: Sequence[int], room: int) -> tuple[int, ...]:
        size = len(make_tokenizer())
        right = expected_tokens(tokens, 3, size)
        return (*right[:2], (right[2] + 1) % size)[: max(room, 0)]


async def test_guessed_tokens_are_counted_and_come_as_one_delta(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "Drafter", Foreseeing)
    counted = Counted()
    async with routers(folder, speculative=SpeculativeConfig()) as (router,):
        await ask_http(router.http_address, counted, 1, logprobs=2, seed=0)
        async with AsyncClient(router.grpc_address, max_retries=0) as client:
            answer = await client.generate(prompt(2), max_tokens=TOKENS, seed=0, timeout=WAIT)
            stream = client.stream(prompt(2), max_tokens=TOKENS, seed=0, timeout=WAIT)
            deltas = [delta async for delta in stream]
        sizes = [len(delta.token_ids) for delta in deltas]
        assert [token for delta in deltas for token in delta.token_ids] == list(
            answer.choices[0].token_ids
        )
        assert "".join(delta.text for delta in deltas) == answer.choices[0].text
        assert len(sizes) <= 9, "of 24 tokens"
        page = await scrape_until(
            lambda page: page.value("vllm:num_requests_running") == 0, router.ops_address
        )
        assert page.value("vllm:generation_tokens_total") == 3 * TOKENS
        assert page.value("vllm:spec_decode_num_drafts_total") == 3 * 8
        assert page.value("vllm:spec_decode_num_draft_tokens_total") == 3 * (7 * 3 + 1)
        assert page.value("vllm:spec_decode_num_accepted_tokens_total") == 3 * (7 * 2 + 1)
        assert page.value("vllm:inter_token_latency_seconds_count") == 3 * (TOKENS - 1)


async def test_the_ops_port_is_the_configured_one_or_another(folder: Path) -> None:
    """A port in use prevents no router from serving; a router that replaces one has its port."""
    async with AsyncExitStack() as scope:
        first = await start(folder, None)
        scope.push_async_callback(first.stop, 0)
        taken = int(first.ops_address.rpartition(":")[2])
        other = await start(folder, None, **{"router.ops_port": taken})
        scope.push_async_callback(other.stop, 0)
        assert other.ops_address != first.ops_address
        config = load_config(None, {"model": "m", "router.grpc_port": 0, "router.http_port": 0})
        for port in (taken, 0):
            next_one = await start_router(config, folder)
            scope.push_async_callback(next_one.stop, 0)
            await next_one.serve_ops(port, application=f"m.{port}", replaced=[first.ops_address])
            assert next_one.ops_address == first.ops_address


async def test_a_router_that_drains_leaves_its_ops_port_to_its_successor(folder: Path) -> None:
    async with fleet(
        1, 1, rank=lambda role: fake_rank(vocab_size=300, step_seconds=SLOW_STEP)
    ) as running:
        first = await start(folder, running)
        config = load_config(None, {"model": "m", "router.grpc_port": 0, "router.http_port": 0})
        second = await start_router(config, folder)
        await second.serve_ops(0, application="m.2", replaced=[first.ops_address])
        assert second.ops_address == first.ops_address
        await second.update([worker.info() for worker in running.workers])
        async with (
            AsyncClient(first.grpc_address) as client,
            client.stream(prompt(2), max_tokens=1_000, ignore_eos=True) as stream,
        ):
            await anext(stream)
            stopping = asyncio.create_task(first.stop(NEVER))
            await asyncio.sleep(0)
            assert {await state_of(first, "/ready") for _ in range(20)} == {(200, "ok")}
            running.hurry()
            async for _ in stream:
                pass
        async with asyncio.timeout(WAIT):
            await stopping
        await second.stop(0)


async def test_a_page_in_a_browser_does_not_read_the_metrics(folder: Path) -> None:
    """A page tries DNS rebinding; the ops port also changes nothing."""
    async with AsyncExitStack() as scope:
        router = await start(folder, None)
        scope.push_async_callback(router.stop, 0)
        http = await scope.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{router.ops_address}", timeout=WAIT)
        )
        assert (
            await http.get("/metrics", headers={"host": "rebound.example.com"})
        ).status_code == 403
        assert (await http.post("/metrics")).status_code == 405
        assert (await http.get("/v1/models")).status_code == 404


class Collector(ThreadingHTTPServer):
    """Receives spans over OTLP, on a free port."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        super().__init__((HOST, 0), CollectorHandler)


class CollectorHandler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        exported = ExportTraceServiceRequest.FromString(body)
        for resource in exported.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join(WAIT)


async def test_a_clients_trace_is_in_the_exported_spans(folder: Path, collector: Collector) -> None:
    """Holds for both APIs; the times equal those in the client's timeline."""
    traces = [f"{number:032x}" for number in (11, 12)]
    headers = [("traceparent", f"00-{trace}-00000000000000aa-01") for trace in traces]
    endpoint = f"http://{HOST}:{collector.server_port}/v1/traces"
    overrides: dict[str, Any] = {"tracing.endpoint": endpoint}
    async with routers(folder, **overrides) as (router,):
        async with httpx.AsyncClient(
            base_url=f"http://{router.http_address}", timeout=WAIT
        ) as http:
            body: dict[str, Any] = {"model": "m", "prompt": prompt(1), "max_tokens": TOKENS}
            (await http.post("/v1/completions", json=body, headers=headers[:1])).raise_for_status()
        request = inference_pb2.GenerateRequest(
            prompt={"token_ids": {"ids": prompt(1)}}, stopping={"max_tokens": 9}
        )
        async with grpc.aio.insecure_channel(router.grpc_address) as channel:
            generate: Any = channel.unary_stream("/tandem.v1.Inference/Generate")
            call = generate(request.SerializeToString(), metadata=headers[1:])
            assert [message async for message in call]
            trailing = dict(await call.trailing_metadata())
        timeline = inference_pb2.Timeline.FromString(trailing["tandem-timeline-bin"])
    roots = [span for span in collector.spans if span.name == "text_completion m"]
    assert [span.trace_id.hex() for span in roots] == traces
    assert {span.parent_span_id.hex() for span in roots} == {"00000000000000aa"}
    children = {
        span.name: span for span in collector.spans if span.parent_span_id == roots[1].span_id
    }
    for name in ("queue", "prefill", "kv_transfer", "decode"):
        seconds = (children[name].end_time_unix_nano - children[name].start_time_unix_nano) / 1e9
        assert seconds == pytest.approx(getattr(timeline, f"{name}_seconds"), abs=1e-6)
    total = (roots[1].end_time_unix_nano - roots[1].start_time_unix_nano) / 1e9
    assert total == pytest.approx(timeline.end_to_end_seconds, abs=1e-5)
