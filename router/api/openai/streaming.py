"""Sends one HTTP response while it is generated, and stops both when the client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar, cast

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ....proto import inference_pb2
from ....proto.errors import TandemError
from ....proto.limits import MAX_PROMPTS
from ....proto.metrics import ERRORS
from ...frontend.prepare import RequestContext
from ...frontend.prepared import PreparedRequest
from ...frontend.validation import answer_size, check_answer_size, check_num_sequences
from ...output.choice import delivered
from ...output.joined_answer import JoinedAnswer
from ..service import GenerationService, tandem_errors_only
from .answers import (
    ResponseWriter,
    TokenIds,
    check_prompt_ids,
    check_prompt_logprobs,
    error_response,
)
from .openapi import MAX_TOKENS, REQUEST_ID
from .requests import ParsedRequest
from .resume import EventIds, with_event_id

_T = TypeVar("_T")


class WholeWriter(Protocol):
    """Writes the answer to one request as an API has it."""

    async def whole(self, answers: Sequence[Sequence[inference_pb2.GenerateResponse]]) -> bytes:
        """Returns the body that is not streamed. `answers`: all messages of each prompt."""
        ...


class AnswerWriter(WholeWriter, Protocol):
    """Writes it as a stream, too."""

    async def chunk(self, prompt: int, message: inference_pb2.GenerateResponse) -> bytes:
        """Returns the events of one message for prompt number `prompt`."""
        ...

    def restore(self, delivered: Iterable[inference_pb2.GenerateResponse]) -> None:
        """Takes what the client of a single prompt has already: the chunks that follow go on from
        there.
        """
        ...

    def end(self, usages: Sequence[inference_pb2.Usage]) -> bytes:
        """Returns the events after the last message. `usages`: of each prompt."""
        ...

    def error_event(self, error: TandemError, name: Callable[[str], str]) -> bytes:
        """Returns the last event of a stream that broke; `name` maps a field of GenerateRequest to
        the body's name.
        """
        ...


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Holds how an API writes answers: makes the writer for a request of it, the model's name and
    the tokens of each prompt; and the response of an error.
    """

    writer: Callable[[Any, str, TokenIds], WholeWriter]  # an AnswerWriter, if the API streams
    error_response: Callable[[TandemError, Callable[[str], str]], JSONResponse]


OPENAI_FORM: Final = AnswerForm(ResponseWriter, error_response)


