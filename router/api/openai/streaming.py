"""Sends one HTTP response while it is generated, and stops both when the client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....proto import inference_pb2
from ....proto.errors import TandemError
from ....proto.limits import MAX_PROMPTS
from ....proto.metrics import ERRORS
from ...auth.rate import Quota
from ...frontend.prepare import RequestContext
from ...frontend.prepared import PreparedRequest
from ...frontend.validation import (
    answer_size,
    check_answer_size,
    check_echo_size,
    check_num_sequences,
    count_choices,
)
from ...output.choice import UNFINISHED, delivered
from ...output.joined_answer import JoinedAnswer
from ...resume.event_ids import EventIdSigner
from ..service import GenerationService, tandem_errors_only
from .answers import OPENAI_FORM, check_prompt_ids, check_prompt_logprobs
from .keep_alive import EventSender
from .openapi import LEFT_OUT, MAX_TOKENS, REQUEST_ID
from .parsing import left_out
from .requests import AnyRequest
from .respond import disconnected
from .resume import event_signer, with_event_id, with_id
from .writers import AnswerForm, StreamWriter, TokenIds

_T = TypeVar("_T")


class GenerationResponse(Response):
    """Responds to one request: with server-sent events, or with a body in full.

    An error before the first event or keep-alive becomes a response with the error's status, unless
    it is one of the `streamed_errors` of `form`; these and later errors become the last events of
    the stream. There is no keep-alive before the request is accepted.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        service: GenerationService,
        request: AnyRequest,
        context: RequestContext,
        form: AnswerForm = OPENAI_FORM,
    ) -> None:
        # Without x-accel-buffering: no, nginx would buffer the events.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]  # unknown for a stream
        if names := left_out(request.body, request.left_out):
            self.headers[LEFT_OUT] = names
        self._service = service
        self._request = request
        self._context = context
        self._form = form
        self._writer: StreamWriter | None = None  # set when the request is accepted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        respond = self._stream if self._request.is_streamed else self._send_full
        await _until_disconnect(receive, respond(scope, receive, send))

    async def render_full(self) -> Response:
        """Generates the whole answer; returns the response in full, or the response of an error."""
        answers = [JoinedAnswer() for _ in self._request.prompts]
        try:
            with tandem_errors_only():
                accepted = await self._accept()
                timelines = [inference_pb2.Timeline() for _ in accepted]
                async with aclosing(self._messages(accepted, timelines)) as messages:
                    async for prompt, message in messages:
                        answers[prompt].add(message)
                joined = [answer.messages() for answer in answers]
                model, prompts = self._described(accepted)
                body = await self._form.render_full(self._request, model, prompts, joined)
                return Response(body, media_type="application/json")
        except TandemError as error:
            return self._form.error_response(error, self._request.field)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = EventSender(send, self.raw_headers)
        last = b""
        try:
            with tandem_errors_only():
                accepted = await self._accept()
                writer = self._make_writer(accepted)
                signer = event_signer(accepted[0])
            self._writer = writer
            keep_alive = partial(writer.keep_alive, has_ids=signer is not None)
            async with (
                sender.kept_alive(keep_alive, self._context.keepalive_seconds),
                aclosing(self._events(accepted, writer, signer)) as events,
            ):
                async for event in events:
                    await sender.send(event)
        except TandemError as error:
            if not sender.has_started and not isinstance(error, self._form.streamed_errors):
                response = self._form.error_response(error, self._request.field)
                await self._send_other(response, scope, receive, send)
                return
            self._service.metrics.add(ERRORS, api="http", code=str(error.http_status))
            writer = self._writer or self._make_writer(())
            last = writer.error_event(error, self._request.field)
        await sender.end(last)

    async def _send_full(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._send_other(await self.render_full(), scope, receive, send)

    async def _events(
        self,
        accepted: Sequence[PreparedRequest],
        writer: StreamWriter,
        signer: EventIdSigner | None,
    ) -> AsyncGenerator[bytes, None]:
        usages = []
        with tandem_errors_only():
            timelines = [inference_pb2.Timeline() for _ in accepted]
            if accepted[0].progress:
                writer.continue_after(await asyncio.to_thread(delivered, accepted[0]))
            async with aclosing(self._messages(accepted, timelines)) as messages:
                async for prompt, message in messages:
                    has_ended = message.finish_reason != UNFINISHED
                    ids = message.token_ids
                    is_late = message.finish_reason == inference_pb2.FINISH_REASON_TIME
                    if signer is not None and signer.take(
                        message.choice, ids, has_ended, is_late=is_late
                    ):
                        writer.continue_after([message])
                        continue
                    if message.HasField("usage"):
                        usages.append(message.usage)
                    event = await writer.chunk(prompt, message)
                    # Without an event, the id of the next one covers these tokens: OpenAI's package
                    # fails on an id without data.
                    if signer is not None and event:
                        event = with_id(event, signer.sign(timelines[prompt].cached_tokens))
                    yield event
            yield writer.end(usages)

    async def _accept(self) -> list[PreparedRequest]:
        """Checks all prompts before the first runs: a body is refused in full or not at all."""
        self._context = with_event_id(self._request, self._context)
        context = replace(self._context, reduces_max_tokens=self._request.is_chat)
        if self._request.is_charged:
            context = replace(context, caller=replace(context.caller, quota=Quota()))
        accepted: list[PreparedRequest] = []
        check_num_sequences(len(self._request.prompts), self._request.common)
        size = num_echoed = 0
        for request in self._request.requests():
            accepted.append(await self._service.accept(request, context))
            submit = accepted[-1].tokens.submit
            if request.stopping.max_tokens > submit.max_tokens:
                self.headers[MAX_TOKENS] = str(submit.max_tokens)
            size += answer_size(request, len(submit.token_ids), submit.max_tokens)
            check_answer_size(size, request)
            num_echoed += count_choices(request) * len(accepted[-1].echo)
            check_echo_size(num_echoed)
            prompt_tokens = sum(len(each.tokens.submit.token_ids) for each in accepted)
            check_prompt_logprobs(self._request, prompt_tokens)
            check_prompt_ids(self._request, prompt_tokens)
            # Lets others run: the checks of up to MAX_PROMPTS short prompts never wait.
            await asyncio.sleep(0)
        return accepted

    def _messages(
        self, accepted: Sequence[PreparedRequest], timelines: Sequence[inference_pb2.Timeline]
    ) -> AsyncGenerator[tuple[int, inference_pb2.GenerateResponse], None]:
        runs = zip(accepted, timelines, strict=True)
        return _interleave([partial(self._service.run, each, timeline) for each, timeline in runs])

    def _make_writer(self, accepted: Sequence[PreparedRequest]) -> StreamWriter:
        assert self._form.make_writer is not None
        return self._form.make_writer(self._request, *self._described(accepted))

    def _described(self, accepted: Sequence[PreparedRequest]) -> tuple[str, TokenIds]:
        """Returns the model's name and the prompts, for a writer."""
        model = self._request.common.model or self._service.base_name
        return model, [each.tokens.submit.token_ids for each in accepted]

    async def _send_other(
        self, response: Response, scope: Scope, receive: Receive, send: Send
    ) -> None:
        for name in (REQUEST_ID, MAX_TOKENS, LEFT_OUT):
            if name in self.headers:
                response.headers[name] = self.headers[name]
        await response(scope, receive, send)


async def _interleave(
    streams: Sequence[Callable[[], AsyncGenerator[_T, None]]],
) -> AsyncGenerator[tuple[int, _T], None]:
    """Runs up to MAX_PROMPTS streams at a time; yields (index of the stream, item).

    Raises the first exception of a stream. Every stream is closed at the end, also after an error.
    The number of items that wait for a slow caller is at most the number of running streams; then
    the streams wait.
    """
    if len(streams) == 1:  # saves the cost of a task and a queue
        async with aclosing(streams[0]()) as stream:
            async for item in stream:
                yield 0, item
        return
    entries: asyncio.Queue[tuple[int, _T] | asyncio.Task[None]] = asyncio.Queue()
    num_running = min(len(streams), MAX_PROMPTS)
    room = asyncio.Semaphore(num_running)
    waiting = iter(enumerate(streams))  # shared by the tasks: each takes the next stream

    async def pump() -> None:
        for index, start in waiting:
            async with aclosing(start()) as stream:
                async for item in stream:
                    await room.acquire()
                    entries.put_nowait((index, item))

    pumps = [asyncio.create_task(pump()) for _ in range(num_running)]
    for task in pumps:
        task.add_done_callback(entries.put_nowait)
    try:
        while num_running:
            entry = await entries.get()
            if isinstance(entry, asyncio.Task):
                entry.result()
                num_running -= 1
            else:
                yield entry
                room.release()
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`; cancels it if the client disconnects or the caller is cancelled."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
    if not working.cancelled():
        working.result()
