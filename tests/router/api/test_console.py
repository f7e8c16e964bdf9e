"""Tests the console.

Checks the policy of its page, the data that each caller sees, and the cost of polls for the limits
of a key.
"""

import asyncio
import itertools
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import urljoin, urlsplit

import httpx
import pytest

from tandem.proto import inference_pb2, worker_pb2
from tandem.proto.errors import InvalidArgument, Unavailable
from tandem.router.api.console import routes
from tandem.router.api.console.feed import ConsoleFeed, worker_changes
from tandem.router.api.console.request_log import (
    FIRST_NUMBER,
    MAX_ENDED,
    RequestLog,
    clock_numbers,
    percentiles,
)
from tandem.router.api.console.routes import STATIC_PATHS
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.auth.authenticator import Authenticator, Caller
from tandem.router.dispatch.causes import Cause
from tandem.router.telemetry.requests import PARTS, RequestFacts, RequestTelemetry
from tandem.tests.router.api.http_bodies import CHAT, TEXT, body
from tandem.tests.router.auth.keys import api_key, bearer
from tandem.tests.router.fake_source import FakeTokenSource
from tandem.tests.waits import WAIT

_STATIC = Path(routes.__file__).with_name("static")
DATA = "/console/data"
CANARY = "canarybird"
KEYS = (api_key("ada", requests_per_minute=3), api_key("bob"), api_key("ops", operator=True))


@pytest.fixture
def feed(generation: GenerationService) -> ConsoleFeed:
    return ConsoleFeed(generation.telemetry)


async def served(
    generation: GenerationService,
    source: FakeTokenSource,
    feed: ConsoleFeed,
    authenticator: Authenticator | None,
) -> AsyncIterator[httpx.AsyncClient]:
    servers = await ApiServers.start(generation, authenticator=authenticator, console=feed)
    await servers.set_serving(True)
    async with httpx.AsyncClient(base_url=f"http://{servers.http_address}", timeout=WAIT) as client:
        yield client
    await servers.stop(0)
    assert source.running == 0


@pytest.fixture
async def http(
    generation: GenerationService, source: FakeTokenSource, feed: ConsoleFeed
) -> AsyncIterator[httpx.AsyncClient]:
    async for client in served(generation, source, feed, None):
        yield client


@pytest.fixture
async def keyed(
    generation: GenerationService, source: FakeTokenSource, feed: ConsoleFeed
) -> AsyncIterator[httpx.AsyncClient]:
    async for client in served(generation, source, feed, Authenticator(KEYS)):
        yield client


async def data(client: httpx.AsyncClient, cursor: str = "", key: str = "") -> dict[str, Any]:
    answer = await client.get(DATA, params={"cursor": cursor}, headers=bearer(key) if key else {})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_the_page_needs_no_key_and_loads_nothing_from_elsewhere(
    keyed: httpx.AsyncClient,
) -> None:
    assert {"/console", "/console/main.js", "/console/base.css"} <= STATIC_PATHS
    for path in sorted(STATIC_PATHS):
        answer = await keyed.get(path)
        assert answer.status_code == 200
        policy = dict(
            part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
        )
        assert (
            policy.pop("default-src")
            == policy.pop("base-uri")
            == policy.pop("frame-ancestors")
            == "'none'"
        )
        assert {policy[f"{kind}-src"] for kind in ("script", "style", "connect", "img")} == {
            "'self'"
        }
        assert (policy["require-trusted-types-for"], policy["trusted-types"]) == (
            "'script'",
            "'none'",
        )
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not any(
            word in answer.text for word in ("innerHTML", "insertAdjacentHTML", "eval(", "https://")
        )
        again = await keyed.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    page = (await keyed.get("/console")).text
    assert "<script>" not in page
    assert "style=" not in page


@pytest.mark.parametrize("slashes", ["/", "/?theme=dark"])
@pytest.mark.parametrize("prefix", ["", "/models/tandem"])
async def test_a_slash_after_the_page_leads_to_the_page_without_one(
    keyed: httpx.AsyncClient, prefix: str, slashes: str
) -> None:
    """`prefix`: which a proxy removes."""
    moved = await keyed.get(f"/console{slashes}")
    assert (moved.status_code, moved.content) == (307, b"")
    page = urljoin(f"http://host{prefix}/console{slashes}", moved.headers["location"])
    assert page == f"http://host{prefix}/console"
    found = await keyed.get(urlsplit(page).path.removeprefix(prefix))
    files = re.findall('(?:href|src)="([^#"]+)"', found.text)
    assert len(files) >= 4
    assert {urlsplit(urljoin(page, file)).path.removeprefix(prefix) for file in files} <= (
        STATIC_PATHS
    )
    twice = await keyed.get("/console//")  # of which urljoin would drop an empty segment
    assert twice.headers["location"] == "../../console"


