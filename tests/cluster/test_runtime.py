"""Tests the addresses of routers that share a host."""

import asyncio
import json
import os
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import psutil
import pytest

from tandem.cluster.config import TandemConfig, load_config
from tandem.cluster.serve import redeploy
from tandem.cluster.serve.runtime import RouterRuntime
from tandem.proto.errors import InvalidArgument, Unauthenticated, Unavailable
from tandem.router.auth.config import AuthConfig
from tandem.router.auth.keys import create_key, hash_key
from tandem.router.client.client import AsyncClient
from tandem.router.client.wire import ClientTls
from tandem.router.frontend.template import template_process
from tandem.tests.certificates import make_certificate
from tandem.tests.fleet import fake_rank, fleet
from tandem.tests.router.auth.keys import bearer
from tandem.tests.router_runtime import start_router
from tandem.tests.tiny_tokenizer import make_router_folder, make_tokenizer
from tandem.tests.waits import SLOW_STEP, WAIT
from tandem.workers.model import loader

HOST = "127.0.0.1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_router_folder(tmp_path)


@pytest.fixture
def config() -> TandemConfig:
    """A service with free ports, also the next ones.

    Each process of tests has ports of its own, none of which the system gives to a connection.
    """
    first = 20_001 + 100 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = range(first, first + 100, 2)
    grpc, http, *_ = (port for port in ports if is_free(port) and is_free(port + 1))
    return load_config(None, {"model": "m", "router.grpc_port": grpc, "router.http_port": http})


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


async def start(
    config: TandemConfig, folder: Path, num_routers: int, **options: Any
) -> RouterRuntime:
    return await start_router(config, folder, num_routers=num_routers, **options)


@pytest.mark.parametrize("has_template", [True, False])
async def test_the_first_chat_does_not_wait_for_the_process_of_templates(
    config: TandemConfig,
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_template: bool,
) -> None:
    """A router that listens can render a chat; a model without a template needs no process."""
    renderer = template_process()
    monkeypatch.setattr("tandem.router.frontend.tokenizer.RENDERER", renderer)
    if not has_template:
        (tmp_path / "chat_template.jinja").unlink()
    before = set(psutil.Process().children())
    router = await start(config, folder, 1)
    assert (len(set(psutil.Process().children()) - before), renderer.is_ready) == (
        has_template,
        has_template,
    )
    await router.stop(0)


async def test_a_router_in_place_of_another_has_its_addresses(
    config: TandemConfig, folder: Path
) -> None:
    """Clients know the addresses of both routers from the start, so either may be replaced."""
    grpc, http = config.router.grpc_port, config.router.http_port
    async with AsyncExitStack() as scope:
        routers = [await start(config, folder, 2) for _ in range(2)]
        assert [each.grpc_address for each in routers] == [f"{HOST}:{grpc}", f"{HOST}:{grpc + 1}"]
        assert [each.http_address for each in routers] == [f"{HOST}:{http}", f"{HOST}:{http + 1}"]
        for index in (1, 0):
            await routers[index].stop(0)
            again = await start(config, folder, 2)
            assert (again.grpc_address, again.http_address) == (
                routers[index].grpc_address,
                routers[index].http_address,
            )
            routers[index] = again
        for router in routers:
            scope.push_async_callback(router.stop, 0)
        third = await start(config, folder, 2)  # beyond the ports of two: free ones
        scope.push_async_callback(third.stop, 0)
        assert third.grpc_address not in {each.grpc_address for each in routers}


async def test_a_router_without_keys_listens_on_loopback_alone(folder: Path) -> None:
    ports: dict[str, object] = {"model": "m", "router.grpc_port": 0, "router.http_port": 0}
    with pytest.raises(InvalidArgument, match="not loopback"):
        await start_router(load_config(None, ports), folder, "0.0.0.0")
    allowed = load_config(None, ports | {"auth.allow_anonymous": True})
    router = await start_router(allowed, folder, "0.0.0.0")
    assert (
        router.authenticator.caller(None, "a").cache_salt
        != router.authenticator.caller(None, "b").cache_salt
    )
    await router.stop(0)


