"""TLS between router and workers: certificates on both sides, and nobody without one gets a
connection.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from tandem.cluster.certificate import make_peer_tls
from tandem.cluster.config import PeerTlsConfig
from tandem.cluster.serve.peer_tls import peer_tls
from tandem.proto import worker_pb2
from tandem.proto.channel import PeerChannel
from tandem.proto.errors import InvalidArgument
from tandem.proto.identity import PeerIdentity
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.tests.fleet import VOCAB, Fleet, Unlimited, fake_rank, is_idle, worker_stub
from tandem.tests.token_request import token_request
from tandem.tests.waits import WAIT
from tandem.tests.worker_config import worker_config
from tandem.tests.workers.engine.fake import expected_tokens
from tandem.workers.serve.worker import Worker

PROMPT = range(100)
LOOPBACK = ["127.0.0.1", "127.0.0.2", "::1", "localhost"]


@asynccontextmanager
async def running(identity: PeerIdentity) -> AsyncIterator[Fleet]:
    workers = [
        await Worker.serve(fake_rank(), worker_config(identity=identity), worker_id=role, role=role)
        for role in ("prefill", "decode")
    ]
    registry = WorkerRegistry()
    registry.update(worker.info() for worker in workers)
    fleet = Fleet(workers, registry, Dispatcher(registry, Unlimited(registry), identity=identity))
    try:
        yield fleet
    finally:
        await fleet.dispatcher.close()
        await asyncio.gather(*(worker.stop() for worker in workers))


async def status(worker: Worker, identity: PeerIdentity) -> worker_pb2.GetStatusResponse:
    async with PeerChannel(worker.address, identity) as channel:
        found: worker_pb2.GetStatusResponse
        found = await worker_stub(channel).GetStatus(worker_pb2.GetStatusRequest(), timeout=WAIT)
        return found


async def test_requests_cross_workers_over_tls_and_a_peer_without_the_certificate_cannot() -> None:
    identity = PeerIdentity.generate(make_peer_tls("tandem-peer"))
    async with running(identity) as fleet:
        tokens, timeline = await fleet.generate(token_request(PROMPT, 5))
        assert tokens == expected_tokens(PROMPT, 5, VOCAB)
        assert timeline.kv_transfer_bytes
        for secret, tls in (
            (identity.secret, None),
            (identity.secret, make_peer_tls("tandem-peer")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await status(fleet.workers[0], PeerIdentity(secret, tls))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await status(fleet.workers[0], PeerIdentity.generate(identity.tls))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, "TLS alone is not enough"
        async with asyncio.timeout(WAIT):
            while not all([is_idle(await status(worker, identity)) for worker in fleet.workers]):
                await asyncio.sleep(0.01)


def test_nodes_beyond_loopback_get_tls_unless_the_config_says_otherwise() -> None:
    assert peer_tls(PeerTlsConfig(), LOOPBACK) is None
    assert peer_tls(PeerTlsConfig(), [*LOOPBACK, "10.0.0.1"]) is not None
    assert peer_tls(PeerTlsConfig(), ["node-1"]) is not None
    assert peer_tls(PeerTlsConfig(mode="none"), ["10.0.0.1"]) is None
    assert peer_tls(PeerTlsConfig(mode="cluster"), LOOPBACK) is not None


def test_certificates_are_read_from_files(tmp_path: Path) -> None:
    made = make_peer_tls("peer.example")
    names = {"ca": made.ca, "certificate": made.certificate, "key": made.key}
    for name, content in names.items():
        (tmp_path / name).write_bytes(content)
    config = PeerTlsConfig(
        mode="files", name="peer.example", **{name: str(tmp_path / name) for name in names}
    )
    assert peer_tls(config, LOOPBACK) == made
    (tmp_path / "key").write_bytes(make_peer_tls("peer.example").key)
    with pytest.raises(
        InvalidArgument, match="peer_tls: the files are not a certificate with its key"
    ):
        peer_tls(config, LOOPBACK)