async def test_the_arithmetic_of_the_model_needs_a_key_and_numbers(
    keyed: httpx.AsyncClient, feed: ConsoleFeed
) -> None:
    counts = {"prompt_tokens": "7", "output_tokens": "5"}
    ops = bearer("ops")
    assert (await keyed.get("/console/explain", params=counts)).status_code == 401
    unknown = await keyed.get("/console/explain", params=counts, headers=ops)
    assert unknown.status_code == 503
    assert "does not know" in unknown.json()["error"]["message"]

    async def explain(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
        return {"counts": [prompt_tokens, output_tokens]}

    feed.explain = explain
    found = await keyed.get("/console/explain", params=counts, headers=ops)
    assert found.json() == {"counts": [7, 5]}
    assert found.headers["cache-control"] == "no-store"
    for bad in ("", "-1", "x", "1e3", "9" * 10):
        refused = await keyed.get(
            "/console/explain", params=counts | {"output_tokens": bad}, headers=ops
        )
        assert refused.status_code == 400
        assert "output_tokens" in refused.json()["error"]["message"]


@pytest.mark.parametrize("key", ["", "wrong"])
async def test_the_data_needs_a_key(keyed: httpx.AsyncClient, key: str) -> None:
    answer = await keyed.get(DATA, headers=bearer(key) if key else {})
    assert answer.status_code == 401


async def test_polls_do_not_count_against_the_limits_of_a_key(keyed: httpx.AsyncClient) -> None:
    for _ in range(10):
        await data(keyed, key="ada")
    calls = [await keyed.get("/v1/models", headers=bearer("ada")) for _ in range(4)]
    assert [call.status_code for call in calls] == [200, 200, 200, 429]


async def test_polls_of_one_key_are_bounded_and_cost_no_other_key_any(
    keyed: httpx.AsyncClient,
) -> None:
    answers = await asyncio.gather(*(keyed.get(DATA, headers=bearer("bob")) for _ in range(200)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) > 100
    assert refused[0].headers["retry-after"] == "1"
    await data(keyed, key="ops")
    assert (await keyed.get("/v1/models", headers=bearer("bob"))).status_code == 200


async def test_polls_without_a_key_are_bounded_together(
    generation: GenerationService, source: FakeTokenSource, feed: ConsoleFeed
) -> None:
    async for client in served(
        generation, source, feed, Authenticator(share_anonymous_prefixes=False)
    ):
        answers = await asyncio.gather(*(client.get(DATA) for _ in range(200)))
        assert {answer.status_code for answer in answers} == {200, 429}
        assert (await client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("path", ["/console", DATA])
@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "https://evil.example"}])
async def test_another_page_reads_neither_page_nor_data(
    http: httpx.AsyncClient, path: str, headers: dict[str, str]
) -> None:
    assert (await http.get(path, headers=headers)).status_code == 403


async def test_a_request_is_shown_while_it_runs_and_when_it_has_ended(
    http: httpx.AsyncClient, source: FakeTokenSource, feed: ConsoleFeed
) -> None:
    source.stall_after = 3
    feed.sample()
    first = await data(http)
    assert (first["is_whole"], first["running"], first["ended"], first["service"]) == (
        True,
        [],
        [],
        None,
    )
    async with http.stream(
        "POST", CHAT, json=body(CHAT, stream=True), headers={"x-request-id": "mine"}
    ) as answer:
        lines = answer.aiter_lines()
        while "content" not in await anext(lines):
            pass
        found = await data(http, first["cursor"])
        assert [(each["id"], each["model"]) for each in found["running"]] == [("mine", "tiny")]
        assert (found["num_running"], found["is_whole"]) == (1, False)
        feed.sample()
        assert (await data(http, found["cursor"]))["samples"][-1]["running"] == 1
    await source.wait_running(0)
    found = await data(http, first["cursor"])
    assert found["running"] == []
    (ended,) = found["ended"]
    assert (ended["id"], ended["finish"], ended["attempts"]) == ("mine", "cancelled", 1)
    assert ended["tokens"] > 0
    assert len(ended["stages"]) == len(PARTS)
    assert (await data(http, found["cursor"]))["ended"] == []