async def test_a_router_binds_more_than_it_tells(config: TandemConfig, folder: Path) -> None:
    """In a pod `kubectl port-forward` connects through loopback; other nodes use its address."""
    router = config.router.model_copy(update={"bind": "0.0.0.0"})
    with pytest.raises(InvalidArgument, match=r"0\.0\.0\.0 is not loopback"):
        await start(config.model_copy(update={"router": router}), folder, 1)
    auth = AuthConfig(allow_anonymous=True)
    config = config.model_copy(update={"router": router, "auth": auth})
    first = await start(config, folder, 1, application="a")
    assert first.http_address == f"{HOST}:{router.http_port}"
    for host in (HOST, "127.0.0.2"):
        async with httpx.AsyncClient(timeout=WAIT) as client:
            assert (
                await client.get(f"http://{host}:{router.http_port}/version")
            ).status_code == 200
    second = await start(
        config, folder, 1, application="a.2", replaced=[(first.grpc_address, first.http_address)]
    )
    assert second.http_address == first.http_address
    for each in (first, second):
        await each.stop(0)


async def test_who_is_cut_when_the_service_stops_reads_so(
    config: TandemConfig, folder: Path
) -> None:
    """Holds for both APIs, at the end of the grace of streams."""
    size = len(make_tokenizer())
    async with fleet(
        0, 1, rank=lambda role: fake_rank(vocab_size=size, step_seconds=SLOW_STEP)
    ) as running:
        router = await start(config, folder, 1)
        await router.update([worker.info() for worker in running.workers])
        body = {
            "model": "m",
            "prompt": [5, 6],
            "max_tokens": 1_500,
            "ignore_eos": True,
            "stream": True,
        }
        async with (
            AsyncClient(router.grpc_address, max_retries=0) as client,
            client.stream([5, 6], max_tokens=1_500, ignore_eos=True) as stream,
            httpx.AsyncClient(base_url=f"http://{router.http_address}", timeout=WAIT) as http,
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            lines = answer.aiter_lines()
            await asyncio.gather(anext(stream), anext(lines))
            stopping = asyncio.create_task(router.stop(0.1))
            with pytest.raises(Unavailable, match="the service is stopping"):
                await stream.completion()
            assert "the service is stopping" in "".join([line async for line in lines])
            await stopping


async def test_a_router_offers_no_more_context_than_its_workers_hold(
    config: TandemConfig, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A chat without max_tokens may use all of it; a prompt beyond it has the error of its API."""
    size = len(make_tokenizer())
    chat: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with fleet(0, 1, rank=lambda role: fake_rank(num_blocks=16, vocab_size=size)) as running:
        router = await start(config, folder, 1)
        await router.update([worker.info() for worker in running.workers])
        async with httpx.AsyncClient(
            base_url=f"http://{router.http_address}", timeout=WAIT
        ) as http:
            (card,) = (await http.get("/v1/models")).json()["data"]
            assert card["max_model_len"] == 256
            for fields in ({}, {"max_tokens": 2_000}):
                answer = await http.post("/v1/chat/completions", json=chat | fields)
                assert answer.json()["usage"]["total_tokens"] == 256
            chat["messages"][0]["content"] = "hi " * 300
            text = {"model": "m", "prompt": [5] * 300}
            for path, body in (("chat/completions", chat), ("completions", text)):
                answer = await http.post(f"/v1/{path}", json=body)
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
                assert "maximum context length is 256 tokens" in error["message"]
        assert router.context_limit.warning in caplog.messages
        assert "a worker holds 256 of the model's 2,048 tokens" in router.context_limit.warning
        await router.stop(0)


async def test_a_stream_is_kept_alive_as_configured(config: TandemConfig, folder: Path) -> None:
    router_config = config.router.model_copy(update={"keepalive_seconds": SLOW_STEP / 8})
    config = config.model_copy(update={"router": router_config})
    size = len(make_tokenizer())
    async with fleet(
        0, 1, rank=lambda role: fake_rank(vocab_size=size, step_seconds=SLOW_STEP)
    ) as running:
        router = await start(config, folder, 1)
        await router.update([worker.info() for worker in running.workers])
        body = {"model": "m", "prompt": [5, 6], "max_tokens": 2, "stream": True}
        async with httpx.AsyncClient(
            base_url=f"http://{router.http_address}", timeout=WAIT
        ) as http:
            answer = await http.post("/v1/completions", json=body)
        assert answer.text.startswith(": keep-alive\n\n")
        assert "data: [DONE]\n\n" in answer.text
        await router.stop(0)


@pytest.mark.parametrize("needs_key", [False, True])
async def test_any_host_name_will_do_where_a_key_is_needed(
    config: TandemConfig, folder: Path, tmp_path: Path, needs_key: bool
) -> None:
    """A page that has rebound its name has no key; without keys the name is refused."""
    keys_file = tmp_path / "keys.json"
    key = create_key(keys_file, name="ada", tenant="ada")
    if needs_key:
        config = config.model_copy(update={"auth": AuthConfig(keys_file=str(keys_file))})
    router = await start(config, folder, 1)
    headers = {"Host": "models.example.com", "Authorization": f"Bearer {key}"}
    try:
        async with httpx.AsyncClient(
            base_url=f"http://{router.http_address}", headers=headers, timeout=WAIT
        ) as client:
            assert (await client.get("/version")).status_code == (200 if needs_key else 403)
    finally:
        await router.stop(0)


@pytest.mark.parametrize("bind", ["0.0.0.0", HOST])
async def test_a_router_that_binds_a_network_has_the_name_of_its_machine(
    config: TandemConfig, folder: Path, monkeypatch: pytest.MonkeyPatch, bind: str
) -> None:
    """Its own host may be loopback: `host` is the address by which it tells itself."""
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    auth = AuthConfig(allow_anonymous=True)
    bound = config.router.model_copy(update={"bind": bind})
    router = await start(config.model_copy(update={"router": bound, "auth": auth}), folder, 1)
    headers = {"Host": "box"}
    try:
        async with httpx.AsyncClient(
            base_url=f"http://{router.http_address}", headers=headers, timeout=WAIT
        ) as client:
            assert (await client.get("/version")).status_code == (403 if bind == HOST else 200)
    finally:
        await router.stop(0)


async def test_every_server_of_a_router_needs_a_key_whose_hash_is_configured(
    config: TandemConfig, folder: Path
) -> None:
    keys = ["one", "two"]
    auth = AuthConfig(key_hashes=tuple(hash_key(key).hex() for key in keys))
    router = await start(config.model_copy(update={"auth": auth}), folder, 1)
    assert router.watches == []
    try:
        async with httpx.AsyncClient(
            base_url=f"http://{router.http_address}", timeout=WAIT
        ) as client:
            # Without a worker, /v1/models answers 503 to a caller with a key.
            for path, expected in (("/v1/models", 503), ("/console/data", 200)):
                for key in keys:
                    answer = await client.get(path, headers=bearer(key))
                    assert answer.status_code == expected
                for headers in ({}, bearer("three"), bearer(auth.key_hashes[0])):
                    assert (await client.get(path, headers=headers)).status_code == 401
            assert (await client.get("/health")).status_code == 503  # no worker; needs no key
        for key in keys:
            async with AsyncClient(router.grpc_address, api_key=key) as grpc_client:
                assert [model.id for model in await grpc_client.list_models()] == ["m"]
        async with AsyncClient(router.grpc_address, api_key="three") as grpc_client:
            with pytest.raises(Unauthenticated):
                await grpc_client.list_models()
        caller = router.authenticator.caller("Bearer two", "")
        assert (caller.tenant, caller.sees_all, caller.key_name) == ("default", True, "api-key-2")
    finally:
        await router.stop(0)


async def test_a_configured_chat_template_is_that_of_the_service(
    config: TandemConfig, folder: Path
) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content | upper }}{% endfor %}"
    router = await start(config.model_copy(update={"chat_template": template}), folder, 1)
    try:
        async with httpx.AsyncClient(
            base_url=f"http://{router.http_address}", timeout=WAIT
        ) as client:
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
            answer = await client.post("/detokenize", json={"model": "m", "tokens": tokens})
            assert answer.json()["prompt"] == "[user] HI"
    finally:
        await router.stop(0)


async def test_embeddings_of_another_kind_are_refused_with_their_module(
    config: TandemConfig, folder: Path
) -> None:
    """The router reads the file; requests that generate do not need it."""
    modules = [{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    router = await start(config, folder, 1)
    try:
        async with httpx.AsyncClient(
            base_url=f"http://{router.http_address}", timeout=WAIT
        ) as client:
            answer = await client.post("/v1/embeddings", json={"input": "hi"})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "model")
            assert "modules.json: the module Dense is not supported" in error["message"]
    finally:
        await router.stop(0)


async def test_an_image_is_refused_by_the_name_of_the_architecture(
    config: TandemConfig, tmp_path: Path
) -> None:
    architecture = "Gemma3ForConditionalGeneration"
    text = {"max_position_embeddings": 2_048}
    folder = make_router_folder(tmp_path, architectures=[architecture], text_config=text)
    router = await start(config, folder, 1)
    try:
        async with httpx.AsyncClient(
            base_url=f"http://{router.http_address}", timeout=WAIT
        ) as client:
            body = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.json()["error"]["message"] == (
                "messages[0].content: parts of type 'image_url' are not supported; "
                f"this service has the text model of {architecture} only"
            )
    finally:
        await router.stop(0)


async def test_a_router_serves_tls_with_the_files_of_its_configuration(folder: Path) -> None:
    ca = make_certificate("ca")
    ca.write(folder / "ca.pem")
    make_certificate("server", ca).write(folder / "tls.crt", folder / "tls.key")
    files = {"certificate": str(folder / "tls.crt"), "key": str(folder / "tls.key")}
    ports: dict[str, object] = {"model": "m", "router.grpc_port": 0, "router.http_port": 0}
    config = load_config(None, ports | {"router.tls": files})
    router = await start_router(config, folder)
    async with AsyncClient(
        f"grpcs://{router.grpc_address}", tls=ClientTls(ca=folder / "ca.pem")
    ) as client:
        assert [model.id for model in await client.list_models()] == ["m"]
    assert len(router.watches) == 1
    await router.stop(0)
    (folder / "tls.key").unlink()
    with pytest.raises(InvalidArgument, match=r"tls\.key"):
        await start_router(config, folder)


async def test_a_single_router_takes_its_own_ports_or_none(
    config: TandemConfig, folder: Path
) -> None:
    first = await start(config, folder, 1)
    try:
        with pytest.raises((OSError, RuntimeError)):
            await start(config, folder, 1)
    finally:
        await first.stop(0)


async def test_a_router_that_replaces_another_listens_on_its_ports_beside_it(
    config: TandemConfig, folder: Path
) -> None:
    """When the other router ends, the ports are its own; a second new router does not get them."""
    for grpc_port in (config.router.grpc_port, 0):
        router = config.router.model_copy(
            update={"grpc_port": grpc_port, "http_port": grpc_port and grpc_port + 1}
        )
        one = config.model_copy(update={"router": router})
        first = await start(one, folder, 1)
        known = [(first.grpc_address, first.http_address)]
        second = await start(one, folder, 1, application="a.2", replaced=known)
        assert (second.grpc_address, second.http_address) == known[0]
        try:
            again = await start(one, folder, 1, application="a.2", replaced=known)
        except OSError:
            assert grpc_port
        else:
            assert again.grpc_address != first.grpc_address
            await again.stop(0)
        await first.stop(0)
        with pytest.raises(OSError, match="in use"):  # it is taken still
            await start(config_with_ports(one, second.grpc_address), folder, 1)
        await second.stop(0)


def config_with_ports(config: TandemConfig, address: str) -> TandemConfig:
    """Returns a configuration with this gRPC port and any HTTP port."""
    router = config.router.model_copy(
        update={"grpc_port": int(address.rpartition(":")[2]), "http_port": 0}
    )
    return config.model_copy(update={"router": router})


async def test_prefixes_on_disk_are_found_by_their_tenant_after_a_restart(
    config: TandemConfig, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start has another identity, which must not change the salt; see e2e/test_redeploy.py."""
    monkeypatch.setattr("ray.nodes", lambda: [])
    monkeypatch.setattr(loader, "open_checkpoint", lambda *args, **options: Mock())
    ada, bob = (
        create_key(tmp_path / "keys.json", name=name, tenant=name) for name in ("ada", "bob")
    )
    pool = config.decode.model_copy(update={"kv_disk": str(tmp_path / "kv"), "kv_disk_gb": 1.0})
    auth = AuthConfig(keys_file=str(tmp_path / "keys.json"))
    config = config.model_copy(update={"auth": auth, "decode": pool})
    size, prompt = len(make_tokenizer()), list(range(5, 105))  # of six whole blocks
    cached = []
    for keys in ([ada], [bob, ada]):
        began = redeploy.first_continuity(config, str(folder))
        options: dict[str, Any] = {"kv_disk": str(tmp_path / "kv"), "kv_disk_bytes": 2**20}
        async with fleet(0, 1, rank=lambda role: fake_rank(vocab_size=size), **options) as running:
            router = await start_router(
                config, folder, resume_key=began.resume_key, cache_secret=began.cache_secret
            )
            await router.update([worker.info() for worker in running.workers])
            for key in keys:
                async with AsyncClient(router.grpc_address, api_key=key) as client:
                    answer = await client.generate(
                        prompt, max_tokens=1, ignore_eos=True, timeout=WAIT
                    )
                cached.append(answer.usage.cached_tokens)
            disk = running.workers[0]._disk
            assert disk is not None
            async with asyncio.timeout(WAIT):
                while disk._writing is not None or len(disk._disk.files) < 6 * len(keys):
                    await asyncio.sleep(0.005)
            await router.stop(0)
    assert cached == [0, 0, 96]
