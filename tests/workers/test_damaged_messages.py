"""Five hundred damaged messages through every method between the processes of a service, from who
knows the secret and
from who does not: each call ends in a documented way, and the next good request has its tokens.
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from tandem.proto import inference_pb2, worker_pb2
from tandem.proto.channel import PeerChannel, PeerStream
from tandem.proto.hashing import hash_chain
from tandem.tests.damaged import LEAK, NUM_INPUTS, damaged
from tandem.tests.fleet import VOCAB, fake_rank
from tandem.tests.peers import IDENTITY, peer_channel
from tandem.tests.workers.engine.fake import expected_tokens
from tandem.tests.workers.raw_session import RawSession, ended, idle, submit, worker_of
from tandem.workers.serve.worker import Worker
from tandem.workers.transfer import frames

PROMPT = range(20)
SECONDS = 20.0
KEY = frames.TransferKey(transfer_id=b"t" * 16, epoch=3)
ADAPTER = worker_pb2.Adapter(folder="/adapters", fingerprint=bytes(16))
SAMPLED = inference_pb2.SamplingParams(
    temperature=0.5, top_p=0.9, top_k=3, seed=7, repetition_penalty=1.1
)
STREAMS: dict[str, list[bytes]] = {
    "/tandem.v1.Worker/Session": [
        worker_pb2.SessionRequest(
            submit=submit(sampling=SAMPLED, num_choices=2, logprobs=1)
        ).SerializeToString(),
        worker_pb2.SessionRequest(submit=submit(beam_search={"width": 2})).SerializeToString(),
        worker_pb2.SessionRequest(
            submit=submit(
                task=worker_pb2.TASK_DECODE,
                kv={"epoch": 1, "num_tokens": 20, "endpoints": ["127.0.0.1:1"]},
            )
        ).SerializeToString(),
        worker_pb2.SessionRequest(submit=submit(adapter=ADAPTER)).SerializeToString(),
        worker_pb2.SessionRequest(cancel={"request_id": "a", "attempt": 1}).SerializeToString(),
        worker_pb2.SessionRequest(suspend={"request_id": "a", "attempt": 1}).SerializeToString(),
    ],
    "/tandem.v1.Worker/LeasePrefix": [
        worker_pb2.LeasePrefixRequest(hashes=hash_chain(PROMPT, 16)).SerializeToString(),
        worker_pb2.LeasePrefixRequest(hashes=[b"?" * 16]).SerializeToString(),
    ],
    frames.PULL_METHOD: [
        frames.encode(KEY, frames.Open(layout=b"x", transports={"shared": {"a": 1}})),
        frames.encode(KEY, frames.Pull(first_token=0, group=1, first_slot=2, num_slots=3)),
    ],
    frames.CONNECT_METHOD: [
        frames.encode(KEY, frames.Open(layout=b"x", transports={"shared": {"a": 1}}))
    ],
}
UNARY = {
    "/tandem.v1.Worker/GetStatus": worker_pb2.GetStatusRequest().SerializeToString(),
    "/tandem.v1.Worker/LoadAdapter": worker_pb2.LoadAdapterRequest(
        adapter=ADAPTER
    ).SerializeToString(),
    "/tandem.v1.Worker/Drain": worker_pb2.DrainRequest(timeout_seconds=0.01).SerializeToString(),
}
DOCUMENTED = {grpc.StatusCode.OK, grpc.StatusCode.ABORTED, grpc.StatusCode.INVALID_ARGUMENT}


async def check_good(session: RawSession, name: str) -> None:
    await session.send(submit(name, token_ids=PROMPT))
    await session.until(ended)
    assert session.tokens(name) == expected_tokens(PROMPT, 5, VOCAB)


def check_end(code: grpc.StatusCode, details: str, data: object) -> None:
    if (
        details == "Internal error from Core"
    ):  # of our own client, when the server has ended a call that it writes to
        return
    assert code in DOCUMENTED, (data, code, details)
    assert not LEAK.search(details), (data, details)


async def stream(channel: PeerChannel, method: str, messages: Sequence[bytes]) -> None:
    """Sends the messages in one call and reads it to its end."""
    call: PeerStream[bytes, bytes] = channel.stream_stream(method)()
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for each in messages:
            await call.write(each)
        await call.done_writing()
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    check_end(await call.code(), await call.details(), (method, messages))


@pytest.mark.parametrize("method", STREAMS)
async def test_streams_of_a_peer(method: str) -> None:
    inputs = damaged(STREAMS[method])
    async with worker_of(fake_rank()) as (worker, session), peer_channel(worker.address) as channel:
        await check_good(session, "before")
        async with asyncio.timeout(4 * SECONDS):
            for first in range(
                0, NUM_INPUTS, 5
            ):  # some in one stream, so that the later ones meet its state
                await asyncio.gather(
                    *(stream(channel, method, [each]) for each in inputs[first : first + 4])
                )
                await stream(channel, method, inputs[first : first + 5])
        await check_good(session, "after")
        await idle(worker) if method != "/tandem.v1.Worker/Session" else None
        await session.half_close()


@pytest.mark.parametrize("method", UNARY)
async def test_calls_of_a_peer(method: str) -> None:
    """A drain that can be read drains: then the worker still answers."""
    async with worker_of(fake_rank()) as (worker, session), peer_channel(worker.address) as channel:
        await check_good(session, "before")
        ask: Any = channel.unary_unary(method)
        for data in damaged([UNARY[method], b"\x08\x01"]):
            try:
                await ask(data, timeout=SECONDS)
            except grpc.aio.AioRpcError as error:
                check_end(error.code(), error.details() or "", (method, data))
        if not method.endswith("Drain"):
            await check_good(session, "after")
        await session.half_close()


async def strange(worker: Worker, method: str, seeds: Sequence[bytes]) -> None:
    rng = random.Random(16)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        for data in damaged(seeds):
            proof = bytearray(IDENTITY.make_proof(method, worker.address))
            proof[rng.randrange(len(proof))] ^= 1 << rng.randrange(8)
            # A call with one message fits every method, and has sent it when the refusal comes.
            metadata = grpc.aio.Metadata(("tandem-proof-bin", bytes(proof)))
            ask: Any = channel.unary_unary(method)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ask(data, metadata=metadata, timeout=SECONDS)
            found = refused.value.code(), refused.value.details()
            assert found == (grpc.StatusCode.UNAUTHENTICATED, "not a peer of this service")


async def test_who_does_not_know_the_secret() -> None:
    """Five hundred for each method, with proofs that are almost right."""
    async with worker_of(fake_rank()) as (worker, session):
        await check_good(session, "before")
        seeds = STREAMS | {method: [seed, b"\x08\x01"] for method, seed in UNARY.items()}
        await asyncio.gather(*(strange(worker, method, each) for method, each in seeds.items()))
        await check_good(session, "after")
        await session.half_close()
