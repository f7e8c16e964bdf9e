"""What the service does, whichever door a request came through: text in, text out.

Knows nothing of gRPC, HTTP or workers.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Final

from ...proto import inference_pb2, limits
from ...proto.errors import InternalError, InvalidArgument, NotFound, TandemError
from ..deadline import before, deadline_passed
from ..frontend.prepare import PreparedRequest, ServedModel, check_prompt, encode_prompt, prepare
from ..frontend.sampling import check_count, check_ids
from ..output.processor import OutputProcessor
from ..request import TokenSource
from ..scheduling.admission import Admission

_log = logging.getLogger(__name__)

_UNFINISHED = inference_pb2.FINISH_REASON_UNSPECIFIED

_THREAD_FROM_TOKENS: Final = 4_096

_CHARACTERS_A_TOKEN: Final = 4
_TYPICAL_TOKENS: Final = 256


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


class GenerationService:
    """Generates and tokenises by the models of one TokenSource."""

    def __init__(self, models: Sequence[ServedModel], source: TokenSource, admission: Admission | None = None) -> None:
        """`models`: at least one; all are names of what `source` generates with. `admission`, the dispatcher's, refuses
        before the work of tokenising what it would refuse after it."""
        self._models = {model.name: model for model in models}
        self._source = source
        self._admission = admission

    @property
    def models(self) -> tuple[ServedModel, ...]:
        return tuple(self._models.values())

    async def accept(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        arrived: float,
        deadline: float | None,
        default_max_tokens: int | None = None,
        tenant: str = "",
    ) -> PreparedRequest:
        """Checks and tokenises `request`. `arrived` and `deadline` are times of time.monotonic(); `tenant` is who asks,
        as `tenant_of` names it.

        Raises InvalidArgument, NotFound, Overloaded or DeadlineExceeded."""
        model = self._model(request.model)

        def admit() -> None:
            if deadline is not None and time.monotonic() >= deadline:
                raise deadline_passed()
            if self._admission is not None:
                self._admission.check_early(_estimated_tokens(request), tenant, request.priority, deadline)

        checked = prepare(
            request,
            model,
            arrived=arrived,
            deadline=deadline,
            default_max_tokens=default_max_tokens,
            tenant=tenant,
            admit=admit,
        )
        return await before(deadline, checked)

    async def run(
        self, accepted: PreparedRequest, timeline: inference_pb2.Timeline
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Yields the completions of one prompt. The last message of each, and only that, has a finish reason; the last
        of all, and only that, the usage.

        Every generated token id is reported, the one that ends the completion too, up to the end of a stop string; a
        message may have ids whose text is still held back. `timeline` has its request_id at once and is whole when the
        generator has ended. Close the generator to cancel. Raises a TandemError.
        """
        timeline.request_id = accepted.request_id
        choices = OutputProcessor(accepted)
        is_ranked = accepted.tokens.num_choices > accepted.num_answers
        held: list[inference_pb2.GenerateResponse] = []  # until all completions have ended
        try:
            async with aclosing(self._source.generate(accepted.tokens, timeline, choices.ended)) as deltas:
                async for delta in deltas:
                    if delta.prompt_logprobs:
                        await choices.push_prompt(delta.prompt_logprobs)
                    message = choices.push(delta)
                    if choices.num_open and not is_ranked:
                        yield message
                        continue
                    held.append(message)
                    if not choices.num_open and delta.finish_reason == _UNFINISHED:
                        break  # by a stop string: what the source still generates is not wanted
        finally:  # the source is done with the timeline now
            timeline.request_id = accepted.request_id
        if choices.num_open:
            raise InternalError("the token stream of this request broke")
        timeline.completion_tokens = choices.num_tokens
        answers = choices.best(held) if is_ranked else held
        answers[-1].usage.prompt_tokens = len(accepted.tokens.prompt)
        answers[-1].usage.completion_tokens = choices.num_tokens
        answers[-1].usage.cached_tokens = timeline.cached_tokens
        for message in answers:
            yield message

    async def tokenize(self, request: inference_pb2.TokenizeRequest) -> inference_pb2.TokenizeResponse:
        """The token ids that a request would have. Raises InvalidArgument or NotFound."""
        tokenizer = self._model(request.model).tokenizer
        check_prompt(request.prompt, tokenizer)
        ids = await encode_prompt(request.prompt, tokenizer)
        return inference_pb2.TokenizeResponse(token_ids=ids)

    async def detokenize(self, request: inference_pb2.DetokenizeRequest) -> inference_pb2.DetokenizeResponse:
        """The text of token ids, without special tokens. Raises InvalidArgument or NotFound."""
        tokenizer, ids = self._model(request.model).tokenizer, request.token_ids
        check_count(len(ids), limits.MAX_TOKENS, "ids", "token_ids")
        check_ids(ids, tokenizer.vocab_size, "token_ids")
        if len(ids) < _THREAD_FROM_TOKENS:
            text = tokenizer.decode(ids)
        else:
            text = await asyncio.to_thread(tokenizer.decode, tuple(ids))
        return inference_pb2.DetokenizeResponse(text=text)

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


def _estimated_tokens(request: inference_pb2.GenerateRequest) -> int:
    """Of prompt and completion, of a checked request before it is tokenised."""
    prompt = request.prompt
    characters = len(prompt.text) + sum(len(message.content) for message in prompt.chat.messages)
    num_generated = request.stopping.max_tokens or _TYPICAL_TOKENS
    num_choices = max(request.n, request.best_of, request.beam_search.width, 1)
    num_prompt = len(prompt.token_ids.ids) + characters // _CHARACTERS_A_TOKEN
    return num_prompt + num_choices * min(num_generated, _TYPICAL_TOKENS)
