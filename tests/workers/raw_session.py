"""A worker alone, and a Session stream to it driven by a test."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tandem.proto import inference_pb2, worker_pb2
from tandem.proto.channel import PeerChannel
from tandem.tests.fleet import is_idle, worker_stub
from tandem.tests.peers import peer_channel
from tandem.tests.waits import WAIT
from tandem.tests.worker_config import worker_config
from tandem.tests.workers.engine.fake import FakeExecutor
from tandem.workers.serve.worker import Worker
from tandem.workers.tp.rank import Rank

GREEDY = inference_pb2.SamplingParams(temperature=0, top_p=1)


def submit(request_id: str = "a", **fields: Any) -> worker_pb2.Submit:
    """A good submit, but for the fields given."""
    good: dict[str, Any] = {
        "attempt": 1,
        "task": worker_pb2.TASK_COLOCATED,
        "token_ids": range(20),
        "max_tokens": 5,
        "sampling": GREEDY,
    }
    return worker_pb2.Submit(request_id=request_id, **good | fields)


class RawSession:
    """A Session stream driven by the test."""

    def __init__(self, channel: PeerChannel) -> None:
        self._call = worker_stub(channel).Session()
        self.messages: list[worker_pb2.SessionResponse] = []

    async def send(
        self, command: worker_pb2.Submit | worker_pb2.Cancel | worker_pb2.Suspend
    ) -> None:
        name = type(command).__name__.lower()
        await self._call.write(worker_pb2.SessionRequest(**{name: command}))  # type: ignore[arg-type]

    async def read(self) -> worker_pb2.SessionResponse | None:
        """The next message; None at the stream's end."""
        async with asyncio.timeout(WAIT):
            message = await self._call.read()
        if not isinstance(message, worker_pb2.SessionResponse):
            return None
        self.messages.append(message)
        return message

    async def until(
        self, good: Callable[[worker_pb2.Output], bool], count: int = 1
    ) -> list[worker_pb2.Output]:
        """Reads until `count` outputs are good; returns those."""
        found: list[worker_pb2.Output] = []
        while len(found) < count:
            message = await self.read()
            assert message is not None, "the session ended"
            found += filter(good, message.outputs)
        return found

    async def first_tokens(self) -> list[int]:
        """The tokens that have come, once there are some."""
        while not self.tokens():
            await self.read()
        return self.tokens()

    async def failure(self) -> worker_pb2.Failure:
        (output,) = await self.until(lambda output: output.HasField("failure"))
        return output.failure

    def outputs(self, request_id: str = "a", choice: int | None = None) -> list[worker_pb2.Output]:
        """All outputs of a request, or of a choice, among the messages read."""
        outputs = [
            output
            for message in self.messages
            for output in message.outputs
            if output.request_id == request_id
        ]
        return [output for output in outputs if choice in (None, output.choice)]

    def tokens(self, request_id: str = "a", choice: int | None = None) -> list[int]:
        """All tokens of a request, or of a choice, among the messages read."""
        return [token for output in self.outputs(request_id, choice) for token in output.tokens.ids]

    async def half_close(self) -> None:
        await self._call.done_writing()


def ended(output: worker_pb2.Output) -> bool:
    return bool(output.tokens.finish_reason)


@asynccontextmanager
async def worker_of(
    rank: Rank, role: str = "decode", **config: Any
) -> AsyncIterator[tuple[Worker, RawSession]]:
    """A worker and a session to it; on leaving it must have freed all that the session used."""
    worker = await Worker.serve(rank, worker_config(**config), worker_id="worker", role=role)
    try:
        async with peer_channel(worker.address) as channel:
            yield worker, RawSession(channel)
        await idle(worker)
    finally:
        async with asyncio.timeout(WAIT):
            await worker.stop()


async def idle(worker: Worker) -> worker_pb2.GetStatusResponse:
    """Waits until the worker holds nothing for any request."""
    async with asyncio.timeout(WAIT), peer_channel(worker.address) as channel:
        while True:
            status: worker_pb2.GetStatusResponse = await worker_stub(channel).GetStatus(
                worker_pb2.GetStatusRequest()
            )
            assert status.integrity_ok
            if is_idle(status):
                return status
            await asyncio.sleep(0.005)


def executor_of(rank: Rank) -> FakeExecutor:
    assert isinstance(rank.executor, FakeExecutor)
    return rank.executor
