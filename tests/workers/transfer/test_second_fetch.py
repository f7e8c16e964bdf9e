"""KV cache that another worker fetches after the first could not: a handle is good until it is
released or expires.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tandem.proto import worker_pb2
from tandem.tests.waits import WAIT
from tandem.tests.workers.transfer.test_unequal import Transfer, layout_of, turns
from tandem.workers.transfer.frames import Data, TransferError, decode

FIRST, SECOND = 0, 1  # receivers, each a whole worker


def transfer_to_two(transport: str, source_tp: int) -> Transfer:
    transfer = Transfer(layout_of(4), source_tp, 1, transports=lambda rank: (transport,))
    transfer.add_receiver(1, 0)
    return transfer


async def fails(transfer: Transfer, fault: str) -> None:
    """The first worker's fetch, which ends in the middle of the prefill."""
    fetching = asyncio.create_task(transfer.fetch(FIRST))
    await turns()
    transfer.progress(20)
    await turns(300)
    if fault == "cancelled":
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(WAIT):
                await fetching
    else:
        with pytest.raises(TransferError):
            async with asyncio.timeout(WAIT):
                await fetching


@pytest.mark.parametrize("transport", ["grpc", "shared", "gloo"])
@pytest.mark.parametrize("source_tp", [1, 2])
@pytest.mark.parametrize("fault", ["cancelled", "corrupt"])
async def test_another_worker_fetches_what_the_first_could_not(
    fault: str, source_tp: int, transport: str
) -> None:
    transfer = transfer_to_two(transport, source_tp)

    async def corrupt(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for frame in frames:
            yield (
                frame[:-1] + bytes([frame[-1] ^ 1]) if isinstance(decode(frame)[1], Data) else frame
            )

    if fault == "corrupt":
        transfer.senders[0].frame_hook = corrupt
    await fails(transfer, fault)
    transfer.senders[0].frame_hook = None
    await turns()
    assert (transfer.num_acks, transfer.released) == (0, [])
    assert [sender.num_offers for sender in transfer.senders] == [1] * source_tp
    assert not any(sender.num_streams for sender in transfer.senders)
    fetching = asyncio.create_task(transfer.fetch(SECOND))
    await turns()
    transfer.complete()
    async with asyncio.timeout(WAIT):
        assert (await fetching).transfer_bytes
    transfer.check([SECOND])
    await transfer.disconnect()
    assert (transfer.num_acks, transfer.released) == (1, [1])


async def test_two_workers_may_fetch_at_once_and_the_first_to_acknowledge_releases() -> None:
    transfer = transfer_to_two("shared", 1)
    fetches = [asyncio.create_task(transfer.fetch(receiver)) for receiver in (FIRST, SECOND)]
    await turns()
    transfer.complete()
    results = await asyncio.gather(*fetches, return_exceptions=True)
    assert any(isinstance(result, worker_pb2.KvReceived) for result in results)
    await transfer.disconnect()
    assert transfer.released == [1]


async def test_after_the_release_there_is_nothing_to_fetch() -> None:
    transfer = transfer_to_two("grpc", 1)
    transfer.complete()
    await transfer.fetch(FIRST)
    await turns()
    assert transfer.released == [1]
    with pytest.raises(TransferError, match="broke"):
        await transfer.fetch(SECOND)
    await transfer.disconnect()
