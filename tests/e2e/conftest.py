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
    # It imports torch, and the quick tier imports this file.
    from tandem.tests.service import NODES, ray_cluster

    with ray_cluster(NODES) as cluster:
        yield cluster
