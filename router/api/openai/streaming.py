"""One HTTP answer: generates while it sends, and stops both when the client goes."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....proto import inference_pb2
from ....proto.errors import TandemError
from ...frontend.prepare import PreparedRequest
from ..service import GenerationService, tandem_errors_only
from .requests import ParsedBody
from .responses import DONE, ResponseWriter, check_prompt_scores, error_event, error_response

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """What a request says outside its body."""

    request_id: str
    arrived: float  # time.monotonic() when the request came
    deadline: float | None  # time.monotonic() at which the answer must have ended
    tenant: str


class GenerationResponse(Response):
    """The response to one job, streamed as server-sent events or whole.

    An error before the first token is a response with the error's status, a later one the last event of the stream.
    """

    media_type = "text/event-stream"

    def __init__(self, completions: GenerationService, job: ParsedBody, caller: Caller) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]  # not known yet
        self._completions = completions
        self._job = job
        self._caller = caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._stream(scope, receive, send) if self._job.stream else self._whole(scope, receive, send)
        await _until_disconnect(receive, work)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events()) as events:
            try:
                event: bytes | None = await anext(events)
            except TandemError as error:
                await self._send_other(error_response(error, self._job.field), scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while event is not None:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                try:
                    event = await anext(events, None)
                except TandemError as error:
                    await send(
                        {"type": "http.response.body", "body": error_event(error, self._job.field), "more_body": True}
                    )
                    break
            await send({"type": "http.response.body", "body": b""})

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers: list[list[inference_pb2.GenerateResponse]] = [[] for _ in self._job.prompts]
        try:
            with tandem_errors_only():
                accepted = await self._accept()
                async with aclosing(self._messages(accepted)) as messages:
                    async for prompt, message in messages:
                        answers[prompt].append(message)
                body = await self._replies(accepted).whole(answers)
        except TandemError as error:
            await self._send_other(error_response(error, self._job.field), scope, receive, send)
            return
        await self._send_other(Response(body, media_type="application/json"), scope, receive, send)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        usages = []
        with tandem_errors_only():
            accepted = await self._accept()
            replies = self._replies(accepted)
            async with aclosing(self._messages(accepted)) as messages:
                async for prompt, message in messages:
                    if message.HasField("usage"):
                        usages.append(message.usage)
                    yield await replies.chunk(prompt, message)
            if self._job.include_usage:
                yield replies.usage_chunk(usages)
            yield DONE

    async def _accept(self) -> list[PreparedRequest]:
        """Checks all prompts before the first runs: no part of a body that is refused is carried out."""
        accepted: list[PreparedRequest] = []
        for request in self._job.requests():
            accepted.append(
                await self._completions.accept(
                    request,
                    arrived=self._caller.arrived,
                    deadline=self._caller.deadline,
                    default_max_tokens=self._job.default_max_tokens,
                    tenant=self._caller.tenant,
                )
            )
            check_prompt_scores(self._job, sum(len(each.tokens.prompt) for each in accepted))
            await asyncio.sleep(0)  # short prompts are checked without a break, 128 of them take their time
        return accepted

    def _messages(
        self, accepted: Sequence[PreparedRequest]
    ) -> AsyncGenerator[tuple[int, inference_pb2.GenerateResponse], None]:
        return _interleave([self._completions.run(each, inference_pb2.Timeline()) for each in accepted])

    def _replies(self, accepted: Sequence[PreparedRequest]) -> ResponseWriter:
        model = self._job.common.model or self._completions.models[0].name
        prompt_tokens = sum(len(each.tokens.prompt) for each in accepted)
        return ResponseWriter(self._job, self._caller.request_id, model, prompt_tokens)

    async def _send_other(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        response.headers.update({name: self.headers[name] for name in ("x-request-id",) if name in self.headers})
        await response(scope, receive, send)


async def _interleave(streams: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[tuple[int, _T], None]:
    """Runs the streams at the same time; yields (index of the stream, item) as they come.

    The first exception of a stream is raised. Whichever way it ends, every stream is closed."""
    if len(streams) == 1:  # the usual case needs no task
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    entries: asyncio.Queue[tuple[int, _T] | asyncio.Task[None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[_T, None]) -> None:
        async with aclosing(stream):
            async for item in stream:
                entries.put_nowait((index, item))

    pumps = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    for task in pumps:
        task.add_done_callback(entries.put_nowait)
    try:
        running = len(pumps)
        while running:
            entry = await entries.get()
            if isinstance(entry, asyncio.Task):
                entry.result()
                running -= 1
            else:
                yield entry
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`; cancels it, and waits for its end, when the client goes or the caller is cancelled."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)
    if not working.cancelled():
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
