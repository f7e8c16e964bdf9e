"""Tests a service with API keys on a Ray cluster: who is let in, whose prefixes are cached, and a
key that is revoked while its streams run.
"""

import asyncio
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.proto.errors import Unauthenticated
from tandem.router.auth.keys import create_key, revoke_key
from tandem.tests.service import expected_tokens, small_config

PROMPT = [(17 * i) % 400 + 3 for i in range(100)]
NUM_TOKENS = 400
NUM_STREAMS = 16


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def keys(keys_file: Path) -> dict[str, str]:
    return {name: create_key(keys_file, name=name, tenant=name) for name in ("ada", "bob")}


@pytest.fixture(scope="module")
def service(address: str, tiny_model: Path, keys_file: Path, keys: dict[str, str]) -> Iterator[Any]:
    from tandem.cluster.serve.launch import start_service

    overrides = {"router.resources": {"router": 1.0}, "auth.keys_file": str(keys_file)}
    with start_service(
        small_config(tiny_model, "keys", overrides), str(tiny_model), address=address
    ) as running:
        yield running


def code_of(url: str, key: str = "") -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_only_who_has_a_key_is_let_in(service: Any, keys: dict[str, str]) -> None:
    urls = [f"http://{service.http_addresses[0]}/v1/models", service.status_url]
    assert [code_of(url, key) for url in urls for key in ("", "tandem-wrong", keys["ada"])] == [
        401,
        401,
        200,
    ] * 2
    assert code_of(f"http://{service.http_addresses[0]}/health") == 200


async def test_cached_tokens_of_another_tenant_are_not_seen(
    service: Any, keys: dict[str, str]
) -> None:
    from tandem.router.client.client import AsyncClient

    cached = []
    for name in ("ada", "ada", "bob", "bob"):
        async with AsyncClient(service.grpc_address, api_key=keys[name]) as client:
            answer = await client.generate(PROMPT, max_tokens=2, ignore_eos=True, timeout=60)
            cached.append(answer.usage.cached_tokens > 0)
    assert cached == [False, True, False, True]


async def call_again_and_again(client: Any) -> None:
    """Ends only with an error, or after half a minute."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        await client.list_models()
        await asyncio.sleep(0.1)


async def test_a_revoked_key_is_refused_and_its_streams_go_on(
    service: Any, tiny_model: Path, keys_file: Path, keys: dict[str, str]
) -> None:
    from tandem.router.client.client import AsyncClient

    options: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "timeout": 120,
    }
    async with AsyncClient(service.grpc_address, api_key=keys["ada"]) as client:
        streams = [client.stream(PROMPT, **options) for _ in range(NUM_STREAMS)]
        for stream in streams:
            await anext(stream)
        await asyncio.to_thread(revoke_key, keys_file, "ada")
        with pytest.raises(Unauthenticated):
            await call_again_and_again(client)
        completions = await asyncio.gather(*(stream.completion() for stream in streams))
    (expected,) = expected_tokens(tiny_model, [PROMPT], NUM_TOKENS)
    assert [list(each.token_ids) for each in completions] == [expected] * NUM_STREAMS
    async with AsyncClient(service.grpc_address, api_key=keys["bob"]) as client:
        assert await client.list_models()


async def cached_tokens(service: Any, key: str) -> int:
    """Has the prompt answered; returns how many of its tokens were cached."""
    from tandem.router.client.client import AsyncClient

    async with AsyncClient(service.grpc_address, api_key=key) as client:
        answer = await client.generate(PROMPT, max_tokens=2, ignore_eos=True, timeout=60)
        return int(answer.usage.cached_tokens)


def serve_once(
    address: str, overrides: dict[str, object], folder: str, keys: list[str]
) -> list[int]:
    """Runs a service as a launcher of its own does; returns the cached tokens of a request with
    each key. Ends when the prompt is on disk for each.
    """
    from tandem.cluster.serve.launch import start_service

    with start_service(
        small_config(Path(folder), "kept", overrides), folder, address=address
    ) as service:
        found = [asyncio.run(cached_tokens(service, key)) for key in keys]
        disk, deadline = Path(str(overrides["prefill.kv_disk"])), time.monotonic() + 30
        while len(list(disk.glob("prefill-0/*.kv"))) < len(PROMPT) // 16 * len(keys):
            assert time.monotonic() < deadline, list(disk.rglob("*.kv"))
            time.sleep(0.05)
    return found


def test_prefixes_on_disk_outlive_a_restart_for_their_tenant_alone(
    address: str, tiny_model: Path, tmp_path: Path
) -> None:
    """Each start makes another identity; the salt of the tenants' prefixes lies beside the
    cache.
    """
    file = tmp_path / "keys.json"
    ada, bob = (create_key(file, name=name, tenant=name) for name in ("ada", "bob"))
    overrides: dict[str, object] = {
        "router.resources": {"router": 1.0},
        "auth.keys_file": str(file),
    }
    for pool in ("prefill", "decode"):
        overrides |= {f"{pool}.kv_disk": str(tmp_path / "kv"), f"{pool}.kv_disk_gb": 0.1}
    found = []
    for keys in ([ada], [bob, ada]):
        arguments = json.dumps([address, overrides, str(tiny_model), keys])
        code = "import json, sys; from tandem.tests.e2e.test_keys import serve_once; "
        code += "print(json.dumps(serve_once(*json.loads(sys.argv[1]))))"
        launcher = subprocess.run(
            [sys.executable, "-c", code, arguments],
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert launcher.returncode == 0, launcher.stderr
        found += json.loads(launcher.stdout.splitlines()[-1])
    assert found == [0, 0, len(PROMPT) // 16 * 16]
