"""The pods of the overlay cpu-demo as network namespaces: they start, their probes pass, a request is answered through
the router's address, and each is ended under streams as Kubernetes ends it. No stream may fail or change."""

import asyncio
import time
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import yaml

from tandem.proto.certificate import make_peer_tls
from tandem.proto.identity import PeerIdentity
from tandem.router.client.client import Client
from tandem.tests.k8s.checks import selects
from tandem.tests.k8s.manifests import Manifests, render
from tandem.tests.k8s.pods import PodNetwork, logs, pod_network
from tandem.tests.k8s.serve_api import put_config, wait_for
from tandem.tests.service import status, wait_until_idle, workers
from tandem.tests.soak.nemesis import MODEL
from tandem.tests.soak.traffic import Traffic, fault_free, keep_going, make_cases
from tandem.tests.tiny import make_tiny_model

pytestmark = [pytest.mark.pods, pytest.mark.timeout(1200)]

STREAMS = 16
NUM_TOKENS = 200
START_SECONDS = 400.0
DEPLOYMENTS = {"router": "Router", "prefill": "PrefillPool", "decode": "DecodePool"}


@pytest.fixture(scope="module")
def manifests() -> Manifests:
    """The overlay, for a small model."""
    manifests = Manifests(deepcopy(render("cpu-demo").documents))
    args = manifests.application["args"]
    args |= {"model": "/models/tiny", "dtype": "bfloat16"}
    for pool in ("prefill", "decode"):
        args[pool] |= {"kv_cache_gb": 0.25, "num_threads": 1}
    manifests.service["spec"]["serveConfigV2"] = yaml.safe_dump(manifests.serve_config)
    return manifests


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodNetwork]:
    folder = tmp_path_factory.mktemp("volumes")
    make_tiny_model(folder / "models" / "tiny", dtype="bfloat16", **MODEL)
    identity = folder / "identity" / "identity"
    identity.parent.mkdir()
    identity.write_text(PeerIdentity.generate(make_peer_tls("tandem-peer")).to_text())
    for path in folder.rglob("*"):  # the user of the pods reads them as its group
        path.chmod(0o755)
    with pod_network(folder / "models", identity) as network:
        yield network


@pytest.fixture(scope="module")
def started(network: PodNetwork, manifests: Manifests) -> Manifests:
    """Starts a pod of each group and deploys, as the operator does."""
    for name in ("head", "router", "prefill", "decode"):
        network.start(manifests.groups[name])
    until(lambda: network.head.is_alive(), network)
    put_config(dashboard(network), manifests.serve_config)
    until(lambda: any(pod.is_ready() for pod in network.pods if pod.group.name == "router"), network)
    wait_for(dashboard(network), "RUNNING", START_SECONDS)
    return manifests


def dashboard(network: PodNetwork) -> str:
    return f"{network.head.ip}:8265"


def until(condition: Any, network: PodNetwork) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < deadline, logs(network)
        time.sleep(0.5)


def selected(network: PodNetwork, manifests: Manifests, port: str) -> list[str]:
    """Returns the addresses to which the Service leads."""
    (service,) = (each for each in manifests.of_kind("Service") if each["metadata"]["name"] == "tandem")
    (target,) = (each["targetPort"] for each in service["spec"]["ports"] if each["name"] == port)
    pods = [pod for pod in network.pods if selects(service["spec"]["selector"], pod.group.labels) and pod.is_ready()]
    return [f"{pod.ip}:{pod.group.ports[target]}" for pod in pods]


def status_url(network: PodNetwork) -> str:
    """The status page, by the head's proxy."""
    return f"http://{network.head.ip}:8000/tandem"


def test_a_request_is_answered_through_the_service(network: PodNetwork, started: Manifests) -> None:
    assert all(pod.is_alive() for pod in network.pods)
    addresses = selected(network, started, "grpc")
    assert len(addresses) == 1
    assert [each["grpc"] for each in status(status_url(network))["routers"]] == addresses
    pools = {pod.group.name: pod.ip for pod in network.pods}
    assert {each["role"]: each["address"].rpartition(":")[0] for each in workers(status_url(network))} == {
        role: pools[role] for role in ("prefill", "decode")
    }
    with Client(addresses[0]) as client:
        answer = client.generate([3, 4, 5], temperature=0, max_tokens=5, timeout=60, ignore_eos=True)
    assert len(answer.token_ids) == 5
    (router,) = (pod for pod in network.pods if pod.group.name == "router")
    forwarded = router.execute(["wget", "-q", "-O-", "http://127.0.0.1:8081/v1/models"], 30)
    assert forwarded.returncode == 0, forwarded.stderr  # as kubectl port-forward does


@pytest.mark.parametrize("role", ["decode", "prefill", "router"])
async def test_a_pod_that_is_deleted_under_streams_loses_none(
    network: PodNetwork, started: Manifests, role: str
) -> None:
    (old,) = (pod for pod in network.pods if pod.group.name == role)
    config = deepcopy(started.serve_config)
    (deployment,) = (each for each in config["applications"][0]["deployments"] if each["name"] == DEPLOYMENTS[role])
    network.start(started.groups[role])
    deployment["num_replicas"] = 2
    put_config(dashboard(network), config)
    await asyncio.to_thread(wait_for, dashboard(network), "RUNNING", START_SECONDS)
    await asyncio.to_thread(until, lambda: len(selected(network, started, "grpc")) == 1 + (role == "router"), network)
    addresses = selected(network, started, "grpc")
    known = await fault_free(addresses, make_cases(NUM_TOKENS))
    traffic, over = Traffic(), asyncio.Event()
    running = asyncio.create_task(keep_going(addresses, known, traffic, concurrency=STREAMS, is_over=over.is_set))
    try:
        while len(traffic.ended) < STREAMS:
            await asyncio.sleep(0.1)
        before = await asyncio.to_thread(old.delete)
    finally:
        over.set()
        await running
    ended = await asyncio.to_thread(lambda: old.log.read_text(errors="replace"))
    network.remove(old)
    deployment["num_replicas"] = 1
    put_config(dashboard(network), config)
    assert not traffic.failed, (traffic.failed, before, ended)
    assert not traffic.altered, traffic.altered
    assert before.returncode == 0, before
    await asyncio.to_thread(wait_until_idle, status_url(network), 60)
