"""Tests a service whose router, prefill and decode workers are on different nodes of a Ray
cluster.
"""

import asyncio
import base64
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest

from tandem.tests.service import NODES, expected_tokens, small_config, wait_until_idle, workers

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def service(address: str, tiny_model: Path) -> Iterator[Any]:
    from tandem.cluster.serve.launch import start_service

    overrides: dict[str, object] = {f"{role}.resources": {role: 1.0} for role in NODES}
    overrides |= {"prefill.replicas": 2, "decode.replicas": 2, "prefill.block_size": 8}
    overrides["router.local_prefill_tokens"] = 0
    with start_service(
        small_config(tiny_model, "crossing", overrides), str(tiny_model), address=address
    ) as running:
        yield running


def test_workers_are_on_the_nodes_they_were_meant_for(service: Any) -> None:
    found = workers(service.status_url)
    assert sorted(worker["role"] for worker in found) == ["decode", "decode", "prefill", "prefill"]
    for worker in found:
        assert worker["address"].startswith(NODES[worker["role"]] + ":")
    assert service.grpc_address.startswith(NODES["router"] + ":")


async def test_sixteen_mixed_requests_cross_the_nodes(service: Any, tiny_model: Path) -> None:
    from tandem.router.client.client import AsyncClient

    prompts = [
        [(17 * i + 5 * n) % 400 + 3 for i in range(length)]
        for n, length in enumerate([1, 7, 8, 9, 40, 130, 300, 700])
    ]
    expected = expected_tokens(tiny_model, prompts, NUM_TOKENS)
    async with AsyncClient(service.grpc_address) as client:
        greedy = [
            client.generate(
                prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, timeout=60
            )
            for prompt in prompts
        ]
        sampled = [
            client.generate(
                prompt, temperature=1, seed=n, max_tokens=NUM_TOKENS, ignore_eos=True, timeout=60
            )
            for n, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*greedy, *sampled)
        again = await asyncio.gather(
            *(
                client.generate(
                    prompt,
                    temperature=1,
                    seed=n,
                    max_tokens=NUM_TOKENS,
                    ignore_eos=True,
                    timeout=60,
                )
                for n, prompt in enumerate(prompts)
            )
        )
    assert [list(answer.token_ids) for answer in answers[: len(prompts)]] == expected
    assert [answer.token_ids for answer in answers[len(prompts) :]] == [
        answer.token_ids for answer in again
    ]
    assert all(answer.timeline.kv_transfer_bytes > 0 for answer in answers[:4])
    assert len({answer.timeline.prefill_worker for answer in answers}) == 2
    assert len({answer.timeline.decode_worker for answer in answers}) == 2
    wait_until_idle(service.status_url)


def test_the_secret_of_a_running_service_is_in_no_log_argument_or_environment(
    service: Any, cluster: Any
) -> None:
    from tandem.cluster.serve.identity_file import identity_path, read_identity

    secret = read_identity(service.status_url).secret
    assert stat.S_IMODE(identity_path(service.status_url).stat().st_mode) == 0o600
    spellings = [
        secret,
        secret.hex().encode(),
        secret.hex().upper().encode(),
        repr(secret)[2:-1].encode(),
    ]
    spellings += [base64.b64encode(secret), base64.urlsafe_b64encode(secret)]
    texts: dict[str, bytes] = {}
    for process in psutil.process_iter():
        for name in ("cmdline", "environ"):
            with suppress(OSError):  # it has ended, or is another user's
                texts[f"{process.pid} {name}"] = Path(f"/proc/{process.pid}/{name}").read_bytes()
    for path in Path(cluster.head_node.get_session_dir_path()).rglob("*"):
        if path.is_file():
            texts[str(path)] = path.read_bytes()
    assert any(name.endswith(".log") for name in texts)
    assert any(b"DecodePool" in text for text in texts.values())
    assert not [
        name for name, text in texts.items() if any(spelling in text for spelling in spellings)
    ]


async def test_a_stranger_at_the_port_of_a_running_worker_gets_nothing(service: Any) -> None:
    for worker in workers(service.status_url):
        async with grpc.aio.insecure_channel(worker["address"]) as channel:
            for method in ("Worker/Session", "Worker/GetStatus", "Worker/Drain", "KvTransfer/Pull"):
                call: Any = channel.stream_stream(f"/tandem.v1.{method}")()
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call.read()
                # Where peers speak TLS, as between nodes, a stranger has not even a connection.
                assert refused.value.code() in (
                    grpc.StatusCode.UNAUTHENTICATED,
                    grpc.StatusCode.UNAVAILABLE,
                )
    assert {worker["state"] for worker in workers(service.status_url)} == {"ready"}
    wait_until_idle(service.status_url)


async def test_clients_that_go_away_free_their_blocks_soon(service: Any) -> None:
    from tandem.router.client.client import AsyncClient

    async def leave_early(client: AsyncClient, number: int) -> None:
        prompt = [number + 3] * (20 * number + 1)
        async with client.stream(
            prompt, temperature=0, max_tokens=1000, ignore_eos=True, timeout=60
        ) as stream:
            async for delta in stream:
                if delta.first_index >= number:
                    return

    async with AsyncClient(service.grpc_address) as client:
        await asyncio.gather(*(leave_early(client, number) for number in range(8)))
    wait_until_idle(service.status_url, seconds=2)