async def test_why_requests_have_ended(
    http: httpx.AsyncClient, source: FakeTokenSource, feed: ConsoleFeed
) -> None:
    source.answer = b"so it ends"
    await http.post(TEXT, json=body(TEXT, max_tokens=2))
    await http.post(TEXT, json=body(TEXT, n=2, max_tokens=200, stop=["e"]))
    source.error = Unavailable("no worker is ready")
    await http.post(TEXT, json=body(TEXT))
    source.error = ValueError("a defect")
    await http.post(TEXT, json=body(TEXT))
    feed.sample()
    found = await data(http)
    assert [each["finish"] for each in found["ended"]] == [
        "length",
        "stop",
        "unavailable",
        "internal",
    ]
    (sample,) = found["samples"]
    assert (sample["begun"], sample["ended"], sample["failed"], sample["running"]) == (4, 4, 2, 0)
    assert sample["tokens"] == sum(each["tokens"] for each in found["ended"])


async def test_a_tenant_sees_his_own_requests_and_an_operator_all(
    keyed: httpx.AsyncClient, source: FakeTokenSource
) -> None:
    for key in ("ada", "bob"):
        await keyed.post(
            TEXT, json=body(TEXT, max_tokens=2), headers=bearer(key) | {"x-request-id": f"of {key}"}
        )
    source.stall_after = 1
    held = asyncio.create_task(keyed.post(TEXT, json=body(TEXT), headers=bearer("bob")))
    await source.wait_running(1)
    seen = {key: await data(keyed, key=key) for key in ("ada", "bob", "ops")}
    held.cancel()
    await source.wait_running(0)
    assert {key: [each["id"] for each in found["ended"]] for key, found in seen.items()} == {
        "ada": ["of ada"],
        "bob": ["of bob"],
        "ops": ["of ada", "of bob"],
    }
    assert {key: found["num_running"] for key, found in seen.items()} == {
        "ada": 0,
        "bob": 1,
        "ops": 1,
    }
    assert seen["ada"]["viewer"] == {"key": "ada", "tenant": "ada", "sees_all": False}


def described_worker() -> dict[str, Any]:
    return {
        "id": "w",
        "role": "decode",
        "state": "ready",
        "epoch": 1_795_894_800_123_456_789,
        "transports": {},
        "integrity_ok": True,
        "num_requests": 5,
        "num_leases": 2,
        "num_restored_tokens": 77,
        "load": {"num_running": 5},
    }


async def test_sums_and_loads_are_those_of_the_viewer(
    generation: GenerationService, source: FakeTokenSource
) -> None:
    """Requests of one tenant do not change the sums that another tenant sees."""

    async def describe() -> dict[str, Any]:
        return {"service": "mine", "workers": [described_worker()], "routers": []}

    feed = ConsoleFeed(generation.telemetry, describe)
    sums = {"begun", "ended", "failed", "tokens", "prompt_tokens", "running", "queued"}
    async for client in served(generation, source, feed, Authenticator(KEYS)):
        feed.sample()
        for _ in range(3):
            await client.post(TEXT, json=body(TEXT, max_tokens=4), headers=bearer("bob"))
        source.stall_after = 1
        held = asyncio.create_task(client.post(TEXT, json=body(TEXT), headers=bearer("bob")))
        await source.wait_running(1)
        feed.sample()
        seen = {key: await data(client, key=key) for key in ("ada", "bob", "ops")}
        held.cancel()
        await source.wait_running(0)
    last = {key: found["samples"][-1] for key, found in seen.items()}
    assert {last["ada"][name] for name in sums} == {0}
    assert (last["ada"]["ttft"], last["ada"]["tpot"]) == (None, None)
    assert last["bob"] == last["ops"]
    assert (last["bob"]["begun"], last["bob"]["ended"], last["bob"]["running"]) == (4, 3, 1)
    assert last["bob"]["tokens"] >= 12
    assert last["bob"]["ttft"] is not None
    workers = {key: found["service"]["workers"] for key, found in seen.items()}
    text_epoch = {"epoch": "1795894800123456789"}  # JavaScript would round the number
    assert workers["ops"] == [described_worker() | text_epoch]
    shown = {
        name: described_worker()[name]
        for name in ("id", "role", "state", "transports", "integrity_ok")
    }
    assert workers["ada"] == workers["bob"] == [shown | text_epoch]


