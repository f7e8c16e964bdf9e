"""Tests the application that KubeRay deploys, through Ray's dashboard, on nodes with labels."""

import asyncio
import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cluster.cli.main import app as cli
from tandem.proto.addresses import free_port
from tandem.proto.errors import InvalidArgument, NotFound
from tandem.proto.identity import PeerIdentity
from tandem.router.client.client import Client
from tandem.tests.k8s.manifests import render
from tandem.tests.k8s.serve_api import put_config, wait_for
from tandem.tests.service import NODES, expected_tokens, status, wait_until_idle, workers
from tandem.tests.soak.nemesis import MODEL
from tandem.tests.soak.traffic import Traffic, fault_free, keep_going, make_cases
from tandem.tests.tiny import make_tiny_model

PROMPT = [17, 5, 9, 400, 3]
NUM_TOKENS = 12
SCALE_SECONDS = 250.0


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "identity"
    assert CliRunner().invoke(cli, ["key", "identity", str(path)]).exit_code == 0
    return path


@pytest.fixture(scope="module")
def config(tiny_model: Path, identity: Path) -> dict[str, Any]:
    """The Serve configuration of the overlay cpu-demo, for a small model on one machine."""
    config = deepcopy(render("cpu-demo").serve_config)
    config["http_options"] = {"host": "127.0.0.1", "port": free_port("127.0.0.1")}
    config["proxy_location"] = "HeadOnly"
    args = config["applications"][0]["args"]
    args |= {
        "model": str(tiny_model),
        "dtype": "float32",
        "identity_file": str(identity),
        "grace_seconds": 3,
    }
    args["router"] |= {"grpc_port": 0, "http_port": 0, "ops_port": 0}
    for pool in ("prefill", "decode"):
        args[pool] |= {"num_cpus": 1, "num_threads": 1, "kv_cache_gb": 0.05}
    return config


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """Starts a cluster as KubeRay's pods would make it, and yields the address of its dashboard."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_worker_niceness", "0")  # as the pods' manifest does
    small: dict[str, Any] = {"object_store_memory": 100 * 2**20}
    head: dict[str, Any] = small | {
        "num_cpus": 0,
        "include_dashboard": True,
        "dashboard_host": "127.0.0.1",
        "dashboard_port": 0,
    }
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    try:
        for role, ip in NODES.items():
            labels = {"tandem.dev/role": role}
            cluster.add_node(
                num_cpus=2, node_ip_address=ip, labels=labels, include_dashboard=False, **small
            )
        cluster.wait_for_nodes()
        yield str(cluster.head_node.webui_url)
    finally:
        cluster.shutdown()


def test_serve_starts_scales_and_refuses_it(
    dashboard: str, config: dict[str, Any], tiny_model: Path
) -> None:
    status_url = f"http://127.0.0.1:{config['http_options']['port']}/tandem"
    put_config(dashboard, config)
    wait_for(dashboard, "RUNNING")
    before = workers(status_url)
    assert {each["role"]: each["address"].rpartition(":")[0] for each in before} == {
        role: NODES[role] for role in ("prefill", "decode")
    }
    (router,) = status(status_url)["routers"]
    host, _, port = router["grpc"].rpartition(":")
    assert host == NODES["router"]
    (expected,) = expected_tokens(tiny_model, [PROMPT], NUM_TOKENS)
    for address in (router["grpc"], f"127.0.0.1:{port}"):  # it binds more than it tells
        with Client(address) as client:
            answer = client.generate(
                PROMPT, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, timeout=60
            )
        assert list(answer.token_ids) == expected

    # As the readinessProbe does.
    with urllib.request.urlopen(f"http://{router['ops']}/ready", timeout=30) as reply:
        assert reply.status == 200

    more = deepcopy(config)
    more["applications"][0]["deployments"][2]["num_replicas"] = 2
    put_config(dashboard, more)
    wait_for(dashboard, "RUNNING")
    after = {each["id"] for each in workers(status_url)}
    assert len(after) == 3
    assert {each["id"] for each in before} < after  # a change of the number alone replaces none

    wrong = deepcopy(more)
    wrong["applications"][0]["args"]["decode"]["max_sequence"] = 1
    put_config(dashboard, wrong)
    found = wait_for(dashboard, "DEPLOY_FAILED")
    assert "decode.max_sequence: unknown key; did you mean max_sequences?" in found["message"]
    assert {each["id"] for each in workers(status_url)} == after  # what runs goes on
    wait_until_idle(status_url)


@pytest.mark.pods
def test_the_load_scales_a_pool_up_and_down_and_no_stream_is_lost(
    dashboard: str, config: dict[str, Any], tmp_path: Path
) -> None:
    status_url = f"http://127.0.0.1:{config['http_options']['port']}/tandem"
    scaling = deepcopy(config)
    (application,) = scaling["applications"]
    application["autoscaling_policy"] = {
        "policy_function": "tandem.cluster.scaling.policy:ScalingPolicy"
    }
    quick = {
        "utilization": 0.2,
        "window_seconds": 1.0,
        "up_delay_seconds": 0.5,
        "down_delay_seconds": 3.0,
    }
    # The logits of this model do not depend on the batch.
    model = make_tiny_model(tmp_path / "exact", dtype="bfloat16", **MODEL)
    application["args"] |= {"model": str(model), "dtype": "bfloat16"}
    application["args"]["router"] |= {"replicas": 1}
    application["args"]["router"] |= {"max_queue_seconds": 600.0}  # of a machine that is slow
    application["args"]["prefill"] |= {"replicas": 1}
    application["args"]["decode"] |= {
        "num_cpus": 0.5,
        "max_sequences": 32,
        "autoscaling": {"max_replicas": 3, **quick},
    }
    put_config(dashboard, scaling)
    wait_for(dashboard, "RUNNING")
    until_decode_workers(status_url, 1)
    address = status(status_url)["routers"][0]["grpc"]
    traffic = asyncio.run(grow_and_shrink(address, status_url))
    assert not traffic.failed, traffic.failed
    assert not traffic.altered, traffic.altered
    assert len(workers(status_url)) == 2  # the pool without autoscaling has stayed as it was
    wait_until_idle(status_url)


async def grow_and_shrink(address: str, status_url: str) -> Traffic:
    """Runs many streams until there are three decode workers, then few until there is one."""
    cases = await fault_free([address], make_cases(300))
    traffic = Traffic()
    for concurrency, number in ((16, 3), (2, 1)):
        over = asyncio.Event()
        running = asyncio.create_task(
            keep_going([address], cases, traffic, concurrency=concurrency, is_over=over.is_set)
        )
        try:
            await asyncio.to_thread(until_decode_workers, status_url, number)
        finally:
            over.set()
            await running
    return traffic


def until_decode_workers(status_url: str, number: int) -> None:
    """Waits until this number of decode workers is ready, and no other is listed."""
    deadline = time.monotonic() + SCALE_SECONDS
    while [each["state"] for each in workers(status_url) if each["role"] == "decode"] != [
        "ready"
    ] * number:
        assert time.monotonic() < deadline, workers(status_url)
        time.sleep(0.1)


def test_each_build_has_the_same_identity(config: dict[str, Any], identity: Path) -> None:
    """Serve builds anew when arguments change: replicas of both builds must know each other."""
    from tandem.cluster.serve.serve_app import build

    args = config["applications"][0]["args"]
    deployments: list[Any] = [
        build(each)._bound_deployment for each in (args, args | {"grace_seconds": 4})
    ]
    first, second = (each.init_args[3] for each in deployments)
    assert first == second
    assert first.identity == PeerIdentity.from_text(identity.read_text())
    assert first.resume_key != first.identity.secret
    with pytest.raises(InvalidArgument, match="identity_file"):
        build({key: value for key, value in args.items() if key != "identity_file"})
    with pytest.raises(NotFound, match="identity"):
        build(args | {"identity_file": "/no/such/file"})


def test_a_build_without_the_packages_for_traces_is_refused(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise Serve would stop a running router for one that cannot start."""
    from tandem.cluster.serve.serve_app import build

    args = config["applications"][0]["args"] | {"tracing": {"endpoint": "http://collector"}}
    build(args)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(InvalidArgument, match=r"^tracing\.endpoint: needs"):
        build(args)


