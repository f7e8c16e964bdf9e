"""LoRA adapters through both APIs: chosen by `model`, listed, loaded and unloaded; who may not is
told so.
"""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest

from tandem.proto import inference_pb2
from tandem.proto.errors import InvalidArgument, NotFound, PermissionDenied
from tandem.router.adapters import AdapterAdmin, AdapterRegistry
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.auth.authenticator import Authenticator
from tandem.router.client.client import AsyncClient
from tandem.router.frontend.prepare import RequestContext
from tandem.router.frontend.served_model import ServedModel
from tandem.router.request import LoraAdapter
from tandem.tests.router.auth.keys import api_key, bearer
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import FakeTokenSource
from tandem.tests.waits import WAIT

SQL = LoraAdapter(name="sql", folder="/adapters/sql", fingerprint=b"s" * 16)


async def accept(adapter: LoraAdapter) -> None:
    """All workers can use it."""


def read(name: str, folder: Path) -> LoraAdapter:
    return LoraAdapter(name=name, folder=str(folder), fingerprint=folder.name.encode().ljust(16))


@pytest.fixture
def admin(tmp_path: Path) -> AdapterAdmin:
    for name in ("french", "german"):
        (tmp_path / name).mkdir()
    return AdapterAdmin(
        AdapterRegistry([SQL]), folder=str(tmp_path), read=read, try_on_workers=accept
    )


@pytest.fixture
async def service(model: ServedModel, admin: AdapterAdmin) -> AsyncIterator[Service]:
    source = FakeTokenSource(answer=b"abcd")
    keys = Authenticator([api_key("ada", operator=True), api_key("bob")])
    servers = await ApiServers.start(
        GenerationService([model], source, adapters=admin), authenticator=keys
    )
    await servers.set_serving(True)
    yield Service(
        servers=servers, source=source, grpc=servers.grpc_address, http=servers.http_address
    )
    await servers.stop(0)


def http(service: Service, who: str = "ada") -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{service.http}", headers=bearer(who), timeout=WAIT)


async def test_the_model_field_chooses_and_the_list_shows(service: Service) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://{service.http}/v1", api_key="bob") as client:
        for name, expected in (("tiny", None), ("sql", SQL)):
            done = await client.completions.create(model=name, prompt="hi", max_tokens=2)
            assert done.model == name
            asked = service.source.requests[-1].submit
            assert asked.HasField("adapter") == (expected is not None)
            assert expected is None or asked.adapter == expected.message()
        models = [each.model_dump() async for each in client.models.list()]
        assert [(each["id"], each["root"], each["parent"]) for each in models] == [
            ("tiny", "tiny", None),
            ("sql", "tiny", "tiny"),
        ]
        assert (await client.models.retrieve("sql")).id == "sql"
        with pytest.raises(
            openai.NotFoundError, match="'nope' is not served here; served: tiny, sql"
        ):
            await client.completions.create(model="nope", prompt="hi")
    async with AsyncClient(service.grpc, api_key="bob") as grpc_client:
        await grpc_client.generate("hi", max_tokens=2, model="sql")
        assert service.source.requests[-1].submit.adapter == SQL.message()
        assert [(each.id, each.parent) for each in await grpc_client.list_models()] == [
            ("tiny", ""),
            ("sql", "tiny"),
        ]
        await grpc_client.generate("hi", max_tokens=2)
        assert not service.source.requests[-1].submit.HasField("adapter")


async def test_loaded_and_unloaded_as_with_vllm(service: Service) -> None:
    async with http(service) as client:
        body = {"lora_name": "french", "lora_path": "french"}
        done = await client.post("/v1/load_lora_adapter", json=body)
        assert (done.status_code, done.text) == (
            200,
            "Success: LoRA adapter 'french' added successfully.",
        )
        twice = await client.post("/v1/load_lora_adapter", json=body)
        assert twice.status_code == 400
        assert twice.json()["error"]["param"] == "lora_name"
        answer = await client.post(
            "/v1/completions", json={"model": "french", "prompt": "hi", "max_tokens": 1}
        )
        assert answer.json()["model"] == "french"
        name = {"lora_name": "french"}
        done = await client.post("/v1/unload_lora_adapter", json=name | {"lora_int_id": 7})
        assert (done.status_code, done.text) == (
            200,
            "Success: LoRA adapter 'french' removed successfully.",
        )
        assert (await client.post("/v1/unload_lora_adapter", json=name)).status_code == 404
        gone = await client.post(
            "/v1/completions", json={"model": "french", "prompt": "hi", "max_tokens": 1}
        )
        assert gone.status_code == 404
        outside = await client.post(
            "/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/etc"}
        )
        assert (outside.status_code, outside.json()["error"]["param"]) == (400, "lora_path")


async def test_a_key_that_is_no_operators_changes_nothing(
    service: Service, admin: AdapterAdmin
) -> None:
    async with http(service, "bob") as client:
        loaded = await client.post(
            "/v1/load_lora_adapter", json={"lora_name": "french", "lora_path": "french"}
        )
        unloaded = await client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert (loaded.status_code, unloaded.status_code) == (403, 403)
    async with AsyncClient(service.grpc, api_key="bob") as grpc_client:
        with pytest.raises(PermissionDenied):
            await grpc_client.load_lora_adapter("french", "french")
        with pytest.raises(PermissionDenied):
            await grpc_client.unload_lora_adapter("sql")
    assert admin.registry.adapters == [SQL]


async def test_over_grpc(service: Service, admin: AdapterAdmin) -> None:
    async with AsyncClient(service.grpc, api_key="ada") as client:
        await client.load_lora_adapter("german", "german")
        assert [each.id for each in await client.list_models()] == ["tiny", "german", "sql"]
        with pytest.raises(InvalidArgument, match="lora_path"):
            await client.load_lora_adapter("other", "..")
        await client.unload_lora_adapter("german")
        with pytest.raises(NotFound):
            await client.unload_lora_adapter("german")
    assert admin.registry.adapters == [SQL]


async def test_a_resume_token_is_of_one_adapter(model: ServedModel) -> None:
    """Of what the adapter holds, not only of its name."""

    async def prepared(name: str, content: bytes) -> bytes:
        adapter = LoraAdapter(name="sql", folder="/adapters/sql", fingerprint=content * 16)
        service = GenerationService(
            [model], FakeTokenSource(), adapters=AdapterAdmin(AdapterRegistry([adapter]))
        )
        context = RequestContext(arrived=time.monotonic(), is_resumable=True)
        request = inference_pb2.GenerateRequest(model=name, prompt={"text": "hi"})
        binding = (await service.accept(request, context)).resume
        assert binding is not None
        return binding.digest

    digests = [await prepared(*each) for each in (("sql", b"a"), ("sql", b"b"), ("tiny", b"a"))]
    assert len(set(digests)) == 3
    assert await prepared("tiny", b"b") == digests[2]
