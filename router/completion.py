"""What the service does, whichever door a request came through: text in, text out.

Knows nothing of gRPC, HTTP or workers.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ..proto import inference_pb2, limits
from ..proto.errors import DeadlineExceeded, InternalError, InvalidArgument, NotFound, TandemError
from .detokenize import Transcript
from .prepare import ServedModel, encode_prompt, prepare
from .request import TokenDelta, TokenRequest, TokenSource
from .tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_UNFINISHED = inference_pb2.FINISH_REASON_UNSPECIFIED
_STOP = inference_pb2.FINISH_REASON_STOP


@contextmanager
def tandem_errors_only() -> Iterator[None]:
    """Turns an exception that is no TandemError, a defect of ours, into InternalError with a fixed text; logs it."""
    try:
        yield
    except TandemError:
        raise
    except Exception as error:
        _log.exception("a request failed by a defect of the service")
        raise InternalError("the service failed at this request") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A request that was found good."""

    request_id: str  # as the client knows it
    tokens: TokenRequest
    stop: tuple[str, ...]
    tokenizer: Tokenizer


class Completions:
    """Generates and tokenises by the models of one TokenSource."""

    def __init__(self, models: Sequence[ServedModel], source: TokenSource) -> None:
        """`models`: at least one; all are names of what `source` generates with."""
        self._models = {model.name: model for model in models}
        self._source = source

    @property
    def models(self) -> tuple[ServedModel, ...]:
        return tuple(self._models.values())

    async def generate(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        arrived: float,
        deadline: float | None,
        timeline: inference_pb2.Timeline,
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """`accept` and `run` in one."""
        accepted = await self.accept(request, arrived=arrived, deadline=deadline)
        async with aclosing(self.run(accepted, timeline)) as messages:
            async for message in messages:
                yield message

    async def accept(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        arrived: float,
        deadline: float | None,
        default_max_tokens: int | None = None,
    ) -> Accepted:
        """Checks and tokenises `request`. `arrived` and `deadline` are times of time.monotonic().

        Raises InvalidArgument, NotFound or DeadlineExceeded."""
        model = self._model(request.model)
        checked = prepare(request, model, arrived=arrived, deadline=deadline, default_max_tokens=default_max_tokens)
        tokens, stop = await _before(deadline, checked)
        return Accepted(
            request_id=request.request_id or tokens.request_id, tokens=tokens, stop=stop, tokenizer=model.tokenizer
        )

    async def run(
        self, accepted: Accepted, timeline: inference_pb2.Timeline
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Yields the completion of one prompt; the last message, and only that, has finish reason and usage.

        Every generated token id is reported, the one that ends the completion too, up to the end of a stop string; a
        message may have ids whose text is still held back. `timeline` has its request_id at once and is whole when the
        generator has ended. Close the generator to cancel. Raises a TandemError.
        """
        tokens, request_id = accepted.tokens, accepted.request_id
        timeline.request_id = request_id
        transcript = Transcript(accepted.tokenizer, tokens.prompt, accepted.stop)
        last = inference_pb2.GenerateResponse()
        try:
            async with aclosing(self._deltas(tokens, timeline)) as deltas:
                async for delta in deltas:
                    response = _response(request_id, delta, transcript)
                    if response.finish_reason == _UNFINISHED:
                        yield response
                        continue
                    last = response
                    if delta.finish_reason == _UNFINISHED:
                        break  # a stop string: what the source still generates is not wanted
        finally:  # the source is done with the timeline now
            timeline.request_id = request_id
        timeline.completion_tokens = last.first_index + len(last.token_ids)
        last.usage.prompt_tokens = len(tokens.prompt)
        last.usage.completion_tokens = timeline.completion_tokens
        last.usage.cached_tokens = timeline.cached_tokens
        yield last

    async def tokenize(self, request: inference_pb2.TokenizeRequest) -> inference_pb2.TokenizeResponse:
        """The token ids that `generate` would see. Raises InvalidArgument or NotFound."""
        ids = await encode_prompt(request.prompt, self._model(request.model).tokenizer)
        return inference_pb2.TokenizeResponse(token_ids=ids)

    def list_models(self) -> inference_pb2.ListModelsResponse:
        models = [inference_pb2.Model(id=m.name, context_tokens=m.context_tokens) for m in self.models]
        return inference_pb2.ListModelsResponse(models=models)

    def _model(self, name: str) -> ServedModel:
        if not name and len(self._models) == 1:
            return self.models[0]
        if len(name) > limits.MAX_MODEL_NAME_CHARACTERS:
            raise InvalidArgument(f"has more than {limits.MAX_MODEL_NAME_CHARACTERS} characters", "model")
        if name not in self._models:
            raise NotFound(f"model: {name!r} is not served here; served: {', '.join(self._models)}")
        return self._models[name]

    async def _deltas(self, tokens: TokenRequest, timeline: inference_pb2.Timeline) -> AsyncGenerator[TokenDelta, None]:
        """The source's deltas, under the deadline, and each kept to the source's contract."""
        num_tokens, finished = 0, False
        async with aclosing(self._source.generate(tokens, timeline)) as deltas:
            while (delta := await _before(tokens.deadline, anext(deltas, None))) is not None:
                if delta.first_index != num_tokens or finished:
                    raise InternalError("the token stream of this request broke")
                num_tokens += len(delta.ids)
                finished = delta.finish_reason != _UNFINISHED
                yield delta
        if not finished:
            raise InternalError("the token stream of this request broke")


def _response(request_id: str, delta: TokenDelta, transcript: Transcript) -> inference_pb2.GenerateResponse:
    """One message with the delta's ids and the text that they complete."""
    ids, reason = delta.ids, delta.finish_reason
    piece = transcript.push(ids[:-1] if reason == _STOP else ids)  # the token that stops has no text
    text = piece.text
    if piece.stopped:
        ids, reason = ids[: piece.num_tokens], _STOP
    elif reason != _UNFINISHED:
        rest = transcript.finish()
        text += rest.text
        reason = _STOP if rest.stopped else reason
    return inference_pb2.GenerateResponse(
        request_id=request_id, text=text, token_ids=ids, first_index=delta.first_index, finish_reason=reason
    )


async def _before(deadline: float | None, result: Awaitable[_T]) -> _T:
    """Awaits `result`; raises DeadlineExceeded, having cancelled it, if time.monotonic() passes `deadline`."""
    if deadline is None:
        return await result
    scope = asyncio.timeout(deadline - time.monotonic())
    try:
        async with scope:
            return await result
    except TimeoutError:
        if scope.expired():
            raise DeadlineExceeded("the request's deadline passed") from None
        raise
