"""Tests that the usage of keys is counted: at a router, in the store, and by `tandem key usage`.

Servers and sessions are real; workers have no model.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cluster.cli.main import app
from tandem.cluster.config import load_config
from tandem.cluster.serve.runtime import RouterRuntime
from tandem.cluster.serve.storage.usage import UsageReporter
from tandem.proto import inference_pb2
from tandem.proto.errors import InvalidArgument, PermissionDenied, Unauthenticated, Unavailable
from tandem.router.auth.keys import create_key
from tandem.router.client.client import AsyncClient
from tandem.router.client.wire import API_KEY_VARIABLE
from tandem.router.storage.interface import KeyUsage
from tandem.router.storage.local import LocalStorage
from tandem.router.telemetry.requests import EndedRequest, RequestFacts
from tandem.tests.fleet import fake_rank, fleet
from tandem.tests.router_runtime import start_router
from tandem.tests.tiny_tokenizer import make_router_folder, make_tokenizer

NAMES = ("ada", "bob", "ops")


def ended(key_name: str, *, generated: int = 5, error: str = "", refused: bool = False) -> Any:
    return EndedRequest(
        facts=RequestFacts(
            request_id="r",
            arrived=0.0,
            began=0.0,
            num_prompt=10,
            num_choices=1,
            max_tokens=8,
            tenant="t",
            key_name=key_name,
        ),
        timeline=inference_pb2.Timeline(cached_tokens=4),
        num_generated=generated,
        longest_choice=generated,
        finish_reasons=("error" if error else "stop",),
        error=error,
        was_refused=refused,
    )


class FailingStorage(LocalStorage):
    """Fails every second report, every other time after it has counted it."""

    calls = 0

    async def add_usage(self, source: str, number: int, usage: Sequence[KeyUsage]) -> None:
        self.calls += 1
        if self.calls % 4 != 1:
            await super().add_usage(source, number, usage)
        if self.calls % 2:
            raise Unavailable("the store does not answer")


async def test_every_request_counts_once_though_the_store_fails() -> None:
    storage = FailingStorage(clock=lambda: 86_400.0)
    days = iter([86_400.0] * 3 + [2 * 86_400.0] * 9)
    reporter = UsageReporter(storage, "router", clock=lambda: next(days))
    for _ in range(3):
        reporter.record(ended("a"))
        reporter.record(ended("b", generated=0, error="INTERNAL"))
        reporter.record(ended("a", generated=2, error="CANCELLED"))
        reporter.record(ended("a", generated=0, error="RESOURCE_EXHAUSTED", refused=True))
        await reporter.report()
    for _ in range(4):
        await reporter.report()
    found = await storage.find_usage("1970-01-01")
    assert [(each.day, each.key_name, each.requests) for each in found] == [
        ("1970-01-03", "a", 4),
        ("1970-01-03", "b", 2),
        ("1970-01-02", "a", 2),
        ("1970-01-02", "b", 1),
    ]
    a, b = found[:2]
    assert (a.failed, a.prompt_tokens, a.cached_tokens, a.generated_tokens) == (0, 40, 16, 14)
    assert (b.failed, b.prompt_tokens, b.cached_tokens, b.generated_tokens) == (2, 0, 0, 0)
    storage.close()


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def keys(keys_file: Path) -> dict[str, str]:
    return {
        name: create_key(keys_file, name=name, tenant="team", operator=name == "ops")
        for name in NAMES
    }


@pytest.fixture
async def routers(
    tmp_path: Path, keys_file: Path, keys: dict[str, str]
) -> AsyncIterator[list[RouterRuntime]]:
    """Two routers with one store."""
    folder = make_router_folder(tmp_path)
    config = load_config(
        None,
        dict.fromkeys(("router.grpc_port", "router.http_port"), 0)
        | {"model": "m", "auth.keys_file": str(keys_file)},
    )
    size = len(make_tokenizer())
    storage = LocalStorage()
    async with (
        fleet(1, 1, rank=lambda role: fake_rank(vocab_size=size)) as running,
        AsyncExitStack() as scope,
    ):
        found = []
        for name in ("one", "two"):
            router = await start_router(config, folder, name=name, storage=storage)
            scope.push_async_callback(router.stop, 0)
            await router.update([worker.info() for worker in running.workers])
            found.append(router)
        yield found
    storage.close()


async def command(router: RouterRuntime, key: str, *args: str) -> str:
    """Returns what `tandem key usage` prints; raises its error."""
    arguments = ["key", "usage", "--url", f"http://{router.http_address}", *args]
    result = await asyncio.to_thread(
        CliRunner().invoke, app, arguments, env={API_KEY_VARIABLE: key}
    )
    if result.exception is not None:
        raise result.exception
    return result.stdout


async def test_the_command_prints_what_keys_used_at_all_routers(
    routers: list[RouterRuntime], keys: dict[str, str]
) -> None:
    one, two = routers
    for router, name, num_tokens in ((one, "ada", 3), (two, "ada", 4), (two, "bob", 5)):
        async with AsyncClient(router.grpc_address, api_key=keys[name]) as client:
            await client.generate(list(range(5, 25)), max_tokens=num_tokens, ignore_eos=True)
    for router in routers:
        await router.usage.report()
    lines = [line.split() for line in (await command(one, keys["ops"])).splitlines()]
    assert lines[0] == [
        *("NAME", "TENANT", "REQUESTS", "FAILED", "PROMPT", "TOKENS", "CACHED", "GENERATED")
    ]
    assert [(*line[:5], line[6]) for line in lines[1:]] == [
        ("ada", "team", "2", "0", "40", "7"),
        ("bob", "team", "1", "0", "20", "5"),
    ]
    own = json.loads(await command(two, keys["bob"], "--json"))
    assert [(row["key_name"], row["generated_tokens"]) for row in own] == [("bob", 5)]
    by_day = await command(two, keys["bob"], "--by-day", "--since", own[0]["day"])
    assert by_day.splitlines()[1].split()[:3] == [own[0]["day"], "bob", "team"]
    assert "bob" not in await command(two, keys["ops"], "--since", "2999-01-01")
    compact = own[0]["day"].replace("-", "")  # another form of ISO 8601
    assert "bob" in await command(two, keys["ops"], "--since", compact)
    with pytest.raises(InvalidArgument, match="since: must be a day"):
        await command(one, keys["ops"], "--since", "yesterday")
    with pytest.raises(Unauthenticated):
        await command(one, "wrong")


@pytest.mark.parametrize("share", [True, False])
async def test_usage_of_a_service_without_keys(tmp_path: Path, share: bool) -> None:
    """It is that of all callers, which strangers on a network do not see."""
    folder = make_router_folder(tmp_path)
    local: dict[str, object] = {
        "model": "m",
        "router.grpc_port": 0,
        "router.http_port": 0,
        "auth.share_anonymous_prefixes": share,
    }
    router = await start_router(load_config(None, local), folder)
    router.usage.record(ended(""))
    await router.usage.report()
    assert (await command(router, "")).splitlines()[1].split()[:3] == ["-", "t", "1"]
    await router.stop(0)
    public = load_config(None, local | {"auth.allow_anonymous": True, "router.bind": "0.0.0.0"})
    router = await start_router(public, folder)
    with pytest.raises(PermissionDenied, match="callers without a key see no usage"):
        await command(router, "")
    await router.stop(0)
