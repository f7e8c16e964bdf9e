"""Tests services whose workers' ranks are processes on a Ray cluster, split unequally; and the
death of one rank.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.tests.service import NODES, expected_tokens, small_config, wait_until_idle, workers
from tandem.tests.waits import START, WAIT

NUM_TOKENS = 60
FEW_TOKENS = 20  # of answers that nothing disturbs
PROMPTS = [[(17 * i + 5 * n) % 400 + 3 for i in range(1 + 17 * n)] for n in range(16)]


@pytest.fixture(scope="module")
def expected(split_model: Path) -> list[list[int]]:
    return expected_tokens(split_model, PROMPTS, NUM_TOKENS)


@pytest.fixture
def service(request: pytest.FixtureRequest, address: str, split_model: Path) -> Iterator[Any]:
    """Runs a service with these settings of the pools; checks that all its processes end with
    it.
    """
    from tandem.cluster.serve.launch import start_service

    overrides: dict[str, object] = {f"{role}.resources": {role: 1.0} for role in NODES}
    overrides |= {"router.local_prefill_tokens": 0} | request.param
    with start_service(
        small_config(split_model, "split", overrides), str(split_model), address=address
    ) as running:
        yield running
        processes = (
            processes_of("RankActor") | processes_of("DecodePool") | processes_of("PrefillPool")
        )
    assert processes
    assert not still_running(processes, 0)


def processes_of(kind: str) -> dict[int, psutil.Process]:
    """Returns the processes of this kind of Ray actor by pid: RankActor is any rank other than 0.

    Others on this machine may run a service, too: only the cluster of this process counts.
    """
    family = psutil.Process().children(recursive=True)
    return {process.pid: process for process in family if kind in _title(process)}


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def names_of_actors() -> set[str]:
    """Returns the names of Ray actors, as its dashboard shows them."""
    import ray

    return {each["name"] for each in ray.util.list_named_actors(all_namespaces=True)}


def names_of_placement_groups() -> set[str]:
    import ray

    return {each["name"] for each in ray.util.placement_group_table().values()}


async def answers(address: str, num_tokens: int = NUM_TOKENS) -> list[Any]:
    from tandem.router.client.client import AsyncClient

    async with AsyncClient(address) as client:
        asked = [
            client.generate(
                prompt, temperature=0, max_tokens=num_tokens, ignore_eos=True, timeout=120
            )
            for prompt in PROMPTS
        ]
        return list(await asyncio.gather(*asked))


@pytest.mark.parametrize(
    "service",
    [
        {
            "prefill.tp": 2,
            "prefill.placement": "STRICT_SPREAD",
            "prefill.resources": {},
            "peer_tls.mode": "cluster",
        }
    ],
    indirect=True,
)
async def test_prefill_in_two_ranks_on_two_nodes_decode_in_one(
    service: Any, expected: list[list[int]]
) -> None:
    """With TLS between all of them."""
    assert {worker["role"]: worker["tp"] for worker in workers(service.status_url)} == {
        "prefill": 2,
        "decode": 1,
    }
    assert len(processes_of("RankActor")) == 1
    (prefill,) = (
        worker["id"] for worker in workers(service.status_url) if worker["role"] == "prefill"
    )
    replica = f"SERVE_REPLICA::{service.application}#PrefillPool#{prefill.removeprefix('prefill-')}"
    assert {replica, f"{prefill} rank 1 of 2"} <= names_of_actors()
    assert replica in names_of_placement_groups()
    found = await answers(service.grpc_address, FEW_TOKENS)
    assert [list(answer.token_ids) for answer in found] == first_of(expected)
    assert all(answer.timeline.kv_transfer_bytes > 0 for answer in found)
    assert {name for answer in found for name in answer.timeline.kv_transport.split("+")} <= {
        "grpc",
        "shared",
    }
    (decode,) = (worker for worker in workers(service.status_url) if worker["role"] == "decode")
    assert (
        len({endpoint.partition(":")[0] for endpoint in decode["transports"]}) == 2
    )  # one for each node
    assert set(decode["transports"].values()) == {"shared"}
    wait_until_idle(service.status_url)


@pytest.mark.parametrize("service", [{"decode.tp": 2, "decode.replicas": 2}], indirect=True)
async def test_a_rank_dies_in_mid_stream(service: Any, expected: list[list[int]]) -> None:
    """Prefill in one rank, decode in two: the worker of the dead rank goes and comes back, the
    other's streams never notice, and all of them end with the right tokens.
    """
    before = {worker["id"] for worker in workers(service.status_url)}
    ranks, zeros = processes_of("RankActor"), processes_of("DecodePool")
    assert (len(ranks), len(zeros)) == (2, 2)
    asked = asyncio.create_task(answers(service.grpc_address))
    await busy(service.status_url)
    os.kill(min(ranks), signal.SIGKILL)
    assert (
        len(await asyncio.to_thread(still_running, zeros, 1)) == 1
    )  # its rank 0 does not stay, either
    found = await asked
    assert [list(answer.token_ids) for answer in found] == expected
    assert {answer.timeline.attempts for answer in found} == {
        1,
        2,
    }  # streams untouched, and streams moved
    after = await back(service.status_url, before)
    assert len(before & after) == 2  # the prefill worker and the other decode worker
    assert len(processes_of("RankActor")) == 2
    found = await answers(service.grpc_address, FEW_TOKENS)
    assert [list(answer.token_ids) for answer in found] == first_of(expected)
    wait_until_idle(service.status_url)


def first_of(expected: list[list[int]]) -> list[list[int]]:
    return [tokens[:FEW_TOKENS] for tokens in expected]


async def busy(status_url: str) -> None:
    """Until both decode workers have streams."""
    deadline = time.monotonic() + WAIT
    while not all(w["load"]["num_running"] for w in workers(status_url) if w["role"] == "decode"):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def back(status_url: str, before: set[str]) -> set[str]:
    """The workers' ids, once there are as many as before, all ready, not all the same."""
    deadline = time.monotonic() + START
    while True:
        ready = {worker["id"] for worker in workers(status_url) if worker["state"] == "ready"}
        if len(ready) == len(before) and ready != before:
            return ready
        assert time.monotonic() < deadline, ready
        await asyncio.sleep(0.1)


def still_running(processes: dict[int, psutil.Process], most: int) -> list[psutil.Process]:
    """Those that have not ended, as soon as they are at most so many."""
    deadline = time.monotonic() + WAIT
    while True:
        _, alive = psutil.wait_procs(list(processes.values()), timeout=0.1)
        if len(alive) <= most or time.monotonic() > deadline:
            return list(alive)
