"""A worker whose answers the test writes: it keeps the commands that it gets."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from tandem.proto import inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.proto.channel import PeerChannel
from tandem.router.dispatch.worker_client import WorkerClient, WorkerKey
from tandem.tests.peers import IDENTITY, peer_server


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Serves sessions: keeps the commands that come, and sends what the test sends."""

    def __init__(self) -> None:
        self.commands: asyncio.Queue[worker_pb2.SessionRequest] = asyncio.Queue()
        self.answers: asyncio.Queue[worker_pb2.SessionResponse | None] = asyncio.Queue()
        self.server = peer_server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self.server)  # type: ignore[no-untyped-call]
        self.address = self.server.bind("127.0.0.1", 0)

    async def Session(
        self,
        requests: AsyncIterator[worker_pb2.SessionRequest],
        context: grpc.aio.ServicerContext[worker_pb2.SessionRequest, worker_pb2.SessionResponse],
    ) -> None:
        reader = asyncio.create_task(self._read(requests))
        try:
            while (answer := await self.answers.get()) is not None:
                await context.write(answer)
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        async for request in requests:
            self.commands.put_nowait(request)

    def send(self, *outputs: worker_pb2.Output, waiting: int = 0) -> None:
        """Sends the message of one step, with a load of so many waiting requests."""
        load = worker_pb2.WorkerLoad(num_waiting=waiting)
        self.answers.put_nowait(worker_pb2.SessionResponse(outputs=outputs, load=load))


def open_session(worker: WorkerKey, address: str, **options: Any) -> WorkerClient:
    """Opens a session with a worker, of which only the functions in `options` are told."""
    usual: dict[str, Any] = {
        "on_message": lambda client, message: None,
        "on_break": lambda client: None,
        "room_elsewhere": lambda: 0,
        "connect": PeerChannel,
    }
    return WorkerClient(worker, address, IDENTITY, **(usual | options))


def token(
    request_id: str,
    index: int,
    *,
    attempt: int = 1,
    choice: int = 0,
    last: bool = False,
    number: int = 7,
) -> worker_pb2.Output:
    """Returns the output of one token of a choice."""
    reason = inference_pb2.FINISH_REASON_LENGTH if last else inference_pb2.FINISH_REASON_UNSPECIFIED
    tokens = worker_pb2.Tokens(first_index=index, ids=[number], finish_reason=reason)
    return worker_pb2.Output(request_id=request_id, attempt=attempt, choice=choice, tokens=tokens)
