"""Joins the messages of an answer as they come, for answers that are not streamed."""

from io import StringIO

from ...proto import inference_pb2


class JoinedAnswer:
    """Joins the messages of one prompt; keeps one message of each completion, not of each token."""

    def __init__(self) -> None:
        self._choices: dict[int, _JoinedChoice] = {}
        self._usage: inference_pb2.Usage | None = None

    def add(self, message: inference_pb2.GenerateResponse) -> None:
        """Adds the next message."""
        if message.choice not in self._choices:
            self._choices[message.choice] = _JoinedChoice()
        self._choices[message.choice].add(message)
        if message.HasField("usage"):
            self._usage = message.usage

    def messages(self) -> list[inference_pb2.GenerateResponse]:
        """Returns one message of each completion, in the order of the choices.

        The first has the prompt's log probabilities, the last has the usage.
        """
        joined = [self._choices[number].message() for number in sorted(self._choices)]
        if joined and self._usage is not None:
            joined[-1].usage.CopyFrom(self._usage)
        return joined


class _JoinedChoice:
    """Joins the messages of one completion."""

    def __init__(self) -> None:
        self._message = inference_pb2.GenerateResponse()
        self._text = StringIO()  # a field of a message that grows would be copied for each token
        self._reasoning = StringIO()

    def add(self, part: inference_pb2.GenerateResponse) -> None:
        self._message.MergeFrom(part)  # appends to lists, replaces other fields
        self._text.write(part.text)
        self._reasoning.write(part.reasoning)

    def message(self) -> inference_pb2.GenerateResponse:
        self._message.text = self._text.getvalue()
        self._message.reasoning = self._reasoning.getvalue()
        self._message.ClearField("first_index")  # of the last part
        self._message.ClearField("usage")
        return self._message
