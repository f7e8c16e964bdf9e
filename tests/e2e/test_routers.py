"""Tests a service with two routers on one node: both serve, through the death of Serve's
controller, and one goes on when the other is killed, also with the streams of the other, for
clients that know both.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tandem.proto.errors import NotFound
from tandem.tests.adapters import make_adapter, peft_reference
from tandem.tests.metrics_page import scrape, scrape_until
from tandem.tests.prometheus import dashboard_expressions, prometheus, vllm_expressions
from tandem.tests.service import expected_tokens, small_config, status, wait_until_idle
from tandem.tests.waits import START, WAIT
from tandem.tests.workers.model.helpers import reference_greedy

NUM_TOKENS = 100
BATCH_LINES = 60
LONG = 600  # tokens of the streams during which a router is killed
PROMPTS = [[(17 * i + 5 * n) % 400 + 3 for i in range(1 + 60 * n)] for n in range(6)]


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two adapters."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("configured", "loaded")):
        make_adapter(root / name, tiny_model, seed=seed)
    return root


@pytest.fixture(scope="module")
def service(address: str, tiny_model: Path, adapters: Path) -> Iterator[Any]:
    """A service whose two routers are configured with the same ports."""
    from tandem.cluster.serve.launch import start_service

    overrides: dict[str, object] = {
        "router.replicas": 2,
        "router.resources": {"router": 1.0},
        "router.local_prefill_tokens": 0,
        "role_scaling.window_seconds": 0.5,  # two workers always have one role each
    }
    # Below those that the kernel gives to connections.
    overrides |= {"router.grpc_port": 21_051, "router.http_port": 21_080}
    overrides |= {
        "adapters": {"configured": str(adapters / "configured")},
        "lora.folder": str(adapters),
    }
    with start_service(
        small_config(tiny_model, "routers", overrides), str(tiny_model), address=address
    ) as running:
        yield running


async def generate_all(
    address: str, num_tokens: int = NUM_TOKENS, max_retries: int = 2
) -> list[list[int]]:
    from tandem.router.client.client import AsyncClient

    async def generate(prompt: list[int]) -> list[int]:
        async with AsyncClient(
            address, max_retries=max_retries
        ) as client:  # of several addresses each begins with a random one
            options: Any = {
                "temperature": 0,
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "timeout": 120,
            }
            return list((await client.generate(prompt, **options)).token_ids)

    return list(await asyncio.gather(*map(generate, PROMPTS)))


def routers(service: Any) -> dict[str, str]:
    """Returns the gRPC address of each router of the status page, by its id."""
    return {router["id"]: router["grpc"] for router in status(service.status_url)["routers"]}


async def test_both_routers_serve_on_ports_of_their_own(service: Any, tiny_model: Path) -> None:
    assert len({*service.grpc_addresses, *service.http_addresses, *service.ops_addresses}) == 6
    assert "127.0.0.2:21051" in service.grpc_addresses
    grpc, http, ops = map(
        ",".join, (service.grpc_addresses, service.http_addresses, service.ops_addresses)
    )
    assert service.addresses == f"grpc={grpc} http={http} ops={ops}"
    assert sorted(routers(service).values()) == sorted(service.grpc_addresses)
    expected = expected_tokens(tiny_model, PROMPTS, NUM_TOKENS)
    found = await asyncio.gather(*(generate_all(address) for address in service.grpc_addresses))
    assert found == [expected, expected]
    wait_until_idle(service.status_url)


async def test_an_adapter_loaded_at_one_router_is_served_by_the_other(
    service: Any, tiny_model: Path, adapters: Path
) -> None:
    from tandem.router.client.client import AsyncClient

    reference = peft_reference(
        tiny_model, {name: adapters / name for name in ("configured", "loaded")}
    )
    first, second = (AsyncClient(address) for address in service.grpc_addresses)

    async def served(client: AsyncClient) -> list[str]:
        return [
            each.id
            for each in await client.list_models()
            if each.parent == service.config.served_name
        ]

    async with first, second, asyncio.timeout(WAIT):
        await first.load_lora_adapter("loaded", "loaded")
        while await served(second) != ["configured", "loaded"]:
            await asyncio.sleep(0.01)
        for name in ("configured", "loaded"):
            reference.set_adapter(name)
            expected = reference_greedy(reference, PROMPTS[3], 20)
            for client in (first, second):
                made = await client.generate(
                    PROMPTS[3], model=name, temperature=0, max_tokens=20, ignore_eos=True
                )
                assert list(made.token_ids) == expected
        await second.unload_lora_adapter("loaded")
        while await served(first) != ["configured"]:
            await asyncio.sleep(0.01)
        with pytest.raises(NotFound):
            await first.generate(PROMPTS[3], model="loaded")


async def test_the_figures_of_both_routers_add_up(service: Any) -> None:
    names = (
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_count",
    )
    before = await scrape(*service.ops_addresses)
    await asyncio.gather(*(generate_all(address) for address in service.grpc_addresses))
    after = await scrape_until(
        lambda page: page.value("vllm:num_requests_running") == 0, *service.ops_addresses
    )
    num_requests = 2 * len(PROMPTS)
    grown = [after.value(name) - before.value(name) for name in names]
    assert grown == [num_requests * NUM_TOKENS, num_requests, num_requests]
    assert after.value("tandem_ready") == 2


async def test_every_panel_of_the_dashboard_has_a_series(service: Any, tmp_path: Path) -> None:
    """In a real Prometheus, which scrapes the routers and the agents of Ray; and each of vLLM's own
    dashboard.
    """
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    name = service.config.served_name
    agents = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in nodes]
    with prometheus(tmp_path, {"routers": service.ops_addresses, "ray": agents}) as server:
        load = asyncio.create_task(keep_busy(service))
        try:
            await asyncio.to_thread(server.wait_for, f"count(up == 1) >= {2 + len(agents)}")
            for expression in (*dashboard_expressions(name), *vllm_expressions(name)):
                await asyncio.to_thread(server.wait_for, expression)
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
    wait_until_idle(service.status_url)


async def keep_busy(service: Any) -> None:
    """Sends short requests to both routers a few times a second.

    Prometheus needs growing counters, and leaves more of the cores to other tests.
    """
    while True:
        await asyncio.gather(*(generate_all(address, 8) for address in service.grpc_addresses))
        await asyncio.sleep(0.25)


async def test_a_killed_serve_controller_takes_no_replica_with_it(
    service: Any, tiny_model: Path
) -> None:
    addresses = [
        *service.grpc_addresses,
        *(worker["address"] for worker in status(service.status_url)["workers"]),
    ]
    before = {address: pid_listening_on(address) for address in addresses}
    streams = [
        asyncio.create_task(generate_all(address, LONG)) for address in service.grpc_addresses
    ]
    await running(service)
    killed = controller_pid()
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    deadline = time.monotonic() + START
    while await asyncio.to_thread(controller_pid) in (None, killed):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    expected = expected_tokens(tiny_model, PROMPTS, NUM_TOKENS)
    for found in await asyncio.gather(*streams):
        assert [len(tokens) for tokens in found] == [LONG] * len(PROMPTS)
        assert [tokens[:NUM_TOKENS] for tokens in found] == expected
    while not await asyncio.to_thread(has_recovered, service.config.name):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert {address: pid_listening_on(address) for address in addresses} == before
    assert await generate_all(service.grpc_address) == expected
    wait_until_idle(service.status_url)


@pytest.mark.soak  # half a minute, of which 20 s are the absence
async def test_streams_begin_and_end_while_the_gcs_is_away(
    service: Any, tiny_model: Path, gcs_server: psutil.Process
) -> None:
    """A GCS server that stands still for 20 s stops no stream, and the service is the same
    afterwards.
    """
    before = routers(service)
    expected = expected_tokens(tiny_model, PROMPTS, NUM_TOKENS)
    began = time.monotonic()
    gcs_server.suspend()
    try:
        while time.monotonic() < began + 20:
            found = await asyncio.gather(
                *(generate_all(address, LONG) for address in service.grpc_addresses)
            )
            assert [[tokens[:NUM_TOKENS] for tokens in answers] for answers in found] == [
                expected,
                expected,
            ]
    finally:
        gcs_server.resume()
    deadline = time.monotonic() + START
    while not await asyncio.to_thread(has_recovered, service.config.name):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert routers(service) == before
    assert await generate_all(service.grpc_address) == expected
    wait_until_idle(service.status_url)


def controller_pid() -> int | None:
    """Returns the process of Serve's controller; None while there is none that answers."""
    import ray

    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    try:
        return int(str(ray.get(controller.get_pid.remote(), timeout=5)))
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return None


