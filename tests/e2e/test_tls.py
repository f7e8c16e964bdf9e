"""Tests a service with TLS at its API servers and between its nodes, asked by the commands, over
gRPC and HTTP.
"""

import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from typer.testing import CliRunner

from tandem.tests.certificates import make_certificate
from tandem.tests.service import NODES, expected_tokens, small_config, wait_until_idle, workers
from tandem.tests.tiny_tokenizer import make_tokenizer

TEXT = "The quick brown fox"
NUM_TOKENS = 8


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
    overrides |= {"peer_tls.mode": "cluster"}
    overrides |= {"router.tls.certificate": str(certificates / "server.pem")}
    overrides |= {"router.tls.key": str(certificates / "server.key")}
    with start_service(
        small_config(tiny_model, "tls", overrides), str(tiny_model), address=address
    ) as running:
        yield running


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
        str(NUM_TOKENS),
        "--ignore-eos",
        "--json",
        "--target",
    )
    answer = command(*asked, f"grpcs://{service.grpc_address}", *ca)
    (expected,) = expected_tokens(tiny_model, [make_tokenizer()(TEXT).input_ids], NUM_TOKENS)
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
    found = workers(service.status_url)
    assert {worker["state"] for worker in found} == {"ready"}
    for worker in found:
        host, _, port = worker["address"].rpartition(":")
        shown = x509.load_pem_x509_certificate(
            ssl.get_server_certificate((host, int(port)), timeout=10).encode()
        )
        assert shown.subject.rfc4514_string() == "CN=tandem-peer"
    assert any(worker["transports"] for worker in found), "KV cache has crossed"
    wait_until_idle(service.status_url)
