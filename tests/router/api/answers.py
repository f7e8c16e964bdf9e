"""Sends requests to a GenerationService and checks properties of every answer."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from tandem.proto import inference_pb2
from tandem.router.api.service import GenerationService
from tandem.router.frontend.prepare import RequestContext
from tandem.router.frontend.served_model import ServedModel
from tandem.router.request import TokenSource

STOP = inference_pb2.FINISH_REASON_STOP
LENGTH = inference_pb2.FINISH_REASON_LENGTH
NONE = inference_pb2.FINISH_REASON_UNSPECIFIED
Answers = list[inference_pb2.GenerateResponse]


def request(**fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(**({"prompt": {"text": "hi"}} | fields))


async def start(
    model: ServedModel,
    source: TokenSource,
    message: inference_pb2.GenerateRequest | None = None,
    timeline: inference_pb2.Timeline | None = None,
    deadline: float | None = None,
) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
    service = GenerationService([model], source)
    context = RequestContext(arrived=time.monotonic(), deadline=deadline)
    accepted = await service.accept(request() if message is None else message, context)
    async with aclosing(
        service.run(accepted, inference_pb2.Timeline() if timeline is None else timeline)
    ) as run:
        async for answer in run:
            yield answer


async def collect(*args: Any, **kwargs: Any) -> Answers:
    """Returns all messages of a request for one completion; checks properties of every stream."""
    messages = await collect_all(*args, **kwargs)
    assert {message.choice for message in messages} == {0}
    assert messages[-1].usage.completion_tokens == len(ids(messages))
    return messages


async def collect_all(*args: Any, **kwargs: Any) -> Answers:
    """Returns all messages; checks properties of every choice and of the whole answer."""
    messages = [message async for message in start(*args, **kwargs)]
    counts: dict[int, int] = {}
    finished = set()
    for message in messages:
        assert message.choice not in finished
        assert message.first_index == counts.setdefault(message.choice, 0)
        counts[message.choice] += len(message.token_ids)
        if message.finish_reason != NONE:
            finished.add(message.choice)
    assert finished == set(range(len(counts)))
    assert [message.HasField("usage") for message in messages] == [False] * (len(messages) - 1) + [
        True
    ]
    assert len({message.request_id for message in messages}) == 1
    return messages


def of_choice(messages: Answers, choice: int) -> Answers:
    return [message for message in messages if message.choice == choice]


async def fill(
    seen: Answers, messages: AsyncGenerator[inference_pb2.GenerateResponse, None]
) -> None:
    async for message in messages:
        seen.append(message)


def text(messages: Answers) -> str:
    return "".join(message.text for message in messages)


def ids(messages: Answers) -> list[int]:
    return [i for message in messages for i in message.token_ids]
