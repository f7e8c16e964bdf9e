"""Tests the pods of the overlay cpu-demo with the component gcs-ft, as network namespaces.

They start, their probes pass, and a request is answered through the router's address. Each is ended
under streams as Kubernetes ends it, the GCS server is killed, and the load changes the number of
workers. No stream may fail or change.
"""

import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from typing import Any

import pytest
import yaml

from tandem.cluster.certificate import make_peer_tls
from tandem.proto.identity import PeerIdentity
from tandem.router.client.client import Client
from tandem.tests.k8s.checks import selects
from tandem.tests.k8s.kuberay import fault_tolerant
from tandem.tests.k8s.manifests import Group, Manifests, render
from tandem.tests.k8s.pods import PodNetwork, logs, pod_network, redis
from tandem.tests.k8s.serve_api import application, put_config, settled
from tandem.tests.service import status, wait_until_idle, workers
from tandem.tests.soak.nemesis import MODEL
from tandem.tests.soak.traffic import Traffic, fault_free, keep_going, make_cases
from tandem.tests.tiny import make_tiny_model

pytestmark = [pytest.mark.pods, pytest.mark.timeout(2400)]

STREAMS = 16
NUM_TOKENS = 200
START_SECONDS = 600.0  # of a machine that is slow
DEPLOYMENTS = {"router": "Router", "prefill": "PrefillPool", "decode": "DecodePool"}


@pytest.fixture(scope="module")
def manifests() -> Manifests:
    """The overlay, for a small model; the head's preStop is short, as no other pod ends then."""
    manifests = Manifests(deepcopy(render("cpu-demo", ("gcs-ft",)).documents))
    manifests.groups["head"].container["lifecycle"]["preStop"]["exec"]["command"] = ["sleep", "1"]
    args = manifests.application["args"]
    args |= {"model": "/models/tiny", "dtype": "bfloat16"}
    for pool in ("prefill", "decode"):
        args[pool] |= {"kv_cache_gb": 0.25, "num_threads": 1}
    manifests.service["spec"]["serveConfigV2"] = yaml.safe_dump(manifests.serve_config)
    return manifests


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory, manifests: Manifests) -> Iterator[PodNetwork]:
    folder = tmp_path_factory.mktemp("volumes")
    make_tiny_model(folder / "models" / "tiny", dtype="bfloat16", **MODEL)
    identity = folder / "identity" / "identity"
    identity.parent.mkdir()
    identity.write_text(PeerIdentity.generate(make_peer_tls("tandem-peer")).to_text())
    for path in folder.rglob("*"):  # the user of the pods reads them as its group
        path.chmod(0o755)
    with pod_network(folder / "models", identity) as network, redis(network, manifests):
        yield network


@pytest.fixture(scope="module")
def started(network: PodNetwork, manifests: Manifests) -> Manifests:
    """Starts a pod of each group and deploys, as the operator does."""
    for name in ("head", "router", "prefill", "decode"):
        network.start(group(manifests, name))
    until(lambda: network.head.is_alive(), network)
    put_config(dashboard(network), manifests.serve_config)
    until(
        lambda: any(pod.is_ready() for pod in network.pods if pod.group.name == "router"), network
    )
    until(lambda: settled(dashboard(network), "RUNNING"), network)
    return manifests


def group(manifests: Manifests, name: str) -> Group:
    return fault_tolerant(manifests.groups[name], manifests.cluster.get("gcsFaultToleranceOptions"))


def dashboard(network: PodNetwork) -> str:
    return f"{network.head.ip}:8265"


def until(condition: Callable[[], object], network: PodNetwork) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < deadline, explain(network)
        network.tend()
        time.sleep(0.5)


def explain(network: PodNetwork) -> str:
    """Returns the status of the application in Serve and Ray, and each pod's output."""
    try:
        found = json.dumps(application(dashboard(network)), indent=1)
        ray = network.head.execute(["ray", "status", "-v"], 60)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"{error!r}\n{logs(network)}"
    return f"{found}\n{ray.stdout}{ray.stderr}\n{logs(network)}"


def selected(network: PodNetwork, manifests: Manifests, port: str) -> list[str]:
    """Returns the addresses to which the Service leads."""
    (service,) = (
        each for each in manifests.of_kind("Service") if each["metadata"]["name"] == "tandem"
    )
    (target,) = (each["targetPort"] for each in service["spec"]["ports"] if each["name"] == port)
    pods = [
        pod
        for pod in network.pods
        if selects(service["spec"]["selector"], pod.group.labels) and pod.is_ready()
    ]
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
    assert {
        each["role"]: each["address"].rpartition(":")[0] for each in workers(status_url(network))
    } == {role: pools[role] for role in ("prefill", "decode")}
    with Client(addresses[0]) as client:
        answer = client.generate(
            [3, 4, 5], temperature=0, max_tokens=5, timeout=60, ignore_eos=True
        )
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
    (deployment,) = (
        each
        for each in config["applications"][0]["deployments"]
        if each["name"] == DEPLOYMENTS[role]
    )
    network.start(group(started, role))
    deployment["num_replicas"] = 2
    put_config(dashboard(network), config)
    await asyncio.to_thread(until, lambda: settled(dashboard(network), "RUNNING"), network)
    await asyncio.to_thread(
        until, lambda: len(selected(network, started, "grpc")) == 1 + (role == "router"), network
    )
    addresses = selected(network, started, "grpc")
    async with streams(network, addresses) as traffic:
        before = await asyncio.to_thread(old.delete)
    ended = await asyncio.to_thread(lambda: old.log.read_text(errors="replace"))
    network.remove(old)
    deployment["num_replicas"] = 1
    put_config(dashboard(network), config)
    # A replica that still waits for a place when a head is lost takes one for ever
    # (docs/kubernetes.md).
    await asyncio.to_thread(until, lambda: settled(dashboard(network), "RUNNING"), network)
    assert not traffic.failed, (traffic.failed, before, ended)
    assert not traffic.altered, traffic.altered
    assert before.returncode == 0, before
    await asyncio.to_thread(wait_until_idle, status_url(network), 60)