class GenerationResponse(Response):
    """Responds to one request, streamed as server-sent events or whole.

    An error before the first token is a response with the error's status, a later one the last
    event of the stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        service: GenerationService,
        request: ParsedRequest,
        context: RequestContext,
        form: AnswerForm = OPENAI_FORM,
    ) -> None:
        # nginx, which buffers answers unless this header says no, would hold back events.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]  # not known yet
        self._service = service
        self._request = request
        self._context = context
        self._form = form
        self._writer: AnswerWriter | None = None  # once the request is accepted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        respond = self._stream if self._request.is_streamed else self._send_whole
        await _until_disconnect(receive, respond(scope, receive, send))

    async def whole(self) -> Response:
        """Returns the response that is not streamed, once all is generated: the completions, or an
        error.
        """
        answers = [JoinedAnswer() for _ in self._request.prompts]
        try:
            with tandem_errors_only():
                accepted = await self._accept()
                timelines = [inference_pb2.Timeline() for _ in accepted]
                async with aclosing(self._messages(accepted, timelines)) as messages:
                    async for prompt, message in messages:
                        answers[prompt].add(message)
                joined = [answer.messages() for answer in answers]
                return Response(
                    await self._made_writer(accepted).whole(joined), media_type="application/json"
                )
        except TandemError as error:
            return self._form.error_response(error, self._request.field)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started, last = False, b""
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    if not has_started:
                        await send(
                            {
                                "type": "http.response.start",
                                "status": 200,
                                "headers": self.raw_headers,
                            }
                        )
                        has_started = True
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except TandemError as error:
            if not has_started or self._writer is None:
                await self._send_other(
                    self._form.error_response(error, self._request.field), scope, receive, send
                )
                return
            self._service.metrics.add(ERRORS, api="http", code=str(error.http_status))
            last = self._writer.error_event(error, self._request.field)
        await send({"type": "http.response.body", "body": last})

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._send_other(await self.whole(), scope, receive, send)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        usages = []
        with tandem_errors_only():
            accepted = await self._accept()
            writer = self._writer = cast(AnswerWriter, self._made_writer(accepted))
            event_ids, timelines = (
                EventIds(accepted[0]),
                [inference_pb2.Timeline() for _ in accepted],
            )
            if accepted[0].progress:
                writer.restore(await asyncio.to_thread(delivered, accepted[0]))
            async with aclosing(self._messages(accepted, timelines)) as messages:
                async for prompt, message in messages:
                    if event_ids.take(message):
                        writer.restore([message])
                        continue
                    if message.HasField("usage"):
                        usages.append(message.usage)
                    yield event_ids.add(await writer.chunk(prompt, message), timelines[prompt])
            yield writer.end(usages)

    async def _accept(self) -> list[PreparedRequest]:
        """Checks all prompts before the first runs: no part of a body that is refused is carried
        out.
        """
        self._context = with_event_id(self._request, self._context)
        context = replace(self._context, reduces_max_tokens=self._request.is_chat)
        accepted: list[PreparedRequest] = []
        check_num_sequences(len(self._request.prompts), self._request.common)
        size = 0
        for request in self._request.requests():
            accepted.append(await self._service.accept(request, context))
            submit = accepted[-1].tokens.submit
            if request.stopping.max_tokens > submit.max_tokens:
                self.headers[MAX_TOKENS] = str(submit.max_tokens)
            size += answer_size(request, len(submit.token_ids), submit.max_tokens)
            check_answer_size(size, request)
            prompt_tokens = sum(len(each.tokens.submit.token_ids) for each in accepted)
            check_prompt_logprobs(self._request, prompt_tokens)
            check_prompt_ids(self._request, prompt_tokens)
            await asyncio.sleep(
                0
            )  # lets others run: short prompts are checked without a break, and there may be 128
        return accepted

    def _messages(
        self, accepted: Sequence[PreparedRequest], timelines: Sequence[inference_pb2.Timeline]
    ) -> AsyncGenerator[tuple[int, inference_pb2.GenerateResponse], None]:
        runs = zip(accepted, timelines, strict=True)
        return _interleave([partial(self._service.run, each, timeline) for each, timeline in runs])

    def _made_writer(self, accepted: Sequence[PreparedRequest]) -> WholeWriter:
        model = self._request.common.model or self._service.base_name
        prompts = [each.tokens.submit.token_ids for each in accepted]
        return self._form.writer(self._request, model, prompts)

    async def _send_other(
        self, response: Response, scope: Scope, receive: Receive, send: Send
    ) -> None:
        for name in (REQUEST_ID, MAX_TOKENS):
            if name in self.headers:
                response.headers[name] = self.headers[name]
        await response(scope, receive, send)


async def _interleave(
    streams: Sequence[Callable[[], AsyncGenerator[_T, None]]], most: int = MAX_PROMPTS
) -> AsyncGenerator[tuple[int, _T], None]:
    """Runs the streams concurrently, at most `most` at a time; yields (index of the stream, item)
    as they come.

    Raises the first exception of a stream. Whichever way it ends, every stream is closed. As many
    items as there are running streams wait for a slow caller; then the streams wait, too.
    """
    if len(streams) == 1:  # without the cost of a task and a queue
        async with aclosing(streams[0]()) as stream:
            async for item in stream:
                yield 0, item
        return
    entries: asyncio.Queue[tuple[int, _T] | asyncio.Task[None]] = asyncio.Queue()
    room = asyncio.Semaphore(min(len(streams), most))
    waiting = iter(enumerate(streams))  # those that no task has taken

    async def pump() -> None:
        for index, start in waiting:
            async with aclosing(start()) as stream:
                async for item in stream:
                    await room.acquire()
                    entries.put_nowait((index, item))

    pumps = [asyncio.create_task(pump()) for _ in range(min(len(streams), most))]
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
                room.release()
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`; cancels it, and waits for its end, when the client disconnects or the caller is
    cancelled.
    """
    working = asyncio.create_task(work)
    disconnected = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, disconnected}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        disconnected.cancel()
        await asyncio.gather(working, disconnected, return_exceptions=True)
    if not working.cancelled():
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
