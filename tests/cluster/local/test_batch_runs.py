"""`tandem batch` as a command: in its own process and over a service, killed in the middle, and
begun again.
"""

import asyncio
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import test_utils, web

from tandem import LLM, SamplingParams
from tandem.cluster.local import batch_senders
from tandem.cluster.local.batch import BatchOutput, read_requests
from tandem.cluster.local.batch_senders import service_sender
from tandem.cluster.store.pooling import write_mode
from tandem.proto.errors import (
    InternalError,
    InvalidArgument,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from tandem.router.api.batches.lines import BatchRequest
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.client import ClientTls
from tandem.router.frontend.constraint import GrammarValidator
from tandem.router.frontend.served_model import ServedModel
from tandem.tests.certificates import make_certificate
from tandem.tests.router.fake_source import FakeTokenSource, byte_tokenizer
from tandem.tests.tiny import make_tiny_model
from tandem.tests.waits import WAIT

TANDEM = [sys.executable, "-c", "from tandem.cluster.cli.main import main; main()"]
NUM_REQUESTS = 24
REQUEST = BatchRequest(custom_id="a", method="POST", url="/v1/completions", body={"prompt": "x"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def request_lines(model: str) -> list[dict[str, Any]]:
    """Texts and chats of several lengths, and one that is refused."""
    common = {"model": model, "temperature": 0, "ignore_eos": True}
    lines = []
    for i in range(NUM_REQUESTS):
        body: dict[str, Any] = common | {"max_tokens": 40 + 10 * (i % 5)}
        if i % 2:
            url, body = "/v1/completions", body | {"prompt": f"dog {i}"}
        else:
            url, body = (
                "/v1/chat/completions",
                body | {"messages": [{"role": "user", "content": f"fox {i}"}]},
            )
        if i == 5:
            body["temperature"] = 9
        lines.append({"custom_id": f"r{i}", "method": "POST", "url": url, "body": body})
    return lines


def write_requests(path: Path, model: str) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in request_lines(model)))
    return path


def read_answers(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({each["custom_id"] for each in lines}) == len(lines)
    return {each["custom_id"]: each["response"] for each in lines}


def command(source: Path, output: Path, *args: str) -> list[str]:
    return [*TANDEM, "batch", str(source), str(output), *args]


def run(*arguments: str, timeout: float = 120) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(arguments, capture_output=True, text=True, timeout=timeout)


def test_a_batch_that_is_killed_is_completed_by_the_same_command(
    folder: Path, tmp_path: Path
) -> None:
    source, output = write_requests(tmp_path / "in.jsonl", "tiny"), tmp_path / "out.jsonl"
    here = command(
        source, output, "--model", str(folder), "--dtype", "float32", "--kv-cache-gb", "0.02"
    )
    here += ["--max-sequences", "2"]
    killed = subprocess.Popen(here, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not output.exists() or output.read_bytes().count(b"\n") < 4:
            assert time.monotonic() < deadline
            assert killed.poll() is None
            time.sleep(0.002)
        children = psutil.Process(killed.pid).children(recursive=True)
    finally:
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait(WAIT)
    assert psutil.wait_procs(children, timeout=WAIT)[1] == []
    left = output.read_bytes()
    num_left = left.count(b"\n")
    assert 4 <= num_left < NUM_REQUESTS
    done = run(*here)
    assert done.returncode == 0, done.stderr
    said = f"{NUM_REQUESTS} requests: {num_left} answered before, {NUM_REQUESTS - num_left} now"
    assert said in done.stderr
    assert output.read_bytes().startswith(left[: left.rfind(b"\n") + 1])
    answers = read_answers(output)
    assert set(answers) == {f"r{i}" for i in range(NUM_REQUESTS)}
    refused = answers.pop("r5")
    assert (refused["status_code"], refused["body"]["error"]["param"]) == (400, "temperature")
    assert {each["status_code"] for each in answers.values()} == {200}
    check_texts(folder, answers)


def check_texts(folder: Path, answers: dict[str, Any]) -> None:
    """The answers are those of `LLM` to the same requests."""
    lines = {
        each["custom_id"]: each["body"]
        for each in request_lines("tiny")
        if each["custom_id"] in answers
    }
    found = {custom_id: answers[custom_id]["body"]["choices"][0] for custom_id in lines}
    with LLM(str(folder), dtype="float32", kv_cache_gb=0.02) as llm:
        for key, complete in (("prompt", llm.generate), ("messages", llm.chat)):
            asked = {custom_id: body for custom_id, body in lines.items() if key in body}
            params = [
                SamplingParams(temperature=0, ignore_eos=True, max_tokens=body["max_tokens"])
                for body in asked.values()
            ]
            expected = [
                each.outputs[0].text
                for each in complete([body[key] for body in asked.values()], params)
            ]
            texts = [found[each].get("text") or found[each]["message"]["content"] for each in asked]
            assert texts == expected


def test_embeddings_have_the_models_own_pooling(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    write_mode(folder, "mean")
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    poolings: dict[str, dict[str, str]] = {
        "own": {},
        "mean": {"pooling_type": "MEAN"},
        "last": {"pooling_type": "LAST"},
    }
    lines = [
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"input": [[5, 6, 7]]} | pooling,
        }
        for custom_id, pooling in poolings.items()
    ]
    source.write_text("".join(json.dumps(each) + "\n" for each in lines))
    requests = read_requests(source)
    with (
        LLM(str(folder), dtype="float32", kv_cache_gb=0.02) as llm,
        BatchOutput(output, [each.custom_id for each in requests]) as answers,
    ):
        llm.answer_batch(requests, answers)
    own, mean, last = (
        read_answers(output)[each]["body"]["data"][0]["embedding"] for each in poolings
    )
    assert own == pytest.approx(mean, abs=1e-4)  # the rows of a step change the rounding
    assert own != pytest.approx(last, abs=1e-2)


async def fail(llm: LLM) -> None:
    llm._engine._worker.failed.set()


def test_a_busy_engine_is_asked_again_and_a_failed_one_ends_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many new grammars wait for each other's checks."""
    validate = GrammarValidator.validate
    num_tries = 0

    async def busy_once(*args: Any) -> str:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 1:
            raise Overloaded("waited for other checks")
        return await validate(*args)

    monkeypatch.setattr(GrammarValidator, "validate", busy_once)
    monkeypatch.setattr(batch_senders, "_seconds", lambda headers: 0.0)
    body = {"prompt": "dog", "max_tokens": 4, "structured_outputs": {"choice": ["a"]}}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(line))
    requests = read_requests(source)
    with LLM(str(folder), dtype="float32", kv_cache_gb=0.02) as llm:
        with BatchOutput(tmp_path / "out.jsonl", ["a"]) as answers:
            llm.answer_batch(requests, answers)
        llm._loop.run(fail(llm))
        with (
            BatchOutput(tmp_path / "later.jsonl", ["a"]) as answers,
            pytest.raises(InternalError, match="the engine has failed"),
        ):
            llm.answer_batch(requests, answers)
    assert num_tries == 2
    (answer,) = read_answers(tmp_path / "out.jsonl").values()
    assert (answer["status_code"], answer["body"]["choices"][0]["text"]) == (200, "a")
    assert not (tmp_path / "later.jsonl").read_bytes()


class HttpService:
    """A service with a fake model in a thread of its own."""

    def __init__(self, port: int = 0) -> None:
        self.url = ""
        self.source = FakeTokenSource()
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> "HttpService":
        self._thread.start()
        assert self._ready.wait(WAIT)
        return self

    def __exit__(self, *_error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT)
        self._loop.close()

    async def _serve(self) -> None:
        model = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=512)
        service = GenerationService([model], self.source)
        server = await ApiServers.start(service, http_address=f"127.0.0.1:{self._port}")
        await server.set_serving(True)
        self.url = f"http://{server.http_address}"
        self._ready.set()
        await self._stop.wait()
        await server.stop(0)


