"""Tests the status of workers that a router reports, and the connections that it uses."""

import asyncio
from typing import Any

from tandem.cluster.config import RouterConfig
from tandem.cluster.serve.launch import _is_left
from tandem.cluster.serve.status import WorkerStatuses
from tandem.proto import worker_pb2
from tandem.proto.addresses import free_port, listen
from tandem.tests.fleet import fleet
from tandem.tests.peers import IDENTITY
from tandem.tests.waits import WAIT


async def test_workers_are_asked_over_channels_that_are_kept() -> None:
    async with fleet(1, 1) as running:
        known = [worker.info() for worker in running.workers]
        for info in known:
            info.application = "tandem.2"
        statuses, kept = WorkerStatuses(lambda: known, IDENTITY), []
        for _ in range(3):
            found = await asked_anew(statuses)
            assert {each["state"] for each in found} == {"ready"}
            assert {each["application"] for each in found} == {"tandem.2"}
            kept.append(dict(statuses._channels))
        assert kept[0].keys() == {info.address for info in known}
        assert kept[0] == kept[1] == kept[2]
        await statuses.close()
        assert not statuses._channels


async def test_channels_to_workers_that_are_gone_are_closed() -> None:
    async with fleet(1, 1) as running:
        known = [worker.info() for worker in running.workers]
        known.append(
            worker_pb2.WorkerInfo(worker_id="z", address="127.0.0.1:9", role=worker_pb2.ROLE_DECODE)
        )
        statuses = WorkerStatuses(lambda: known, IDENTITY)
        assert [each["state"] for each in await asked_anew(statuses)] == [
            "ready",
            "ready",
            "silent",
        ]
        del known[0], known[-1]
        assert [each["address"] for each in await asked_anew(statuses)] == [known[0].address]
        assert list(statuses._channels) == [known[0].address]
        await statuses.close()


async def test_a_channel_to_a_worker_that_has_left_closes_after_its_last_call() -> None:
    """Also if nobody asks for the status again."""
    async with fleet(1, 1) as running:
        known = [worker.info() for worker in running.workers]
        statuses = WorkerStatuses(lambda: known, IDENTITY)
        await asked_anew(statuses)
        channel = statuses._channels[known[1].address]
        asking = asyncio.create_task(asked_anew(statuses))
        async with asyncio.timeout(WAIT):
            while not channel.num_calls:
                await asyncio.sleep(0)
            known.pop()
            statuses.forget_gone()
            assert list(statuses._channels) == [known[0].address]
            assert [each["state"] for each in await asking] == ["ready", "ready"]
            await statuses.close()
        assert not statuses._closing


async def asked_anew(statuses: WorkerStatuses) -> list[dict[str, object]]:
    """Returns the status of all workers without the cached one."""
    statuses._described._fresh_until = 0.0
    return await statuses.get()


def test_the_status_page_leaves_the_routers_their_ports() -> None:
    """`tandem serve --port 8000`, as for vLLM, names the default port of the status page."""
    port = free_port("127.0.0.1")
    assert _is_left(port, "127.0.0.1", RouterConfig())
    for name in ("grpc_port", "http_port", "ops_port"):
        taken_port: dict[str, Any] = {name: port}
        assert not _is_left(port, "127.0.0.1", RouterConfig(**taken_port))
    with listen("127.0.0.1", 0) as taken:
        assert not _is_left(taken.getsockname()[1], "127.0.0.1", RouterConfig())