async def test_a_cursor_does_not_tell_how_many_requests_of_others_have_ended(
    keyed: httpx.AsyncClient, feed: ConsoleFeed
) -> None:
    """The number of a cursor is a time, which grows at the same rate without requests of others."""
    numbers = clock_numbers(iter([0.0, *[0.001] * 5, 1.0]).__next__)
    assert list(itertools.islice(numbers, 6)) == [
        FIRST_NUMBER + n for n in (*range(1000, 1005), 1_000_000)
    ]
    began = time.monotonic()
    feed.sample()
    before = (await data(keyed, key="ada"))["cursor"]
    for _ in range(5):
        await keyed.post(TEXT, json=body(TEXT, max_tokens=2), headers=bearer("bob"))
    assert (await data(keyed, key="ada"))["cursor"] == before
    feed.sample()
    found = await data(keyed, before, key="ada")
    assert (len(found["samples"]), found["is_whole"]) == (1, False)
    first, second = (int(cursor.partition(".")[2]) for cursor in (before, found["cursor"]))
    assert 0 < second - first < (time.monotonic() - began + 1) * 1e6
    beyond = before.partition(".")[0] + f".{second + 1}"  # says nothing of what others have
    assert not (await data(keyed, beyond, key="ada"))["is_whole"]


async def test_callers_without_a_key_see_no_requests_but_on_loopback(
    generation: GenerationService, source: FakeTokenSource, feed: ConsoleFeed
) -> None:
    async for client in served(generation, source, feed, Authenticator(anonymous_sees_all=False)):
        await client.post(TEXT, json=body(TEXT, max_tokens=2))
        feed.log.events.add({"kind": "request", "tenant": "", "worker": "w", "cause": "crash"})
        found = await data(client)
        assert (found["ended"], found["events"]) == ([], [])
        feed.sample()
        (sample,) = (await data(client))["samples"]
        assert (sample["begun"], sample["ended"], sample["tokens"]) == (0, 0, 0)


async def test_no_prompt_or_token_text_is_in_the_data(
    keyed: httpx.AsyncClient, source: FakeTokenSource, feed: ConsoleFeed
) -> None:
    source.answer = CANARY.encode()
    chat = [{"role": "user", "content": CANARY}]
    await keyed.post(
        CHAT, json={"messages": chat, "stop": [CANARY], "logprobs": True}, headers=bearer("bob")
    )
    await keyed.post(TEXT, json=body(TEXT, prompt=CANARY, echo=True), headers=bearer("bob"))
    feed.sample()
    answer = await keyed.get(DATA, headers=bearer("ops"))
    assert len(answer.json()["ended"]) == 2
    assert CANARY not in answer.text
    assert str(list(CANARY.encode()))[1:-1] not in answer.text  # nor its token ids


@pytest.mark.parametrize(
    "cursor", ["x", "00000000", "00000000.-1", "0000000g.1", f"00000000.{'1' * 16}"]
)
async def test_an_invalid_cursor_is_refused_by_name(http: httpx.AsyncClient, cursor: str) -> None:
    answer = await http.get(DATA, params={"cursor": cursor})
    assert (answer.status_code, answer.json()["error"]["message"][:7]) == (400, "cursor:")


async def test_a_cursor_of_another_router_gets_the_whole(http: httpx.AsyncClient) -> None:
    await http.post(TEXT, json=body(TEXT, max_tokens=2))
    for cursor in ("00000000.1", (await data(http))["cursor"].partition(".")[0] + ".999"):
        found = await data(http, cursor)
        assert (found["is_whole"], len(found["ended"])) == (True, 1)


async def test_the_log_is_bounded(http: httpx.AsyncClient) -> None:
    async def ask(number: int) -> None:
        await http.post(TEXT, json=body(TEXT, max_tokens=1), headers={"x-request-id": str(number)})

    for first in range(0, MAX_ENDED + 20, 20):
        await asyncio.gather(*(ask(number) for number in range(first, first + 20)))
    assert len((await data(http))["ended"]) == MAX_ENDED