@pytest.fixture
def service() -> Iterator[HttpService]:
    with HttpService() as running:
        yield running


def test_a_batch_over_a_service(service: HttpService, tmp_path: Path) -> None:
    source, output = write_requests(tmp_path / "in.jsonl", "tiny"), tmp_path / "out.jsonl"
    done = run(*command(source, output, "--url", service.url, "--concurrency", "3"))
    assert done.returncode == 0, done.stderr
    assert (
        done.stderr == f"{NUM_REQUESTS} requests: 0 answered before, {NUM_REQUESTS} now, "
        "1 of these with an error\n"
    )
    answers = read_answers(output)
    assert set(answers) == {f"r{i}" for i in range(NUM_REQUESTS)}
    assert answers.pop("r5")["status_code"] == 400
    assert all(each["status_code"] == 200 and each["request_id"] for each in answers.values())
    assert answers["r0"]["body"]["object"] == "chat.completion"
    assert service.source.max_running <= 3


def test_a_service_that_comes_back_is_waited_for(tmp_path: Path) -> None:
    source, output = write_requests(tmp_path / "in.jsonl", "tiny"), tmp_path / "out.jsonl"
    with socket.create_server(("127.0.0.1", 0)) as closing:
        port = closing.getsockname()[1]
        waiting = subprocess.Popen(command(source, output, "--url", f"http://127.0.0.1:{port}"))
        try:
            closing.settimeout(60)
            closing.accept()[0].close()  # it has asked
        except BaseException:
            waiting.kill()
            raise
    with HttpService(port):
        assert waiting.wait(120) == 0
    assert len(read_answers(output)) == NUM_REQUESTS