def test_replicas_are_where_the_labels_are(config: dict[str, Any]) -> None:
    from tandem.cluster.serve.serve_app import build

    args = deepcopy(config["applications"][0]["args"])
    args["prefill"] |= {"tp": 2}
    router: Any = build(args)._bound_deployment
    prefill, decode = (each._bound_deployment for each in router.init_args[4:])
    assert router.ray_actor_options["label_selector"] == {"tandem.dev/role": "router"}
    assert decode.ray_actor_options["label_selector"] == {"tandem.dev/role": "decode"}
    assert (
        prefill._replica_config.placement_group_bundle_label_selector
        == [{"tandem.dev/role": "prefill"}] * 2
    )
    assert prefill.init_args[3] == 2  # ranks that share the cores of a pod


@pytest.mark.parametrize(
    ("missing", "numbers"),
    [
        ("router.replicas", {"prefill": 1}),
        ("prefill.replicas", {"router": 2}),
        (None, {"router": 2, "prefill": 1}),
    ],
)
def test_autoscaling_needs_the_numbers_of_the_other_deployments(
    config: dict[str, Any], missing: str | None, numbers: dict[str, int]
) -> None:
    """Ray would ignore `num_replicas` of all deployments, and stop routers that run."""
    from tandem.cluster.serve.serve_app import build

    args = deepcopy(config["applications"][0]["args"])
    args["decode"] |= {"autoscaling": {"max_replicas": 3}}
    for section, number in numbers.items():
        args[section] |= {"replicas": number}
    if missing:
        with pytest.raises(InvalidArgument, match=rf"^{missing}: missing; .* num_replicas"):
            build(args)
        return
    router: Any = build(args)._bound_deployment
    assert router._deployment_config.autoscaling_config.min_replicas == 2
