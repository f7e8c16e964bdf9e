"""Joins the messages of an answer as they come, for answers that are not streamed."""

from io import StringIO

from ...proto import inference_pb2


class JoinedAnswer:
    """Joins the messages of one prompt; keeps one message of each completion, not of each token."""

    def __init__(self) -> None:
        # By choice: the message, its text and its reasoning. A text that grows within the message
        # would be copied for each token.
        self._choices: dict[int, tuple[inference_pb2.GenerateResponse, StringIO, StringIO]] = {}
        self._usage: inference_pb2.Usage | None = None

    def add(self, message: inference_pb2.GenerateResponse) -> None:
        """Adds the next message."""
        if message.choice not in self._choices:
            new = inference_pb2.GenerateResponse()
            self._choices[message.choice] = new, StringIO(), StringIO()
        joined, text, reasoning = self._choices[message.choice]
        joined.MergeFrom(message)  # appends to lists, replaces other fields
        text.write(message.text)
        reasoning.write(message.reasoning)
        if message.HasField("usage"):
            self._usage = message.usage

    def messages(self) -> list[inference_pb2.GenerateResponse]:
        """Returns one message of each completion, in the order of the choices.

        The first has the prompt's log probabilities, the last has the usage.
        """
        found = []
        for _, (joined, text, reasoning) in sorted(self._choices.items()):
            joined.text = text.getvalue()
            joined.reasoning = reasoning.getvalue()
            joined.ClearField("first_index")  # of the last message
            joined.ClearField("usage")
            found.append(joined)
        if found and self._usage is not None:
            found[-1].usage.CopyFrom(self._usage)
        return found
