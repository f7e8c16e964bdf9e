"""Helpers for tests of a whole service: its nodes, the expected tokens, the state of its
workers.
"""

import json
import os
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from tandem.cluster.config import TandemConfig, load_config
from tandem.proto.addresses import free_port
from tandem.tests.waits import WAIT

NODES: Final = {"router": "127.0.0.2", "prefill": "127.0.0.3", "decode": "127.0.0.4"}
"""The nodes of the test cluster beside its head; each offers the custom resource of its name."""

_STORE_BYTES: Final = 100 * 2**20

ACTIVITY: Final = ("num_requests", "num_jobs", "num_leases", "num_transfers")
"""Counts of a worker's status that are 0 when it is idle."""


@contextmanager
def ray_cluster(nodes: Mapping[str, str], **head: object) -> Iterator[Any]:
    """Runs a Ray cluster of a head and nodes on this machine, each with an IP address.

    `nodes`: the address of each by its name, which is also a resource of the node. `head`: further
    arguments of the head.
    """
    # As `tandem serve` and the manifests do. At nice 15, Ray's default, the tests that run beside
    # those of services would leave their processes without a core for minutes.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Both read the environment at the import of Ray.
    from ray.cluster_utils import Cluster

    from tandem.cluster.serve.ray_internals import without_idle_processes

    small = {"num_cpus": 2, "object_store_memory": _STORE_BYTES}
    with without_idle_processes(dashboard=False):
        cluster: Any = Cluster(
            initialize_head=True, head_node_args=small | {"include_dashboard": False} | head
        )
    try:
        for name, address in nodes.items():
            cluster.add_node(node_ip_address=address, resources={name: 100}, **small)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


def small_config(model: Path, name: str, overrides: Mapping[str, object]) -> TandemConfig:
    """Returns the configuration of a service beside others on this machine, whose cores are not its
    own.
    """
    common: dict[str, object] = {
        "model": str(model),
        "dtype": "float32",
        "name": name,
        "status_port": free_port("127.0.0.1"),
    }
    common |= {"router.grpc_port": 0, "router.http_port": 0}
    common |= {f"{pool}.num_threads": 1 for pool in ("prefill", "decode")}
    common |= {f"{pool}.kv_cache_gb": 0.05 for pool in ("prefill", "decode")}
    return load_config(None, common | dict(overrides))


def expected_tokens(
    model: Path, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """Returns what transformers generates greedily, in one batch with padding on the left."""
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    longest = max(map(len, prompts))
    ids = torch.tensor(
        [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    )  # [prompts, longest]
    kept = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = reference.generate(
        ids,
        attention_mask=kept,
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    made: list[list[int]] = out[:, longest:].tolist()
    return made


def status(status_url: str) -> dict[str, Any]:
    """Returns the status page."""
    with urllib.request.urlopen(status_url, timeout=WAIT) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def workers(status_url: str) -> list[dict[str, Any]]:
    """Returns the workers of the status page."""
    found: list[dict[str, Any]] = status(status_url)["workers"]
    return found


def wait_until_idle(status_url: str, seconds: float = WAIT) -> list[dict[str, Any]]:
    """Waits until no worker holds a request, lease, transfer or block; returns the workers of that
    status page, none of which is silent. Fails unless all blocks are consistent.
    """
    deadline = time.monotonic() + seconds
    while True:
        found = workers(status_url)
        # On a busy machine a worker may be silent for a second.
        assert all(worker["state"] == "silent" or worker["integrity_ok"] for worker in found)
        loads = [worker["load"] for worker in found]
        held = [
            load["owned_blocks"] + load["leased_blocks"] + load["reserved_blocks"] for load in loads
        ]
        held += [worker[name] for worker in found for name in worker if name in ACTIVITY]
        if not any(held) and not any(worker["state"] == "silent" for worker in found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