def test_a_service_that_is_away_ends_the_command_in_one_line(tmp_path: Path) -> None:
    source, output = write_requests(tmp_path / "in.jsonl", "tiny"), tmp_path / "out.jsonl"
    done = run(*command(source, output, "--url", "http://127.0.0.1:9", "--patience", "0"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: no server answers at http://127.0.0.1:9; the answers so far are kept, and the same "
        "command continues from there"
        "\n"
    )


@asynccontextmanager
async def answering(
    status: int, body: bytes, certificate: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Yields the address of a server that gives every request this answer."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body, content_type="text/html")

    server = test_utils.TestServer(web.Application())
    server.app.router.add_route("*", "/{path:.*}", answer)
    await server.start_server(ssl=certificate)
    try:
        yield f"{'https' if certificate else 'http'}://127.0.0.1:{server.port}"
    finally:
        await server.close()


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (404, InvalidArgument, "--url: http://.* answers 404, not as an OpenAI API"),
        (405, InvalidArgument, "answers 405"),
        (501, InvalidArgument, "answers 501"),
        (200, InvalidArgument, "answers 200"),
        (401, Unauthenticated, "the service needs an API key"),
        (403, PermissionDenied, "the key may not send these requests"),
        (408, Unavailable, "the server answers 408 with a body that is not JSON"),
        (429, Unavailable, "answers 429"),
        (500, Unavailable, "answers 500"),
        (503, Unavailable, "answers 503"),
    ],
)
async def test_an_answer_of_another_server_is_only_waited_for_if_it_may_change(
    status: int, kind: type[Exception], words: str
) -> None:
    async with (
        answering(status, b"<html>\x80") as url,
        service_sender(url, "", ClientTls()) as send,
    ):
        with pytest.raises(kind, match=words):
            await send(REQUEST)


async def test_an_unknown_certificate_is_refused_at_once(tmp_path: Path) -> None:
    ca = make_certificate("ca")
    pem, key = tmp_path / "server.pem", tmp_path / "server.key"
    make_certificate("server", ca).write(pem, key)
    certificate = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate.load_cert_chain(pem, key)
    trusted = ClientTls(ca=ca.write(tmp_path / "ca.pem"))
    async with answering(200, b"{}", certificate) as url:
        async with service_sender(url, "", trusted) as send:
            assert (await send(REQUEST)).body == {}
        async with service_sender(url, "", ClientTls()) as send:
            with pytest.raises(InvalidArgument, match=r"--url: .*verify failed.*by --tls-ca"):
                await send(REQUEST)


def test_an_engine_or_a_service_must_be_named(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", "tiny")
    done = run(*command(source, tmp_path / "out.jsonl"))
    assert (done.returncode, done.stderr) == (2, "error: --model: give either --model or --url\n")
    assert not (tmp_path / "out.jsonl").exists()
