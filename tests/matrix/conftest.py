"""Runs one cluster of processes for all tests of a file."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from tandem.tests.matrix.cluster import Cluster, running_cluster
from tandem.workers.model.kernels.c import cpu


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    if not cpu.can_multiply(torch.zeros(32, 32, dtype=torch.bfloat16)):
        pytest.skip("no product of our own with AMX, so that a replay is not exact in bfloat16")
    async with running_cluster(tmp_path_factory.mktemp("matrix")) as running:
        yield running