@pytest.mark.parametrize("loss", ["killed", "deleted"])
async def test_a_head_that_is_lost_under_streams_comes_back_and_loses_none(
    network: PodNetwork, started: Manifests, loss: str
) -> None:
    """Kills the GCS server, so the container restarts, or deletes the pod, so another starts."""
    old, before = network.head, {each["id"] for each in listed(network)}
    async with streams(network, selected(network, started, "grpc")) as traffic:
        if loss == "deleted":
            await asyncio.to_thread(old.delete)
        else:
            (server,) = (
                each for each in old.init.children(recursive=True) if each.name() == "gcs_server"
            )
            server.kill()
            await asyncio.to_thread(old.process.wait, START_SECONDS)
        network.remove(old)
        network.start(group(started, "head"), old.ip)
        await asyncio.to_thread(until, lambda: network.head.is_alive(), network)
        await asyncio.to_thread(until, lambda: settled(dashboard(network), "RUNNING"), network)
        count = len(traffic.ended)
        await asyncio.to_thread(until, lambda: len(traffic.ended) >= count + STREAMS, network)
    assert not traffic.failed, traffic.failed
    assert not traffic.altered, traffic.altered
    await asyncio.to_thread(
        until, lambda: {each["id"] for each in listed(network)} == before, network
    )
    await asyncio.to_thread(wait_until_idle, status_url(network), 60)


async def test_the_load_scales_the_decode_pool_up_and_down_and_no_stream_is_lost(
    network: PodNetwork, started: Manifests
) -> None:
    """Pods come and go as with Ray's autoscaler: one for each replica without a place."""
    config = deepcopy(started.serve_config)
    (app,) = config["applications"]
    app["autoscaling_policy"] = {"policy_function": "tandem.cluster.scaling.policy:ScalingPolicy"}
    scaling = {
        "max_replicas": 3,
        "utilization": 0.1,
        "window_seconds": 2.0,
        "up_delay_seconds": 1.0,
        "down_delay_seconds": 10.0,
    }
    app["args"]["router"] |= {"replicas": 1}
    app["args"]["router"] |= {"max_queue_seconds": 600.0}  # of a machine that is slow
    app["args"]["prefill"] |= {"replicas": 1}
    app["args"]["decode"] |= {"max_sequences": 32, "autoscaling": scaling}
    put_config(dashboard(network), config)
    await asyncio.to_thread(until, lambda: settled(dashboard(network), "RUNNING"), network)
    await asyncio.to_thread(
        until, lambda: num_decode(network) == 1 and selected(network, started, "grpc"), network
    )
    addresses = selected(network, started, "grpc")
    async with streams(network, addresses) as many:
        await asyncio.to_thread(until, lambda: target(network) == 3, network)
        for _ in range(2):
            network.start(group(started, "decode"))
        await asyncio.to_thread(until, lambda: num_decode(network) == 3, network)
    async with streams(network, addresses, concurrency=1) as few:
        await asyncio.to_thread(until, lambda: num_decode(network) == 1, network)
        used = {each["address"].rpartition(":")[0] for each in listed(network)}
        for pod in [
            pod for pod in network.pods if pod.group.name == "decode" and pod.ip not in used
        ]:
            await asyncio.to_thread(pod.delete)
            network.remove(pod)
    assert not many.failed + few.failed, many.failed + few.failed
    assert not many.altered + few.altered, many.altered + few.altered
    assert len([pod for pod in network.pods if pod.group.name == "decode"]) == 1
    await asyncio.to_thread(wait_until_idle, status_url(network), 60)


@asynccontextmanager
async def streams(
    network: PodNetwork, addresses: Sequence[str], concurrency: int = STREAMS
) -> AsyncIterator[Traffic]:
    """Keeps `concurrency` streams running; yields once as many have ended.

    Lets the last streams end.
    """
    known = await fault_free(addresses, make_cases(NUM_TOKENS))
    traffic, over = Traffic(), asyncio.Event()
    running = asyncio.create_task(
        keep_going(addresses, known, traffic, concurrency=concurrency, is_over=over.is_set)
    )
    try:
        await asyncio.to_thread(until, lambda: len(traffic.ended) >= concurrency, network)
        yield traffic
    finally:
        over.set()
        await running


def listed(network: PodNetwork) -> list[dict[str, Any]]:
    """Returns the workers of the status page; empty while it does not answer."""
    try:
        return workers(status_url(network))
    except OSError:
        return []


def num_decode(network: PodNetwork) -> int:
    """Returns how many decode workers are ready; 0 while one is listed that is not."""
    states = [each["state"] for each in listed(network) if each["role"] == "decode"]
    return len(states) if set(states) == {"ready"} else 0


def target(network: PodNetwork) -> int:
    """Returns how many decode workers Serve wants."""
    return int(application(dashboard(network))["deployments"]["DecodePool"]["target_num_replicas"])
