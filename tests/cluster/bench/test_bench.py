"""Tests `tandem bench` against servers of known behaviour."""

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.bench.load import run_bench
from tandem.cluster.bench.metrics import RequestFailed, Summary
from tandem.cluster.bench.options import BenchOptions, LoadOptions, ServerAddress, Workload
from tandem.cluster.bench.target import CompletionEvents
from tandem.cluster.bench.threads import ThreadTimes
from tandem.cluster.bench.workload import arrival_offsets
from tandem.proto.errors import Overloaded, Unavailable
from tandem.router.api.server.grpc_server import GrpcServer
from tandem.router.api.service import GenerationService
from tandem.router.frontend.served_model import ServedModel
from tandem.tests.cluster.cli.test_bad_commands import run as run_here
from tandem.tests.router.fake_source import FakeTokenSource, byte_tokenizer
from tandem.tests.waits import WAIT

TANDEM = [sys.executable, "-c", "from tandem.cluster.cli.main import main; main()"]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(kw_only=True)
class OpenAiServer:
    """Streams completions, each event after its delay; records the times (perf_counter)."""

    delays: list[float] = field(default_factory=lambda: [0.0, 0.0])  # seconds before each event
    tokens_per_event: int = 1
    # Of the requests in turn, see `_answer`.
    endings: list[str] = field(default_factory=lambda: ["done"])
    gate: Callable[[], Awaitable[object]] | None = None  # awaited before the first event
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    sends: list[list[float]] = field(default_factory=list)  # of each request
    running: int = 0
    max_running: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET /v1/models "):
                    self._write_plain(writer, 200, {"data": [{"id": "the-model"}]})
                    continue
                if head.startswith(b"GET "):  # `--url` may be a status page, so the command asks
                    self._write_plain(writer, 404, {})
                    continue
                length = next(
                    int(line[15:])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-len")
                )
                body = json.loads(await reader.readexactly(length))
                self.arrivals.append(perf_counter())
                self.running += 1
                self.max_running = max(self.running, self.max_running)
                await self._answer(body, writer)
                self.running -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        ending = self.endings[len(self.bodies) % len(self.endings)]
        self.bodies.append(body)
        sends: list[float] = []
        self.sends.append(sends)
        if ending.isdigit():
            self._write_plain(writer, int(ending), {"error": {"message": "as\nasked"}})
            return
        writer.write(HEAD)
        if self.gate:
            await self.gate()
        for delay in self.delays if ending != "empty" else []:
            await asyncio.sleep(delay)
            self._event(writer, {"choices": [{"index": 0, "text": "x", "finish_reason": None}]})
            sends.append(perf_counter())
        if ending == "stall":
            await asyncio.Event().wait()
        if ending == "error":
            self._event(writer, {"error": {"message": "the worker is gone", "code": 503}})
        if ending == "reset":
            writer.transport.abort()
            raise ConnectionError
        if ending in ("done", "empty"):
            tokens = self.tokens_per_event * len(sends)
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
            self._event(writer, {"choices": [], "usage": usage})
            self._data(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        self._data(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    def _data(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _write_plain(self, writer: asyncio.StreamWriter, status: int, body: object) -> None:
        text = json.dumps(body).encode()
        head = (
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
            f"content-length: {len(text)}\r\n\r\n"
        )
        writer.write(head.encode() + text)


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[OpenAiServer]]]:
    handlers: set[asyncio.Task[None]] = set()
    listeners = []

    async def start_one(**how: Any) -> OpenAiServer:
        server = OpenAiServer(**how)

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            handlers.add(asyncio.create_task(server.handle(reader, writer)))

        listener = await asyncio.start_server(connected, "127.0.0.1", 0)
        listeners.append(listener)
        server.url = "http://{}:{}".format(*listener.sockets[0].getsockname())
        return server

    yield start_one
    for listener in listeners:
        listener.close()
    for handler in handlers:
        handler.cancel()
    outcomes = await asyncio.gather(*handlers, return_exceptions=True)
    assert [each for each in outcomes if isinstance(each, Exception)] == []


Start = Callable[..., Awaitable[OpenAiServer]]


def options(url: str, **load: Any) -> BenchOptions:
    """Returns a small closed loop of one caller by default."""
    load = load if "rate" in load else {"concurrency": 1} | load
    workload = Workload(input_len=16, output_len=10, vocab_size=200)
    return BenchOptions(
        addresses=[ServerAddress(url=url)],
        workload=workload,
        load=LoadOptions(**({"num_prompts": 4, "warmup": 0, "timeout": 20.0} | load)),
    )


async def measure(asked: BenchOptions) -> Summary:
    measured = await run_bench(asked, lambda _address, _number, _summary: None)
    assert len(measured) == 1
    return measured[0][0]


async def run_cli(*args: str) -> tuple[int, str, str]:
    """Returns exit code, stdout and stderr of `tandem bench`."""
    process = await asyncio.create_subprocess_exec(
        *TANDEM, "bench", *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(WAIT):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_it_finds_the_delays_of_a_server(start: Start) -> None:
    server = await start(delays=[0.15, *[0.03] * 9], tokens_per_event=2)
    code, out, err = await run_cli(
        *(
            "--url",
            server.url,
            "--num-prompts",
            "6",
            "--concurrency",
            "2",
            "--warmup",
            "2",
            "--input-len",
            "16",
        ),
        *("--output-len", "20", "--slo", "ttft=10000,tpot=10000", "--json", "-"),
    )
    assert (code, err) == (0, "")
    found = json.loads(out)
    (summary,) = found["servers"][0]["rounds"]
    assert summary["num_completed"] == summary["num_requests"] == 6
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (6 * 16, 6 * 20)
    assert server.max_running == 2
    wanted = {
        "model": "the-model",
        "max_tokens": 20,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0.0,
    }
    assert server.bodies[-1].items() >= wanted.items()

    # What the server did, not what it had meant to do: a busy machine delays it too.
    arrivals, sends = server.arrivals[2:], server.sends[2:]
    ttft = [1000 * (each[0] - arrived) for each, arrived in zip(sends, arrivals, strict=True)]
    gaps = [1000 * (after - before) for each in sends for before, after in itertools.pairwise(each)]
    e2e = [1000 * (each[-1] - arrived) for each, arrived in zip(sends, arrivals, strict=True)]
    figures = summary["figures"]
    assert figures["mean_ttft_ms"] == pytest.approx(sum(ttft) / 6, rel=0.1)
    assert figures["mean_itl_ms"] == pytest.approx(sum(gaps) / len(gaps), rel=0.1)
    assert figures["p50_itl_ms"] == pytest.approx(sorted(gaps)[len(gaps) // 2], rel=0.1)
    assert figures["mean_e2e_ms"] == pytest.approx(sum(e2e) / 6, rel=0.1)
    assert figures["mean_tpot_ms"] == pytest.approx(sum(gaps) / 6 / 19, rel=0.1)
    duration = max(each[-1] for each in sends) - arrivals[0]
    assert summary["duration"] == pytest.approx(duration, rel=0.1)
    assert figures["output_throughput"] == pytest.approx(120 / duration, rel=0.1)
    assert figures["total_throughput"] == pytest.approx(216 / duration, rel=0.1)
    assert figures["goodput"] == pytest.approx(figures["request_throughput"])
    assert figures["mean_ttft_ms"] >= 149
    assert figures["mean_itl_ms"] >= 29


async def test_every_failure_is_counted_by_its_kind(start: Start) -> None:
    server = await start(endings=["done", "500", "cut", "error", "reset", "empty", "429", "500"])
    asked = options(server.url, num_prompts=8)
    summary = await measure(
        BenchOptions(
            addresses=asked.addresses, workload=asked.workload, load=asked.load, slo={"e2e": 1e6}
        )
    )
    assert (summary.num_requests, summary.num_completed) == (8, 1)
    assert {each.kind: each.count for each in summary.failures} == {
        "HTTP 500": 2,
        "HTTP 429": 1,
        "stream cut": 2,
        "error event": 1,
        "no tokens": 1,
    }
    assert summary.failures[0].kind in ("HTTP 500", "stream cut")
    examples = {each.kind: each.example for each in summary.failures}
    assert examples["error event"] == "the worker is gone"
    assert examples["HTTP 500"] == "as asked"  # in one line
    assert summary.figures["slo_attainment"] == 1 / 8


async def test_a_stalled_answer_ends_at_its_timeout(start: Start) -> None:
    server = await start(endings=["stall", "done"])
    summary = await measure(options(server.url, num_prompts=2, timeout=0.3))
    assert [(each.kind, each.count) for each in summary.failures] == [("timeout", 1)]
    assert summary.num_completed == 1
    assert 0.29 < summary.duration < WAIT


async def test_nobody_there_is_a_failure_of_each_request() -> None:
    asked = options("http://127.0.0.1:1")
    asked = BenchOptions(
        addresses=[ServerAddress(url="http://127.0.0.1:1", model="m")],
        workload=asked.workload,
        load=asked.load,
    )
    summary = await measure(asked)
    assert [(each.kind, each.count) for each in summary.failures] == [("cannot connect", 4)]


async def test_an_open_loop_does_not_wait_for_answers(start: Start) -> None:
    server = await start(gate=asyncio.Barrier(12).wait)  # nobody is answered before all have asked
    summary = await measure(options(server.url, num_prompts=12, rate=200.0))
    assert (summary.num_completed, server.max_running) == (12, 12)


async def test_an_open_loop_sends_at_the_planned_times(start: Start) -> None:
    server = await start()
    summary = await measure(options(server.url, num_prompts=None, seconds=0.5, rate=40.0))
    planned = list(itertools.takewhile(lambda offset: offset <= 0.5, arrival_offsets(40.0, 0)))
    assert summary.num_requests == summary.num_completed == len(planned)
    assert server.arrivals[-1] - server.arrivals[0] == pytest.approx(
        planned[-1] - planned[0], abs=0.1
    )
    assert summary.figures["late_ms"] < 100


TRACE = """\
{"timestamp": 0, "input_length": 40, "output_length": 2, "hash_ids": [5, 6, 7], "block_size": 16}
{"timestamp": 300, "input_length": 33, "output_length": 2, "hash_ids": [5, 6, 8], "block_size": 16}
{"timestamp": 100, "input_length": 16, "output_length": 1, "hash_ids": [6], "block_size": 16}
"""


async def test_a_trace_is_replayed(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    server = await start()
    code, out, err = await run_cli(
        *("--url", server.url, "--trace", str(path), "--length-scale", "1/2", "--speed", "0.5"),
        *("--warmup", "0", "--slo", "ttft=60000", "--json", "-"),
    )
    assert (code, err) == (
        0,
        "trace: 3 requests in 1 s, mean 15 tokens in and 1 out, 43% of the blocks repeat an "
        "earlier one\n",
    )
    assert [len(body["prompt"]) for body in server.bodies] == [20, 8, 17]
    assert [body["max_tokens"] for body in server.bodies] == [1, 1, 1]
    first, second, third = (body["prompt"] for body in server.bodies)
    assert first[:16] == third[:16]
    assert first[8:16] == second
    assert first[16] != third[16]
    offsets = [at - server.arrivals[0] for at in server.arrivals]
    assert offsets == pytest.approx([0.0, 0.2, 0.6], abs=0.1)
    found = json.loads(out)
    scale = {"lengths": "1/2", "speed": 0.5, "spread": False}
    assert found["workload"]["trace_scale"] == scale
    figures = found["servers"][0]["rounds"][0]["figures"]
    assert figures["slo_attainment"] == 1
    assert figures["late_sends"] == 0


async def test_a_trace_without_hashes_over_grpc(
    grpc_service: tuple[str, FakeTokenSource], tmp_path: Path
) -> None:
    url, source = grpc_service
    path = tmp_path / "trace.csv"
    rows = ["2023-11-16 18:17:03,30,3", "2023-11-16 18:17:03.1,30,4", "2023-11-16 18:17:33,9,5"]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    asked = options(url, concurrency=None, num_prompts=None, seconds=20.0)
    workload = Workload(kind="trace", trace=path, vocab_size=200)
    lines: list[str] = []
    ((summary,),) = await run_bench(
        replace(asked, workload=workload), lambda _address, _number, _summary: None, lines.append
    )
    assert summary.num_requests == summary.num_completed == 2  # the third is after `seconds`
    assert lines[0].endswith("without hashes of blocks, so no two prompts share a prefix")
    prompts = [list(request.submit.token_ids) for request in source.requests]
    assert [len(prompt) for prompt in prompts] == [30, 30]
    assert prompts[0][:4] != prompts[1][:4]
    assert [request.submit.max_tokens for request in source.requests] == [3, 4]


async def test_a_closed_loop_keeps_to_its_concurrency_and_its_seconds(start: Start) -> None:
    server = await start(delays=[0.05])
    summary = await measure(options(server.url, concurrency=3, num_prompts=None, seconds=2.0))
    assert server.max_running == 3
    assert summary.num_requests == summary.num_completed >= 6
    assert server.arrivals[-1] - server.arrivals[0] < WAIT  # there is no other end


async def test_warm_up_requests_are_not_measured_and_must_succeed(start: Start) -> None:
    server = await start()
    summary = await measure(options(server.url, warmup=3))
    assert (summary.num_requests, len(server.bodies)) == (4, 7)
    server.endings = ["500"]
    with pytest.raises(Unavailable, match=r"answers no warm-up request: HTTP 500 \(as asked\)"):
        await measure(options(server.url, warmup=3))


async def test_a_peer_takes_turns_and_the_ratio_is_found(start: Start, tmp_path: Path) -> None:
    slow, fast = await start(delays=[0.12, 0.06]), await start(delays=[0.04, 0.02])
    path = tmp_path / "out.json"
    code, out, err = await run_cli(
        *("--url", slow.url, "--peer", f"{fast.url}=other", "--rounds", "3", "--num-prompts", "2"),
        *("--concurrency", "1", "--warmup", "0", "--json", str(path)),
    )
    assert code == 0, err
    assert [line.split()[2].rstrip(":") for line in err.splitlines()] == [slow.url, fast.url] * 3
    prompts = [tuple(body["prompt"]) for body in (*slow.bodies, *fast.bodies)]
    assert len(set(prompts)) == len(prompts) == 12  # no prefix cache helps
    assert {len(prompt) for prompt in prompts} == {128}
    assert {body["model"] for body in fast.bodies} == {"other"}
    order = sorted([(at, "slow") for at in slow.arrivals] + [(at, "fast") for at in fast.arrivals])
    assert [name for _, name in order] == ["slow", "slow", "fast", "fast"] * 3
    ratios = json.loads(path.read_text())["ratios"]
    assert ratios["mean_ttft_ms"] == pytest.approx(3, rel=0.35)
    assert ratios["request_throughput"] == pytest.approx(1 / 3, rel=0.35)
    row = next(line for line in out.splitlines() if "mean TTFT ms" in line)
    assert f"{ratios['mean_ttft_ms']:.3f}" in row


async def test_the_tables_show_figures_and_failures(start: Start) -> None:
    server = await start(endings=["done", "500"])
    code, out, err = await run_cli(
        *(
            "--url",
            server.url,
            "--num-prompts",
            "4",
            "--concurrency",
            "1",
            "--warmup",
            "0",
            "--slo",
            "ttft=5000",
        )
    )
    assert (code, err) == (0, "")
    for words in (
        "2 of 4 requests completed",
        "good requests/s (ttft <= 5000 ms)",
        "TTFT",
        "p99.9",
        "HTTP 500",
    ):
        assert words in out
    server.endings = ["500"]
    code, out, err = await run_cli(
        "--url", server.url, "--num-prompts", "2", "--concurrency", "1", "--warmup", "0"
    )
    assert (code, err) == (1, f"error: {server.url} completed no request: HTTP 500\n")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--url", "127.0.0.1:80", "--rate", "1"], "--url: must be grpc(s)://HOST:PORT"),
        (["--url", "http://h:1"], "either --concurrency or --rate"),
        (
            ["--url", "http://h:1", "--rate", "1", "--concurrency", "1"],
            "either --concurrency or --rate",
        ),
        (["--url", "http://h:1", "--rate", "nan"], "--rate: must be from"),
        (["--url", "http://h:1", "--concurrency", "0"], "--concurrency: must be from 1"),
        (["--url", "http://h:1", "--rate", "1", "--workload", "odd"], "--workload: must be one of"),
        (
            ["--url", "http://h:1", "--rate", "1", "--workload", "file"],
            "--workload file and --file must be given together",
        ),
        (
            ["--url", "http://h:1", "--rate", "1", "--workload", "shared-prefix"],
            "--prefix-len: must be from 1",
        ),
        (["--url", "http://h:1", "--rate", "1", "--slo", "x=1"], "--slo: must name one of ttft"),
        (
            ["--url", "http://h:1", "--rate", "1", "--workload", "file", "--file", "/no/file"],
            "--file: /no/file: ",
        ),
        (
            ["--url", "http://h:1", "--rate", "1", "--json", "/no/folder/x"],
            "--json: /no/folder/x cannot be written",
        ),
    ],
)
def test_bad_input_ends_in_one_line_and_code_2(
    args: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_here(["bench", *args], monkeypatch) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.fixture
async def grpc_service() -> AsyncIterator[tuple[str, FakeTokenSource]]:
    """Serves tokens from a fake source over gRPC."""
    source = FakeTokenSource()
    model = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=512)
    server = GrpcServer(GenerationService([model], source), reflection=False)
    address = await server.start("127.0.0.1:0")
    await server.set_serving(True)
    yield f"grpc://{address}", source
    await server.stop(0)
    assert source.running == 0


async def test_over_grpc(grpc_service: tuple[str, FakeTokenSource]) -> None:
    url, source = grpc_service
    source.tokens_per_delta = 4
    asked = options(url, num_prompts=6, concurrency=3)
    ((summary,),) = await run_bench(asked, lambda _address, _number, _summary: None)
    assert (summary.num_completed, summary.failures) == (6, ())
    assert (summary.prompt_tokens, summary.output_tokens) == (6 * 16, 6 * 10)
    # 3 chunks each.
    assert summary.figures["mean_tpot_ms"] == pytest.approx(summary.figures["mean_itl_ms"] * 2 / 9)
    assert source.max_running <= 3
    assert {request.submit.ignore_eos for request in source.requests} == {True}


async def test_failures_over_grpc(grpc_service: tuple[str, FakeTokenSource]) -> None:
    url, source = grpc_service
    source.error, source.error_after = Overloaded("the queue is full"), 3
    summary = await measure(options(url))
    assert [(each.kind, each.count) for each in summary.failures] == [("RESOURCE_EXHAUSTED", 4)]
    assert "the queue is full" in summary.failures[0].example
    source.error, source.stall_after = None, 2
    summary = await measure(options(url, num_prompts=2, timeout=0.3))
    assert [(each.kind, each.count) for each in summary.failures] == [("timeout", 2)]
    await asyncio.wait_for(source.wait_running(0), WAIT)


EVENTS = (
    b": ping\r\n\r\nevent: message\r\n"
    b'data: {"choices": [{"text": ""}]}\r\n\r\ndata:{"choices": [{"text": "\xc3\xa9"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": null}}\n\n'
    b"data: [DONE]\n\n"
)


@given(st.sets(st.integers(1, len(EVENTS) - 1)))
def test_events_are_read_in_any_pieces(cuts: set[int]) -> None:
    times: list[float] = []
    events = CompletionEvents(times)
    edges = [0, *sorted(cuts), len(EVENTS)]
    for begin, end in itertools.pairwise(edges):
        events.feed(EVENTS[begin:end], float(end))
    firsts = [EVENTS.index(b"\r\n\r\ndata:{"), EVENTS.index(b'\n\ndata: {"choices": [], ')]
    ends = [EVENTS.index(b"\n", at) + 1 for at in firsts]  # of the lines of the two choices
    assert times == [min(edge for edge in edges if edge >= end) for end in ends]
    assert events.token_counts(prompt_tokens=9) == (3, 2)


def test_what_is_no_event_is_refused() -> None:
    for line in (b"data: {nonsense\n", b"data: [1]\n"):
        with pytest.raises(RequestFailed) as caught:
            CompletionEvents([]).feed(line, 0.0)
        assert caught.value.kind == "bad answer"


def test_the_times_of_a_process_are_those_of_its_threads() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "sum(range(5_000_000)); input()"], stdin=subprocess.PIPE
    ) as child:
        before = ThreadTimes(0.0, {}, {})
        while not any(
            process == child.pid and used > 0 for (process, _), used in before.seconds.items()
        ):
            before = ThreadTimes.take()
        child.communicate(b"\n", timeout=60)
    assert before.names[child.pid].startswith("python")
    assert os.getpid() not in before.names
    assert child.pid not in ThreadTimes.take().names