async def test_polls_share_one_description_of_the_service(
    generation: GenerationService,
) -> None:
    described = 0

    async def describe() -> dict[str, Any]:
        nonlocal described
        described += 1
        return {"service": "mine", "workers": []}

    feed = ConsoleFeed(generation.telemetry, describe)
    answers = await asyncio.gather(*(feed.answer("", Caller()) for _ in range(20)))
    assert {json.loads(answer)["service"]["service"] for answer in answers} == {"mine"}
    assert described == 1
    with pytest.raises(InvalidArgument):
        await feed.answer("?", Caller())


def test_interruptions_become_events_once() -> None:
    telemetry, timeline = RequestTelemetry(), inference_pb2.Timeline()
    log, arrived = RequestLog(telemetry), time.monotonic()
    facts = RequestFacts(
        request_id="r",
        tenant="ada",
        arrived=arrived,
        began=0.0,
        num_prompt=1,
        num_choices=1,
        max_tokens=1,
    )
    with telemetry.track(facts, timeline, NoOutputs()):
        for worker in ("d1", "d2"):
            timeline.interruptions.add(
                cause="crash", worker=worker, at_seconds=time.monotonic() - arrived
            )
            log.sample()
        timeline.interruptions.add(
            cause="crash", worker="d3", at_seconds=time.monotonic() - arrived
        )
    events = [each for _, each in log.events.after(0)]
    assert [each["worker"] for each in events] == ["d1", "d2", "d3"]
    assert {(each["cause"], each["request"], each["tenant"]) for each in events} == {
        ("crash", "r", "ada")
    }


class NoOutputs:
    """Stands for the outputs of a request without a token."""

    num_generated = 0
    longest_choice = 0

    def __init__(self, *finish_reasons: "inference_pb2.FinishReason") -> None:
        self.finish_reasons = finish_reasons


async def test_the_page_shows_no_normal_end_as_a_failure() -> None:
    telemetry = RequestTelemetry()
    log = RequestLog(telemetry)
    facts = RequestFacts(
        request_id="r",
        arrived=time.monotonic(),
        began=0.0,
        num_prompt=1,
        num_choices=1,
        max_tokens=1,
    )
    for number in inference_pb2.FinishReason.values():
        reason = cast(inference_pb2.FinishReason, number)
        with telemetry.track(facts, inference_pb2.Timeline(), NoOutputs(reason)):
            pass
    with (
        suppress(asyncio.CancelledError),
        telemetry.track(facts, inference_pb2.Timeline(), NoOutputs()),
    ):
        raise asyncio.CancelledError
    script = (_STATIC / "requests.js").read_text()
    (listed,) = re.findall(r"const GOOD = new Set\(\[(.*)\]\);", script)
    ends = {each["finish"] for _, each in log.ended.after(0)}
    assert ends == set(json.loads(f"[{listed}]"))


def test_the_page_has_words_for_each_cause_of_an_interruption() -> None:
    script = (_STATIC / "recoveries.js").read_text()
    (listed,) = re.findall(r"const CAUSES = \{(.*?)\};", script, re.DOTALL)
    described = set(re.findall(r"^  (\w+): \".+\",$", listed, re.MULTILINE))
    assert {cause.name.lower() for cause in Cause} <= described


def test_changes_of_workers() -> None:
    def worker(worker_id: str, **fields: Any) -> worker_pb2.WorkerInfo:
        return worker_pb2.WorkerInfo(worker_id=worker_id, **fields)

    before = [
        worker("a", epoch=1),
        worker("b", epoch=1),
        worker("c", epoch=1),
        worker("d", draining=True),
        worker("f", epoch=1, role=worker_pb2.ROLE_DECODE),
    ]
    after = [
        worker("a", epoch=1, draining=True),
        worker("b", epoch=2),
        worker("d", draining=True),
        worker("e"),
        worker("f", epoch=2, role=worker_pb2.ROLE_PREFILL),
    ]
    lists = [{each.worker_id: each for each in listed} for listed in (before, after)]
    assert [(each["worker"], each["cause"]) for each in worker_changes(*lists)] == [
        ("a", "draining"),
        ("b", "restarted"),
        ("c", "left"),
        ("e", "joined"),
        ("f", "switched"),
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], None), ([2.0], [2.0, 2.0]), ([*map(float, range(1, 101))], [50.0, 95.0])],
)
def test_percentiles_by_nearest_rank(values: list[float], expected: list[float] | None) -> None:
    assert percentiles(values) == expected
