"""Fakes for tests of the API servers without a model: a TokenSource and a byte tokenizer."""

import asyncio
import random
import zlib
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from tandem.proto import inference_pb2, worker_pb2
from tandem.proto.errors import DeadlineExceeded, TandemError
from tandem.router.deadline import before, earlier
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.router.request import TokenDelta, TokenRequest

EOS_ID = 256
BOS_ID = 257

_BYTE_OF_CHARACTER: Final = {
    character: byte
    for byte, character in bytes_to_unicode().items()  # type: ignore[no-untyped-call]
}

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown "
    "role') }}{% endif %}"
    "{{ '[' + message['role'] + '] ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)


def byte_tokenizer(chat_template: str | None = _CHAT_TEMPLATE) -> Tokenizer:
    """Returns a tokenizer with one token per byte, whose id is the byte, and the special tokens
    EOS_ID and BOS_ID.
    """
    backend = Backend(models.BPE(vocab=_BYTE_OF_CHARACTER, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken("<|end|>", special=True), AddedToken("<|begin|>", special=True)]
    )
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        eos_token="<|end|>",
        bos_token="<|begin|>",
        chat_template=chat_template,
    )
    return Tokenizer(fast)


@dataclass(kw_only=True)
class FakeTokenSource:
    """Generates `answer`, or else printable ASCII that prompt and seed determine.

    Ends with FINISH_REASON_STOP after EOS_ID or a stop token id, as a worker does, and with
    FINISH_REASON_LENGTH at max_tokens or the end of the answer. Choices take turns; choice i has
    the i-th of `answers`, or the text of seed + i. The log probability of token t is `-(t + 1) /
    1000`, its alternatives are 0, 1, 2, ...; the score of a hypothesis is the sum.
    """

    answer: Sequence[int] | None = None
    answers: Sequence[Sequence[int]] = ()  # instead of `answer`, one for each choice
    tokens_per_delta: int = 1
    error: TandemError | Exception | None = None  # raised after `error_after` tokens
    error_after: int = 0
    stall_after: int | None = (
        None  # after so many tokens no more come, until `goes_on` or the request is cancelled
    )
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[TokenRequest] = field(default_factory=list)
    running: int = 0
    max_running: int = 0
    cached_tokens: int = 0  # of each prompt, as the timeline says
    cancelled: int = 0  # requests that were closed before their end
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def generate(
        self,
        request: TokenRequest,
        timeline: inference_pb2.Timeline,
        cancelled: Collection[int] = (),
    ) -> AsyncGenerator[TokenDelta, None]:
        """See TokenSource."""
        await self._count(+1, request)
        timeline.cached_tokens = self.cached_tokens
        finished = False
        try:
            for delta in self._deltas(request, cancelled):
                try:
                    until = earlier(request.deadline, request.ends_at)
                    await before(until, self._fail_or_stall(delta.first_index))
                except DeadlineExceeded:
                    if until == request.deadline:
                        raise
                    yield TokenDelta(
                        first_index=delta.first_index,
                        ids=(),
                        finish_reason=inference_pb2.FINISH_REASON_TIME,
                        choice=delta.choice,
                    )
                    break
                timeline.completion_tokens += len(delta.ids)
                yield delta
                await asyncio.sleep(0)  # lets others run, as a network does
            finished = True
        finally:
            timeline.request_id = request.request_id
            timeline.prompt_tokens = len(request.submit.token_ids)
            timeline.attempts = 1
            self.cancelled += not finished
            await self._count(-1)

    async def wait_running(self, count: int) -> None:
        """Waits until exactly `count` requests run."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.running == count)

    async def _count(self, change: int, request: TokenRequest | None = None) -> None:
        self.running += change
        self.max_running = max(self.running, self.max_running)
        if request is not None:
            self.requests.append(request)
        async with self._changed:
            self._changed.notify_all()

    async def _fail_or_stall(self, start: int) -> None:
        self._fail(start)
        if self.stall_after is not None and start >= self.stall_after:
            await self.goes_on.wait()
            self._fail(start)

    def _fail(self, start: int) -> None:
        if self.error is not None and start >= self.error_after:
            raise self.error

    def _deltas(self, request: TokenRequest, cancelled: Collection[int]) -> Iterator[TokenDelta]:
        completions = [
            self._tokens(request, choice) for choice in range(request.submit.num_choices)
        ]
        starts = [
            _start_after(ids, completions[choice]) for choice, ids in enumerate(request.emitted)
        ]
        starts, has_prompt = starts or [0] * request.submit.num_choices, False
        # A hypothesis of a beam search comes whole.
        size = request.submit.max_tokens if request.has_beam_search else self.tokens_per_delta
        while any(start < len(ids) for start, ids in zip(starts, completions, strict=True)):
            for choice, ids in enumerate(completions):
                start = starts[choice]
                part = ids[start : start + size]
                starts[choice] += size
                if not part or choice in cancelled:
                    continue
                is_last = start + len(part) == len(ids)
                prompt: tuple[worker_pb2.TokenScores, ...] = ()
                if not start and not has_prompt and request.submit.HasField("prompt_logprobs"):
                    has_prompt = True
                    prompt = tuple(
                        _scores(token, request.submit.prompt_logprobs)
                        for token in request.submit.token_ids[1:]
                    )
                yield TokenDelta(
                    first_index=start,
                    ids=tuple(part),
                    finish_reason=_reason(part[-1], request)
                    if is_last
                    else inference_pb2.FINISH_REASON_UNSPECIFIED,
                    choice=choice,
                    logprobs=()
                    if not request.submit.HasField("logprobs")
                    else tuple(_scores(t, request.submit.logprobs) for t in part),
                    prompt_logprobs=prompt,
                    score=sum(_logprob(token) for token in ids)
                    if is_last and request.has_beam_search
                    else 0.0,
                )

    def _tokens(self, request: TokenRequest, choice: int) -> list[int]:
        if self.answers:
            ids = list(self.answers[choice])
        else:
            ids = list(self.answer) if self.answer is not None else _random_text(request, choice)
        ids = ids[: request.submit.max_tokens]
        ends = {*request.submit.stop_token_ids, *([] if request.submit.ignore_eos else [EOS_ID])}
        stops = [i for i, token in enumerate(ids) if token in ends]
        return ids[: stops[0] + 1] if stops else ids


def _start_after(emitted: tuple[int, ...] | None, ids: list[int]) -> int:
    """Returns the index of the next token of a choice that was begun elsewhere; beyond the end if
    it has ended.
    """
    if emitted is None:
        return len(ids)
    assert list(emitted) == ids[: len(emitted)]
    return len(emitted)


def _random_text(request: TokenRequest, choice: int) -> list[int]:
    state = random.Random(
        zlib.crc32(repr(request.submit.token_ids).encode())
        ^ (request.submit.sampling.seed + choice) % 2**64
    )
    return [state.randrange(0x20, 0x7F) for _ in range(min(request.submit.max_tokens, 4_096))]


def _reason(last: int, request: TokenRequest) -> "inference_pb2.FinishReason":
    if last in request.submit.stop_token_ids or (last == EOS_ID and not request.submit.ignore_eos):
        return inference_pb2.FINISH_REASON_STOP
    return inference_pb2.FINISH_REASON_LENGTH


def _logprob(token: int) -> float:
    return -(token + 1) / 1000


def _scores(token: int, num_top: int) -> worker_pb2.TokenScores:
    return worker_pb2.TokenScores(
        logprob=_logprob(token),
        rank=token + 1,
        top_ids=range(num_top),
        top_logprobs=[_logprob(i) for i in range(num_top)],
    )
