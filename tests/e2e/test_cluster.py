"""A service on a Ray cluster of a head and three nodes, each with an address of its own, on this machine."""

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.tests.tiny import make_tiny_model

NODES = {"router": "127.0.0.2", "prefill": "127.0.0.3", "decode": "127.0.0.4"}
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The cluster's address. Each node but the head offers one custom resource."""
    from ray.cluster_utils import Cluster

    head: dict[str, Any] = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for name, ip in NODES.items():
            cluster.add_node(num_cpus=2, node_ip_address=ip, resources={name: 100}, object_store_memory=100 * 2**20)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def service(address: str, model: Path) -> Iterator[Any]:
    from tandem.cluster.config import load_config
    from tandem.cluster.launch import start_service

    overrides: dict[str, object] = {"model": str(model), "dtype": "float32", "name": "crossing", "status_port": 8123}
    for name in NODES:
        overrides[f"{name}.resources"] = {name: 1.0}
    overrides |= {"prefill.replicas": 2, "decode.replicas": 2, "prefill.kv_cache_gb": 0.05, "decode.kv_cache_gb": 0.05}
    overrides |= {"router.grpc_port": 0, "router.http_port": 0, "prefill.block_size": 8}
    with start_service(load_config(None, overrides), str(model), address=address) as running:
        yield running


def expected_tokens(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates greedily."""
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made = []
    for prompt in prompts:
        ids = torch.tensor([prompt])  # [1, prompt]
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        made.append(out[0, len(prompt) :].tolist())
    return made


def workers(status_url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(status_url, timeout=10) as reply:
        found: list[dict[str, Any]] = json.load(reply)["workers"]
    return found


def wait_until_idle(status_url: str, seconds: float = 10) -> None:
    """Fails unless every worker soon holds no job, lease, transfer or block, with balanced books."""
    deadline = time.monotonic() + seconds
    while True:
        found = workers(status_url)
        assert all(worker["balanced"] for worker in found)
        loads = [worker["load"] for worker in found]
        held = [load["owned_blocks"] + load["leased_blocks"] + load["reserved_blocks"] for load in loads]
        held += [worker["jobs"] + worker["leases"] + worker["transfers"] for worker in found]
        if not any(held):
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_workers_are_on_the_nodes_they_were_meant_for(service: Any) -> None:
    found = workers(service.status_url)
    assert sorted(worker["role"] for worker in found) == ["decode", "decode", "prefill", "prefill"]
    for worker in found:
        assert worker["address"].startswith(NODES[worker["role"]] + ":")
    assert service.grpc_address.startswith(NODES["router"] + ":")


async def test_sixteen_mixed_requests_cross_the_nodes(service: Any, model: Path) -> None:
    from tandem.router.client import AsyncClient

    prompts = [
        [(17 * i + 5 * n) % 400 + 3 for i in range(length)] for n, length in enumerate([1, 7, 8, 9, 40, 130, 300, 700])
    ]
    expected = expected_tokens(model, prompts)
    async with AsyncClient(service.grpc_address) as client:
        greedy = [
            client.generate(prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, timeout=60)
            for prompt in prompts
        ]
        sampled = [
            client.generate(prompt, temperature=1, seed=n, max_tokens=NUM_TOKENS, ignore_eos=True, timeout=60)
            for n, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*greedy, *sampled)
        again = await asyncio.gather(
            *(
                client.generate(prompt, temperature=1, seed=n, max_tokens=NUM_TOKENS, ignore_eos=True, timeout=60)
                for n, prompt in enumerate(prompts)
            )
        )
    assert [list(answer.token_ids) for answer in answers[: len(prompts)]] == expected
    assert [answer.token_ids for answer in answers[len(prompts) :]] == [answer.token_ids for answer in again]
    assert all(answer.timeline.kv_transfer_bytes > 0 for answer in answers[:4])
    assert len({answer.timeline.prefill_worker for answer in answers}) == 2
    assert len({answer.timeline.decode_worker for answer in answers}) == 2
    wait_until_idle(service.status_url)


async def test_clients_that_go_away_free_their_blocks_within_a_second(service: Any) -> None:
    from tandem.router.client import AsyncClient

    async def leave_early(client: AsyncClient, number: int) -> None:
        prompt = [number + 3] * (20 * number + 1)
        async with client.stream(prompt, temperature=0, max_tokens=1000, ignore_eos=True, timeout=60) as stream:
            async for delta in stream:
                if delta.first_index >= number:
                    return

    async with AsyncClient(service.grpc_address) as client:
        await asyncio.gather(*(leave_early(client, number) for number in range(8)))
    wait_until_idle(service.status_url, seconds=1)
