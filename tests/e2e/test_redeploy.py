"""A service that is started again under its name replaces the one that runs: no stream is lost or
computed again. One that is started after the end of the other finds its prefixes on disk.
"""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.proto.addresses import free_port
from tandem.proto.errors import Unavailable
from tandem.router.auth.keys import create_key
from tandem.tests.service import small_config
from tandem.tests.waits import WAIT

PROMPT = [(17 * i) % 400 + 3 for i in range(100)]


def test_a_service_is_replaced_under_streams(address: str, tmp_path: Path) -> None:
    from tandem.tests.soak.nemesis import MODEL
    from tandem.tests.soak.redeploy import make_configs, replace_under_streams
    from tandem.tests.tiny import make_tiny_model

    folder = make_tiny_model(
        tmp_path, dtype="bfloat16", **MODEL
    )  # whose logits are the same bits in any company
    configs = make_configs(folder, "replaced", free_port("127.0.0.1"), num_routers=1, num_workers=1)
    found = replace_under_streams(*configs, folder, address, streams=3, tokens=150)
    print(found)
    assert found.passed, str(found)
    assert found.num_probes > 2


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
        disk, deadline = Path(str(overrides["prefill.kv_disk"])), time.monotonic() + WAIT
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
    arguments = json.dumps([address, overrides, str(tiny_model), [ada]])
    code = "import json, sys; from tandem.tests.e2e.test_redeploy import serve_once; "
    code += "serve_once(*json.loads(sys.argv[1]))"
    # A process of its own, so that this one knows nothing of the first start.
    launcher = subprocess.run(
        [sys.executable, "-c", code, arguments],
        capture_output=True,
        text=True,
        timeout=5 * WAIT,
        check=False,
    )
    assert launcher.returncode == 0, launcher.stderr
    found = serve_once(address, overrides, str(tiny_model), [bob, ada])
    assert found == [0, len(PROMPT) // 16 * 16]


def wait_until_not_announced(application: str) -> None:
    from tandem.cluster.serve.redeploy import _is_announced

    deadline = time.monotonic() + WAIT
    while _is_announced(application):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_replacement_is_announced_as_long_as_its_command_lives(address: str) -> None:
    """Ray tells it, also when the command is killed."""
    from tandem.cluster.serve.redeploy import _is_announced, announced
    from tandem.tests.soak.redeploy import joined

    code = "import sys, ray; from tandem.cluster.serve.redeploy import announced; "
    code += "ray.init(address=sys.argv[1], log_to_driver=False); announcement = announced('a.2'); "
    code += "announcement.__enter__(); print('announced', flush=True); sys.stdin.read()"
    with (
        joined(address),
        subprocess.Popen(
            [sys.executable, "-c", code, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as command,
    ):
        try:
            assert command.stdout is not None
            assert command.stdout.readline() == "announced\n"
            assert _is_announced("a.2")
            with pytest.raises(Unavailable, match=r"another command"), announced("a.2"):
                pass
        finally:
            command.kill()
        wait_until_not_announced("a.2")
        with announced("a.2"):
            assert _is_announced("a.2")
        wait_until_not_announced("a.2")
