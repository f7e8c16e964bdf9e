from collections.abc import Iterator
from typing import Any

import pytest

from tandem.tests.service import NODES


@pytest.fixture(scope="package")
def address() -> Iterator[str]:
    """Starts a Ray cluster of a head and three nodes on this machine, each with an IP address; yields its address."""
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