def has_recovered(name: str) -> bool:
    """Returns whether the controller knows all replicas of the service, and that they are
    healthy.
    """
    import ray
    from ray import serve

    try:
        application = serve.status().applications[name]
    except (KeyError, ray.exceptions.RayActorError):
        return False
    return application.status == "RUNNING" and all(
        deployment.status == "HEALTHY" and set(deployment.replica_states) == {"RUNNING"}
        for deployment in application.deployments.values()
    )


async def test_workers_change_roles_under_streams_and_the_directory_fills_the_gap(
    service: Any, tiny_model: Path
) -> None:
    """The only decode worker gets the other role, so the prefill worker has to take its place."""
    from tandem.cluster.serve.identity_file import read_identity
    from tandem.cluster.serve.status import switch_worker

    identity = read_identity(service.status_url)
    expected = expected_tokens(tiny_model, PROMPTS, NUM_TOKENS)
    for number in (1, 2):
        before = by_role(service)
        all_routers = ",".join(service.grpc_addresses)
        streams = [asyncio.create_task(generate_all(all_routers, LONG)) for _ in range(2)]
        await running(service, 2 * len(PROMPTS))
        await switch_worker(before["decode"]["address"], "prefill", 0.0, identity)
        ids = {"decode": before["prefill"]["id"], "prefill": before["decode"]["id"]}
        deadline = time.monotonic() + WAIT
        while {role: each["id"] for role, each in by_role(service).items()} != ids:
            assert time.monotonic() < deadline, by_role(service)
            await asyncio.sleep(0.02)
        for found in await asyncio.gather(*streams):
            assert [len(tokens) for tokens in found] == [LONG] * len(PROMPTS)
            assert [tokens[:NUM_TOKENS] for tokens in found] == expected
        wait_until_idle(service.status_url)
        after = by_role(service)
        loads = [{role: each["load"] for role, each in page.items()} for page in (before, after)]
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            assert after[role]["epoch"] == before[other]["epoch"] + 1, number
            name = "num_recomputed_tokens"
            assert after[role][name] == before[other][name]
            # Streams that end add blocks, and a switch takes none away.
            cached = after[role]["load"]["cached_blocks"]
            assert cached >= before[other]["load"]["cached_blocks"], loads
            assert cached > 0


