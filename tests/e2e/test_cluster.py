"""Tests a service whose router, prefill and decode workers are on different nodes of a Ray cluster,
with TLS at its API servers and between its nodes.
"""

import asyncio
import base64
import json
import ssl
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
from cryptography import x509
from typer.testing import CliRunner

from tandem.router.client.client import AsyncClient
from tandem.router.client.wire import ClientTls
from tandem.tests.certificates import make_certificate
from tandem.tests.service import NODES, expected_tokens, small_config, wait_until_idle, workers
from tandem.tests.tiny_tokenizer import make_tokenizer

NUM_TOKENS = 24
NUM_TEXT_TOKENS = 8
TEXT = "The quick brown fox"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder with the certificate of the router's node, its key and its CA."""
    folder, ca = tmp_path_factory.mktemp("tls"), make_certificate("ca")
    ca.write(folder / "ca.pem")
    make_certificate("server", ca, NODES["router"]).write(
        folder / "server.pem", folder / "server.key"
    )
    return folder


@pytest.fixture(scope="module")
def service(address: str, tiny_model: Path, certificates: Path) -> Iterator[Any]:
    from tandem.cluster.serve.launch import start_service

    overrides: dict[str, object] = {f"{role}.resources": {role: 1.0} for role in NODES}
    overrides |= {"prefill.replicas": 2, "decode.replicas": 2, "prefill.block_size": 8}
    overrides["router.local_prefill_tokens"] = 0
    overrides |= {"peer_tls.mode": "cluster"}
    overrides |= {"router.tls.certificate": str(certificates / "server.pem")}
    overrides |= {"router.tls.key": str(certificates / "server.key")}
    with start_service(
        small_config(tiny_model, "crossing", overrides), str(tiny_model), address=address
    ) as running:
        yield running


@pytest.fixture
async def client(service: Any, certificates: Path) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(
        service.grpc_address, tls=ClientTls(ca=certificates / "ca.pem")
    ) as running:
        yield running


def test_workers_are_on_the_nodes_they_were_meant_for(service: Any) -> None:
    found = workers(service.status_url)
    assert sorted(worker["role"] for worker in found) == ["decode", "decode", "prefill", "prefill"]
    for worker in found:
        assert worker["address"].startswith(NODES[worker["role"]] + ":")
    assert service.grpc_address.startswith(NODES["router"] + ":")


async def test_sixteen_mixed_requests_cross_the_nodes(
    service: Any, client: AsyncClient, tiny_model: Path
) -> None:
    prompts = [
        [(17 * i + 5 * n) % 400 + 3 for i in range(length)]
        for n, length in enumerate([1, 7, 8, 9, 40, 130, 300, 700])
    ]
    expected = expected_tokens(tiny_model, prompts, NUM_TOKENS)
    options: Any = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "timeout": 60}

    def sampled() -> list[Any]:
        return [
            client.generate(prompt, temperature=1, seed=n, **options)
            for n, prompt in enumerate(prompts)
        ]

    greedy = [client.generate(prompt, temperature=0, **options) for prompt in prompts]
    answers = await asyncio.gather(*greedy, *sampled())
    again = await asyncio.gather(*sampled())
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
    # On a busy machine a worker may be silent for a second, which this waits for.
    assert {worker["state"] for worker in wait_until_idle(service.status_url)} == {"ready"}


async def test_clients_that_go_away_free_their_blocks_soon(
    service: Any, client: AsyncClient
) -> None:
    async def leave_early(number: int) -> None:
        prompt = [number + 3] * (20 * number + 1)
        async with client.stream(
            prompt, temperature=0, max_tokens=1000, ignore_eos=True, timeout=60
        ) as stream:
            async for delta in stream:
                if delta.first_index >= number:
                    return

    def count_cached() -> int:
        return sum(worker["load"]["cached_blocks"] for worker in workers(service.status_url))

    before = count_cached()
    await asyncio.gather(*(leave_early(number) for number in range(8)))
    wait_until_idle(service.status_url)
    # Streams that had gone on would have filled 60 blocks each.
    assert count_cached() - before < 8 * 30


def command(*arguments: str) -> Any:
    """Returns what a command prints as JSON; raises what it raises."""
    from tandem.cluster.cli.main import app

    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_commands_ask_over_tls_and_workers_speak_it_with_each_other(
    service: Any, tiny_model: Path, certificates: Path
) -> None:
    from tandem.proto.errors import Unavailable

    ca = ("--tls-ca", str(certificates / "ca.pem"))
    asked = (
        "generate",
        TEXT,
        "--max-tokens",
        str(NUM_TEXT_TOKENS),
        "--ignore-eos",
        "--json",
        "--url",
    )
    answer = command(*asked, f"grpcs://{service.grpc_address}", *ca)
    (expected,) = expected_tokens(tiny_model, [make_tokenizer()(TEXT).input_ids], NUM_TEXT_TOKENS)
    assert answer["choices"][0]["token_ids"] == expected
    for target in (
        service.grpc_address,
        f"grpcs://{service.grpc_address}",
    ):  # in plaintext, and of an unknown CA
        with pytest.raises(Unavailable):
            command(*asked, target, "--timeout", "2")
    for url in (f"https://{service.http_addresses[0]}", f"grpcs://{service.grpc_address}"):
        load = (
            "--num-prompts",
            "4",
            "--concurrency",
            "2",
            "--input-len",
            "200",
            "--output-len",
            "8",
        )
        measured = command("bench", "--url", url, *ca, *load, "--vocab-size", "400", "--json", "-")
        assert measured["servers"][0]["rounds"][0]["num_completed"] == 4
    found = wait_until_idle(service.status_url)
    assert {worker["state"] for worker in found} == {"ready"}
    for worker in found:
        host, _, port = worker["address"].rpartition(":")
        shown = x509.load_pem_x509_certificate(
            ssl.get_server_certificate((host, int(port)), timeout=60).encode()
        )
        assert shown.subject.rfc4514_string() == "CN=tandem-peer"
    assert any(worker["transports"] for worker in found), "KV cache has crossed"
    wait_until_idle(service.status_url)
