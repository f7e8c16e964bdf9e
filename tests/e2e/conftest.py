from collections.abc import Iterator
from typing import Any

import psutil
import pytest


@pytest.fixture(scope="package")
def address(cluster: Any) -> str:
    """Returns the address of the cluster."""
    return str(cluster.address)


@pytest.fixture(scope="package")
def gcs_server(cluster: Any) -> psutil.Process:
    """Returns the process of the cluster's GCS server."""
    folder = cluster.head_node.get_session_dir_path()
    (found,) = (
        child
        for child in psutil.Process().children()
        if child.name() == "gcs_server" and any(folder in word for word in child.cmdline())
    )
    return found


@pytest.fixture(scope="package")
def cluster() -> Iterator[Any]:
    """Starts a Ray cluster of a head and three nodes on this machine, each with an IP address."""
    from ray.cluster_utils import Cluster

    from tandem.tests.service import NODES  # imports torch, and the quick tier this file

    head: dict[str, Any] = {
        "num_cpus": 2,
        "include_dashboard": False,
        "object_store_memory": 100 * 2**20,
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for name, ip in NODES.items():
            cluster.add_node(
                num_cpus=2,
                node_ip_address=ip,
                resources={name: 100},
                object_store_memory=100 * 2**20,
            )
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]