def by_role(service: Any) -> dict[str, Any]:
    """Returns a worker of the status page for each role."""
    return {worker["role"]: worker for worker in status(service.status_url)["workers"]}


async def test_one_router_goes_on_when_the_other_is_killed(service: Any, tiny_model: Path) -> None:
    """Also with the batch and the stored response that the killed one has taken."""
    from tandem.proto.errors import TandemError

    before = routers(service)
    killed, alive = service.grpc_addresses
    at_killed, at_alive = (
        openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none")
        for address in service.http_addresses
    )
    batch_id = await begin_batch(at_killed)
    stored = await at_killed.responses.create(
        model=service.config.served_name, input="hello", max_output_tokens=4
    )
    lost = asyncio.create_task(generate_all(killed, LONG, max_retries=0))
    kept = asyncio.create_task(generate_all(alive, LONG))
    moved = asyncio.create_task(generate_all(f"{killed},{alive}", LONG))
    await running(service)
    os.kill(pid_listening_on(killed), signal.SIGKILL)
    with pytest.raises(TandemError):
        await lost
    expected = expected_tokens(tiny_model, PROMPTS, NUM_TOKENS)
    for found in await asyncio.gather(kept, moved):
        assert [len(tokens) for tokens in found] == [LONG] * len(PROMPTS)
        assert [tokens[:NUM_TOKENS] for tokens in found] == expected
    assert await generate_all(alive) == expected
    answers = await answers_of_batch(at_alive, batch_id)
    assert list(answers) == [f"line-{i}" for i in range(BATCH_LINES)]
    assert len(set(answers.values())) == 1
    assert (await at_alive.responses.retrieve(stored.id)).to_dict() == stored.to_dict()
    await at_alive.responses.create(
        model=service.config.served_name,
        previous_response_id=stored.id,
        input="and?",
        max_output_tokens=4,
    )
    deadline = time.monotonic() + START
    while (
        len(now := routers(service)) != 2 or now.keys() == before.keys()
    ):  # Serve starts another in its place
        assert time.monotonic() < deadline, now
        await asyncio.sleep(0.1)
    assert set(now.values()) == {killed, alive}  # it has the address of the one before
    for address in now.values():
        assert await generate_all(address) == expected
    wait_until_idle(service.status_url)


async def begin_batch(client: openai.AsyncOpenAI) -> str:
    """Begins a batch of equal greedy requests."""
    body = {"prompt": PROMPTS[2], "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = [json.dumps({"custom_id": f"line-{i}"} | line) for i in range(BATCH_LINES)]
    file = await client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    made = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    return made.id


async def answers_of_batch(client: openai.AsyncOpenAI, batch_id: str) -> dict[str, str]:
    """Waits for the end of a batch; returns the text by the custom id of each line."""
    deadline = time.monotonic() + WAIT
    while (batch := await client.batches.retrieve(batch_id)).status != "completed":
        assert time.monotonic() < deadline, batch
        await asyncio.sleep(0.05)
    assert batch.error_file_id is None
    assert batch.output_file_id is not None
    content = (await client.files.content(batch.output_file_id)).text
    lines = [json.loads(line) for line in content.splitlines()]
    found = {
        line["custom_id"]: str(line["response"]["body"]["choices"][0]["text"]) for line in lines
    }
    assert len(found) == len(lines)
    return found


async def running(service: Any, num_streams: int = len(PROMPTS) + 1) -> None:
    """Waits until the decode worker runs so many streams; by default, of both routers."""
    deadline = time.monotonic() + WAIT
    while (
        max(w["load"]["num_running"] for w in status(service.status_url)["workers"]) < num_streams
    ):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def pid_listening_on(address: str) -> int:
    listening = [
        (each.laddr, each.pid) for each in psutil.net_connections("tcp") if each.status == "LISTEN"
    ]
    places = {(f"{at.ip.removeprefix('::ffff:')}:{at.port}", pid) for at, pid in listening if at}
    (pid,) = {pid for place, pid in places if place == address}
    assert pid is not None
    return pid
