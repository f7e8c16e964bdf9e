"""Tests files and batches with the official `openai` package, and a runner beside the server."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tandem.cluster.serve.storage.runner import BatchRunner
from tandem.proto.errors import Overloaded
from tandem.router.api.batches import batches as batches_module
from tandem.router.api.batches import files as files_module
from tandem.router.api.server.http_server import HttpServer
from tandem.router.api.service import GenerationService
from tandem.router.auth.authenticator import Authenticator
from tandem.router.auth.keys import ApiKey, hash_key
from tandem.router.frontend.served_model import ServedModel
from tandem.tests.router.fake_source import EOS_ID, FakeTokenSource
from tandem.tests.waits import WAIT

KEYS = {"one": "a", "two": "b"}  # tenants, by key


def request(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> str:
    prompt = {"messages": [{"role": "user", "content": custom_id}]}
    if url == "/v1/responses":
        prompt = {"input": custom_id}  # type: ignore[dict-item]
    elif url != "/v1/chat/completions":
        prompt = {"input" if "embed" in url else "prompt": custom_id}  # type: ignore[dict-item]
    whole = {"model": "tiny"} | prompt | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": whole})


@pytest.fixture
async def service(model: ServedModel) -> AsyncIterator[GenerationService]:
    made = GenerationService([model], FakeTokenSource())
    yield made
    made.storage.check_integrity()  # type: ignore[attr-defined]


@pytest.fixture
async def authenticator() -> Authenticator:
    return Authenticator(
        ApiKey(name=f"{tenant}-key", sha256=hash_key(key).hex(), tenant=tenant)
        for key, tenant in KEYS.items()
    )


@pytest.fixture
async def address(service: GenerationService, authenticator: Authenticator) -> AsyncIterator[str]:
    server = HttpServer(service, authenticator=authenticator)
    address = await server.start("127.0.0.1:0")
    server.set_serving(True)
    runner = BatchRunner(service, authenticator, "router-1", 4)
    running = asyncio.create_task(runner.run())
    yield address
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(0)


@pytest.fixture
async def clients(address: str) -> AsyncIterator[Sequence[openai.AsyncOpenAI]]:
    made = [
        openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key=key, max_retries=0)
        for key in KEYS
    ]
    yield made
    for client in made:
        await client.close()


@pytest.fixture
def client(clients: Sequence[openai.AsyncOpenAI]) -> openai.AsyncOpenAI:
    return clients[0]


async def upload(client: openai.AsyncOpenAI, lines: Sequence[str]) -> str:
    data = "\n".join(lines).encode()
    return (await client.files.create(file=("in.jsonl", data), purpose="batch")).id


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(WAIT):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.01)


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    return [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]


async def test_a_batch(client: openai.AsyncOpenAI, tmp_path: Path) -> None:
    """As in OpenAI's guide: upload a file, create a batch, wait for it, read its output."""
    path = tmp_path / "batchinput.jsonl"
    wrong = request("wrong", temperature=9)
    long = request("long", messages=[{"role": "user", "content": "x" * 600}])
    path.write_text("\n".join([*(request(f"r{i}", max_tokens=5) for i in range(9)), wrong, long]))
    with path.open("rb") as file:
        batch_input_file = await client.files.create(file=file, purpose="batch")
    assert (batch_input_file.filename, batch_input_file.purpose) == ("batchinput.jsonl", "batch")
    assert batch_input_file.bytes == path.stat().st_size
    made = await client.batches.create(
        input_file_id=batch_input_file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"description": "nightly eval job"},
    )
    batch = await ended(client, made.id)
    assert (batch.status, batch.metadata) == ("completed", {"description": "nightly eval job"})
    assert batch.request_counts.to_dict() == {"total": 11, "completed": 9, "failed": 2}
    answers = await lines_of(client, batch.output_file_id)
    assert [line["custom_id"] for line in answers] == [f"r{i}" for i in range(9)]
    for line in answers:
        assert (line["error"], line["response"]["status_code"]) == (None, 200)
        assert line["response"]["body"]["object"] == "chat.completion"
    error, exceeded = await lines_of(client, batch.error_file_id)
    assert (error["custom_id"], exceeded["custom_id"]) == ("wrong", "long")
    assert error["response"]["status_code"] == exceeded["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["param"] == "temperature"
    assert exceeded["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert [each.id async for each in client.batches.list(limit=1)] == [batch.id]
    files = [each.id async for each in client.files.list()]
    assert files == [batch.error_file_id, batch.output_file_id, batch_input_file.id]
    assert (await client.files.delete(batch_input_file.id)).deleted is True
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(batch_input_file.id)


@pytest.mark.parametrize("url", ["/v1/completions", "/v1/embeddings", "/v1/responses"])
async def test_the_other_endpoints(
    client: openai.AsyncOpenAI, service: GenerationService, url: Any
) -> None:
    service._source.answer = [*b"hello", EOS_ID]  # type: ignore[attr-defined]
    file_id = await upload(client, [request("a", url), request("b", url)])
    made = await client.batches.create(input_file_id=file_id, endpoint=url, completion_window="24h")
    batch = await ended(client, made.id)
    assert batch.request_counts.completed == 2, await lines_of(client, batch.error_file_id)
    if url == "/v1/responses":  # which are stored for the tenant of the batch
        (line, _) = await lines_of(client, batch.output_file_id)
        body = line["response"]["body"]
        assert (await client.responses.retrieve(body["id"])).output_text == "hello"


async def test_observers_know_which_requests_are_lines(
    client: openai.AsyncOpenAI, service: GenerationService
) -> None:
    found = list[bool]()
    service.telemetry.observers.append(lambda each: found.append(each.facts.is_batch))
    file_id = await upload(client, [request("a", max_tokens=1)])
    made = await client.batches.create(
        input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    await ended(client, made.id)
    await client.completions.create(model="tiny", prompt="a", max_tokens=1)
    assert found == [True, False]


async def test_nothing_of_a_batch_exists_for_another_tenant(
    clients: Sequence[openai.AsyncOpenAI],
) -> None:
    owner, other = clients
    file_id = await upload(owner, [request("a", max_tokens=1)])
    made = await owner.batches.create(
        input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    batch = await ended(owner, made.id)
    for refused in (
        other.files.retrieve(file_id),
        other.files.content(batch.output_file_id),
        other.files.delete(file_id),
        other.batches.retrieve(batch.id),
        other.batches.cancel(batch.id),
        other.batches.create(
            input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            await refused
    assert [each async for each in other.files.list()] == []
    assert [each async for each in other.batches.list()] == []


async def test_a_wrong_input_fails_the_batch_with_its_line(client: openai.AsyncOpenAI) -> None:
    for lines, number, words in (
        (["{"], 1, "Invalid JSON"),
        ([request("a"), request("a")], 2, "already in line 1"),
        ([request("a", "/v1/completions")], 1, "url: must be /v1/chat/completions"),
        ([request("a", stream=True)], 1, "a batch has no streams"),
    ):
        made = await client.batches.create(
            input_file_id=await upload(client, lines),
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )
        assert made.status == "failed"
        assert made.errors is not None
        assert made.errors.data is not None
        (error,) = made.errors.data
        assert (error.line, error.param) == (number, "input_file_id")
        assert words in (error.message or "")


async def test_a_line_is_bounded_as_a_body(client: openai.AsyncOpenAI) -> None:
    """One tenant's file must not keep Python's lock, nor fill the memory."""
    unknown = json.loads(request("a")) | {f"field-{i}": 1 for i in range(9_000)}
    for lines, number, words in (
        ([request("a"), request("b", x="y" * 2**22)], 2, "bytes; the maximum is 4194304"),
        ([request("a"), request("b", x=[[]] * 70_000)], 2, "too many elements"),
        ([request("a"), *[""] * 60_000, request("b")], None, "has 60002 lines"),
        ([json.dumps(unknown)], 1, "field-0"),
    ):
        made = await client.batches.create(
            input_file_id=await upload(client, lines),
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )
        assert made.status == "failed"
        assert made.errors is not None
        assert made.errors.data is not None
        (error,) = made.errors.data
        assert error.line == number
        assert words in (error.message or "")
        assert len(error.message or "") <= 1_024


async def test_wrong_uploads(client: openai.AsyncOpenAI, address: str) -> None:
    with pytest.raises(openai.BadRequestError, match="must be batch"):
        await client.files.create(file=("a", b"x"), purpose="vision")
    async with httpx.AsyncClient(
        base_url=f"http://{address}", headers={"Authorization": "Bearer one"}, timeout=WAIT
    ) as http:
        for content, kind, param in (
            (b"{}", "application/json", "Content-Type"),
            (b"", "multipart/form-data; boundary=x", "Content-Type"),
            (b"--x\r\n\r\n\r\n--x--", "multipart/form-data; boundary=x", None),
        ):
            answer = await http.post("/v1/files", content=content, headers={"Content-Type": kind})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        kept = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        for fields, param in (
            ({"purpose": "batch"}, "file"),
            ({"purpose": "batch", "more": "x"}, "more"),
            (
                {"purpose": "batch", "expires_after[anchor]": "created_at"},
                "expires_after.seconds",
            ),
            (
                {"purpose": "batch"} | kept | {"expires_after[seconds]": "1"},
                "expires_after.seconds",
            ),
        ):
            files = {} if param == "file" else {"file": ("f", b"x")}
            form: dict[str, Any] = files | {name: (None, value) for name, value in fields.items()}
            answer = await http.post("/v1/files", files=form)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        form = {"file": ("f", b"\r\n--x\r\n"), "purpose": (None, "batch")}
        form |= {name: (None, value) for name, value in kept.items()}
        made = (await http.post("/v1/files", files=form)).json()
        assert made["expires_at"] - made["created_at"] == 3_600
        assert (await http.get(f"/v1/files/{made['id']}/content")).content == b"\r\n--x\r\n"


async def test_lists_begin_after_a_known_entry_in_both_orders(
    clients: Sequence[openai.AsyncOpenAI], address: str
) -> None:
    client, other = clients
    files = [await upload(client, [request("a", max_tokens=1)]) for _ in range(3)]
    batches = [
        await client.batches.create(
            input_file_id=each, endpoint="/v1/chat/completions", completion_window="24h"
        )
        for each in files
    ]
    foreign = await upload(other, ["x"])
    async with httpx.AsyncClient(
        base_url=f"http://{address}/v1", headers={"Authorization": "Bearer one"}, timeout=WAIT
    ) as http:
        for path, ids, query in (
            ("/files", files, "purpose=batch&"),
            ("/batches", [each.id for each in batches], ""),
        ):
            for order, expected in (("asc", ids), ("desc", ids[::-1])):
                listed = (await http.get(f"{path}?{query}order={order}&limit=2")).json()
                assert [each["id"] for each in listed["data"]] == expected[:2]
                after = f"after={listed['last_id']}"
                listed = (await http.get(f"{path}?{query}order={order}&{after}")).json()
                assert [each["id"] for each in listed["data"]] == expected[2:]
            for unknown in ("unknown", foreign):
                refused = await http.get(f"{path}?after={unknown}")
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")


async def test_a_batch_that_has_ended_cannot_be_cancelled(client: openai.AsyncOpenAI) -> None:
    made = await client.batches.create(
        input_file_id=await upload(client, [request("a", max_tokens=1)]),
        endpoint="/v1/chat/completions",
        completion_window="24h",
    )
    await ended(client, made.id)
    with pytest.raises(openai.BadRequestError, match="its status is completed"):
        await client.batches.cancel(made.id)
    assert (await client.batches.retrieve(made.id)).status == "completed"


async def test_slow_uploads_of_one_tenant_leave_room_for_another(
    clients: Sequence[openai.AsyncOpenAI], address: str
) -> None:
    goes_on = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"--x\r\n"
        await goes_on.wait()
        yield b"--x--"

    async with httpx.AsyncClient(
        base_url=f"http://{address}", headers={"Authorization": "Bearer one"}, timeout=WAIT
    ) as http:
        kind = {"Content-Type": "multipart/form-data; boundary=x"}
        pending = [
            asyncio.create_task(http.post("/v1/files", content=slow(), headers=kind))
            for _ in range(2)
        ]
        async with asyncio.timeout(WAIT):
            while sum(files_module._uploads.values()) < 2:
                await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError, match="2 files of this tenant are being"):
            await upload(clients[0], ["x"])
        assert await upload(clients[1], ["x"])
        goes_on.set()
        assert {answer.status_code for answer in await asyncio.gather(*pending)} == {400}
    assert not files_module._uploads
    assert await upload(clients[0], ["x"])


async def test_inputs_that_are_read_at_a_time_are_bounded(
    clients: Sequence[openai.AsyncOpenAI],
    service: GenerationService,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on = asyncio.Event()
    read = service.storage.read_file

    async def slow(*args: Any) -> bytes | None:
        await goes_on.wait()
        return await read(*args)

    monkeypatch.setattr(service.storage, "read_file", slow)
    line = request("a", max_tokens=1)
    monkeypatch.setattr(batches_module, "_MAX_READ_BYTES_EACH", len(line) + 1)
    ids = [await upload(client, [line]) for client in clients]

    async def create(number: int) -> Any:
        return await clients[number].batches.create(
            input_file_id=ids[number], endpoint="/v1/chat/completions", completion_window="24h"
        )

    first = asyncio.create_task(create(0))
    async with asyncio.timeout(WAIT):
        while not batches_module._reading:
            await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError, match="bytes of input files of this tenant are"):
            await create(0)
        second = asyncio.create_task(create(1))  # another tenant has room
        goes_on.set()
        await asyncio.gather(first, second)
    assert not batches_module._reading
    assert (await create(0)).status == "in_progress"


async def test_a_file_that_is_deleted_while_it_is_read_ends_the_connection(
    client: openai.AsyncOpenAI,
    address: str,
    service: GenerationService,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It fills no log: callers may delete their files as often as they like."""
    name = await upload(client, ["x" * (files_module._PIECE_BYTES + 1)])
    read = service.storage.read_file

    async def first_piece(tenant: str, file_id: str, offset: int, size: int) -> bytes | None:
        return None if offset else await read(tenant, file_id, offset, size)

    monkeypatch.setattr(service.storage, "read_file", first_piece)
    async with httpx.AsyncClient(
        base_url=f"http://{address}", headers={"Authorization": "Bearer one"}, timeout=WAIT
    ) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get(f"/v1/files/{name}/content")
    assert len(caplog.records) <= 1
    assert "Traceback" not in caplog.text


async def test_each_answer_has_the_id_of_its_request(address: str) -> None:
    async with httpx.AsyncClient(
        base_url=f"http://{address}", headers={"Authorization": "Bearer one"}, timeout=WAIT
    ) as http:
        for path in ("/v1/files", "/v1/batches/x", "/v1/models", "/v1/models/x", "/health"):
            answer = await http.get(path, headers={"x-request-id": "mine"})
            assert answer.headers["x-request-id"] == "mine", path
            assert len((await http.get(path)).headers["x-request-id"]) == 32, path
        refused = await http.get("/v1/files", headers={"x-request-id": "x" * 129})
        assert refused.status_code == 400
        form = {"file": ("f", b"x"), "purpose": (None, b"batch")}
        made = await http.post("/v1/files", files=form, headers={"x-request-id": "mine"})
        assert made.headers.get_list("x-request-id") == ["mine"]


async def test_files_need_a_key_if_callers_cannot_be_told_apart(
    service: GenerationService,
) -> None:
    server = HttpServer(service, authenticator=Authenticator(anonymous_sees_all=False))
    address = await server.start("127.0.0.1:0")
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT) as http:
        for path in ("/v1/files", "/v1/files/x", "/v1/batches", "/v1/batches/x"):
            assert (await http.get(path)).status_code == 403
        # The client gets the reason although the file is not read.
        files = {"file": ("f", b"x" * 2**24), "purpose": (None, b"batch")}
        refused = await http.post("/v1/files", files=files)
        assert refused.status_code == 403
        assert "need an API key" in refused.json()["error"]["message"]
    await server.stop(0)


async def test_busy_lines_of_one_tenant_leave_room_for_another(
    clients: Sequence[openai.AsyncOpenAI],
    service: GenerationService,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = service.accept

    async def busy(request: Any, context: Any) -> Any:
        if context.caller.tenant == "a":
            raise Overloaded("the key's limit is used up", 60.0)
        return await run(request, context)

    monkeypatch.setattr(service, "accept", busy)
    monkeypatch.setattr("tandem.cluster.serve.storage.runner._RETRY_SECONDS", 0.01)
    made = []
    for client, name in zip(clients, "ab", strict=True):
        file_id = await upload(client, [request(f"{name}{i}", max_tokens=1) for i in range(9)])
        made.append(
            await client.batches.create(
                input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
            )
        )
    waiting, other = clients
    assert (await ended(other, made[1].id)).request_counts.completed == 9
    assert (await waiting.batches.retrieve(made[0].id)).status == "in_progress"


async def test_busy_lines_are_sent_again_and_a_removed_key_ends_them(
    client: openai.AsyncOpenAI,
    service: GenerationService,
    authenticator: Authenticator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusals = iter(range(3))
    run = service.accept

    async def busy(*args: Any) -> Any:
        if next(refusals, None) is not None:
            raise Overloaded("the queue is full", 0.01)
        return await run(*args)

    monkeypatch.setattr(service, "accept", busy)
    monkeypatch.setattr("tandem.cluster.local.batch._RETRY_SECONDS", 0.01)
    file_id = await upload(client, [request("a", max_tokens=1)])
    made = await client.batches.create(
        input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    batch = await ended(client, made.id)
    assert batch.request_counts.completed == 1
    monkeypatch.setattr(authenticator, "caller_of", lambda *_: None)
    made = await client.batches.create(
        input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    batch = await ended(client, made.id)
    (line,) = await lines_of(client, batch.error_file_id)
    assert line["error"]["code"] == "invalid_api_key"
