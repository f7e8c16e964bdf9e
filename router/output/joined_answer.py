"""Joins the messages of an answer as they come, for answers that are not streamed."""

from collections.abc import Iterable
from io import StringIO

from ...proto import inference_pb2


class JoinedAnswer:
    """Joins the messages of one prompt as they come: it keeps one message of each completion, not
    one of each token.
    """

    def __init__(self) -> None:
        self._choices: dict[int, _JoinedChoice] = {}
        self._usage: inference_pb2.Usage | None = None
        self._prompt_logprobs: list[inference_pb2.TokenLogprobs] = []

    def add(self, message: inference_pb2.GenerateResponse) -> None:
        """Takes the next message."""
        if message.choice not in self._choices:
            self._choices[message.choice] = _JoinedChoice(message)
        self._choices[message.choice].add(message)
        self._prompt_logprobs.extend(message.prompt_logprobs)
        if message.HasField("usage"):
            self._usage = message.usage

    def messages(self) -> list[inference_pb2.GenerateResponse]:
        """Returns a message for each completion, in the order of the choices. The first has the
        prompt's log probabilities, the last the usage.
        """
        joined = [choice.joined() for _, choice in sorted(self._choices.items())]
        if joined:
            joined[0].prompt_logprobs.extend(self._prompt_logprobs)
        if joined and self._usage is not None:
            joined[-1].usage.CopyFrom(self._usage)
        return joined


class _JoinedChoice:
    def __init__(self, first: inference_pb2.GenerateResponse) -> None:
        self._message = inference_pb2.GenerateResponse(
            request_id=first.request_id, choice=first.choice
        )
        self._text = StringIO()  # a field of a message that grows would be copied for each token
        self._reasoning = StringIO()

    def add(self, part: inference_pb2.GenerateResponse) -> None:
        joined = self._message
        self._text.write(part.text)
        self._reasoning.write(part.reasoning)
        joined.token_ids.extend(part.token_ids)
        joined.logprobs.extend(part.logprobs)
        joined.tool_calls.extend(part.tool_calls)
        joined.embedding.extend(part.embedding)
        joined.finish_reason = part.finish_reason
        joined.score = part.score
        joined.stop_string = part.stop_string

    def joined(self) -> inference_pb2.GenerateResponse:
        self._message.text = self._text.getvalue()
        self._message.reasoning = self._reasoning.getvalue()
        return self._message


def join_choices(
    messages: Iterable[inference_pb2.GenerateResponse],
) -> list[inference_pb2.GenerateResponse]:
    """Joins the messages of each completion, but for the prompt's log probabilities; in the order
    of the choices.
    """
    choices: dict[int, _JoinedChoice] = {}
    for message in messages:
        if message.choice not in choices:
            choices[message.choice] = _JoinedChoice(message)
        choices[message.choice].add(message)
    return [choice.joined() for _, choice in sorted(choices.items())]
