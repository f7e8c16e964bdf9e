"""Tests that a rank has one leader, of its own service, and ends with it alone."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tandem.proto import worker_pb2_grpc
from tandem.proto.channel import PeerChannel
from tandem.tests.fleet import Fleet, split_fleet
from tandem.tests.peers import IDENTITY, STRANGER
from tandem.tests.service import expected_tokens
from tandem.tests.token_request import token_request
from tandem.tests.waits import WAIT

PROMPT = [(17 * i) % 400 + 3 for i in range(40)]
CONTROL = "/tandem.v1.Rank/Control"
RawCall = grpc.aio.StreamStreamCall[bytes, bytes]


async def check_whole(fleet: Fleet, expected: Sequence[int]) -> None:
    """Fails unless the split worker answers as before and has all its ranks."""
    tokens, timeline = await fleet.generate(token_request(PROMPT, 8, ignore_eos=True))
    assert tokens == expected
    assert timeline.attempts == 1
    assert not any(rank.ended.is_set() for rank in fleet.ranks)


async def test_one_control_stream_opened_and_cancelled_by_a_stranger_kills_no_split_worker(
    tiny_model: Path,
) -> None:
    (expected,) = expected_tokens(tiny_model, [PROMPT], 8)
    async with split_fleet(tiny_model, {"decode": [2]}) as fleet:
        await check_whole(fleet, expected)
        (rank,) = fleet.ranks
        async with grpc.aio.insecure_channel(rank.address) as channel:
            opened: RawCall = channel.stream_stream(CONTROL)()
            with suppress(grpc.aio.AioRpcError):  # it may be refused already
                await opened.wait_for_connection()
            opened.cancel()
            told: RawCall = channel.stream_stream(CONTROL)()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await told.read()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        async with PeerChannel(rank.address, STRANGER) as other:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await rank_stub(other).Control().read()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await check_whole(fleet, expected)


async def test_a_second_leader_is_refused_and_changes_nothing(tiny_model: Path) -> None:
    """It may even belong to the service, such as a worker with a wrong address."""
    (expected,) = expected_tokens(tiny_model, [PROMPT], 8)
    async with split_fleet(tiny_model, {"decode": [2]}) as fleet:
        (rank,) = fleet.ranks
        async with PeerChannel(rank.address, IDENTITY) as channel:
            for _ in range(3):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    async with asyncio.timeout(WAIT):
                        await rank_stub(channel).Control().read()
                assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
        await check_whole(fleet, expected)


def rank_stub(channel: PeerChannel) -> worker_pb2_grpc.RankStub:
    """Returns a client of one rank."""
    return worker_pb2_grpc.RankStub(channel)  # type: ignore[no-untyped-call]
