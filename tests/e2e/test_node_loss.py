"""Tests the death of a node with a router, a prefill worker and a decode worker: its streams go on
at the processes of the other nodes.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.tests.service import NODES, small_config, wait_until_idle, workers
from tandem.tests.waits import WAIT

LOST = "127.0.0.5"  # the address of the node
NUM_STREAMS = 12
NUM_TOKENS = 600
PROMPTS = [[(17 * i + 5 * n) % 400 + 3 for i in range(1 + 30 * n)] for n in range(NUM_STREAMS)]


@pytest.fixture(scope="module")
def node(cluster: Any) -> Iterator[Any]:
    """Adds a node that takes one process of each kind."""
    added = cluster.add_node(
        node_ip_address=LOST,
        num_cpus=3,
        object_store_memory=100 * 2**20,
        resources=dict.fromkeys(NODES, 100),
    )
    cluster.wait_for_nodes()
    yield added
    if added in cluster.worker_nodes:  # the test failed before
        cluster.remove_node(added)


@pytest.fixture(scope="module")
def service(address: str, node: Any, tiny_model: Path) -> Iterator[Any]:
    """A service with two processes of each kind, one of which is on the added node."""
    from tandem.cluster.serve.launch import start_service

    overrides: dict[str, object] = {"router.local_prefill_tokens": 0}
    for kind in NODES:
        overrides |= {f"{kind}.replicas": 2, f"{kind}.resources": {kind: 60.0}}
    with start_service(
        small_config(tiny_model, "nodes", overrides), str(tiny_model), address=address
    ) as running:
        yield running


async def generate_all(addresses: list[str]) -> list[list[int]]:
    """Returns the tokens of all prompts, half of them sampled. Each has a client of its own."""
    from tandem.router.client.client import AsyncClient

    async def generate(number: int) -> list[int]:
        async with AsyncClient(",".join(addresses)) as client:  # begins with a random address
            answer = await client.generate(
                PROMPTS[number],
                temperature=number % 2,
                seed=number,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                timeout=120,
            )
            return list(answer.token_ids)

    return list(await asyncio.gather(*map(generate, range(NUM_STREAMS))))


async def test_a_node_dies_and_its_streams_go_on(service: Any, cluster: Any, node: Any) -> None:
    found = workers(service.status_url)
    assert sorted(each["role"] for each in found if each["address"].startswith(LOST)) == [
        "decode",
        "prefill",
    ]
    (alive,) = (each for each in service.grpc_addresses if not each.startswith(LOST))
    expected = await generate_all([alive])
    streams = asyncio.create_task(generate_all(service.grpc_addresses))
    await until_streams_run(service)
    await asyncio.to_thread(kill, cluster, node)
    assert await streams == expected
    left = await asyncio.to_thread(wait_until_idle, service.status_url)
    assert not any(each["address"].startswith(LOST) for each in left)
    assert await generate_all([alive]) == expected
    wait_until_idle(service.status_url)


async def until_streams_run(service: Any) -> None:
    """Waits until the decode worker of the lost node has streams."""
    deadline = time.monotonic() + WAIT
    while not any(
        each["load"]["num_running"]
        for each in await asyncio.to_thread(workers, service.status_url)
        if each["role"] == "decode" and each["address"].startswith(LOST)
    ):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def kill(cluster: Any, node: Any) -> None:
    """Kills the processes of a node, which all descend from its raylet, at once."""
    (raylet,) = (psutil.Process(each.process.pid) for each in node.all_processes["raylet"])
    for process in [*raylet.children(recursive=True), raylet]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    cluster.remove_node(node, allow_graceful=False)
