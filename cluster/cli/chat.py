"""`tandem chat`: holds a conversation in the terminal, or through a pipe."""

import sys
from dataclasses import dataclass, field
from typing import Annotated, Final, cast

import typer
from rich.console import Console

from ...proto.errors import InvalidArgument, TandemError
from ...router.client.client import Client
from ...router.client.types import ChatOptions, Completion
from ..service_url import GRPC_URL, ServiceAccess
from ..tables import table_console
from . import options as o
from .answers import print_timeline
from .questions import open_keyboard, read_question

_HELP: Final = '''\
/clear   Clears the conversation; the system message stays.
/retry   Asks the last question again.
/quit    Ends the chat; so does Ctrl-D.
"""      Begins a question of several lines, to the next """
\\        At the end of a line: continues the question on the next one
//       Begins a question with a slash'''


@o.request_options(
    "model",
    "max_tokens",
    "stop",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    max_tokens=512,
    temperature=0.0,
)
@o.service_options(GRPC_URL)
def chat(
    context: typer.Context,
    service: ServiceAccess,
    system: Annotated[str, typer.Option(help="A system message to begin with.")] = "",
    timeline: o.ShowTimeline = False,
) -> None:
    """Chat with the model, which sees the whole conversation.

    /help lists the commands. Ctrl-C cuts an answer short, Ctrl-D ends the chat. In a pipe each line
    is a question, and the first error ends the chat.
    """
    options = cast(ChatOptions, o.given_options(context.params))
    console = table_console(stderr=True)
    interactive = sys.stdin.isatty()
    with (
        service.connect(Client) as client,
        open_keyboard() as read_line,
    ):
        session = ChatSession(client, options, console, system, shows_timeline=timeline)
        if interactive:
            console.print("/help lists the commands, Ctrl-D ends the chat", style="dim")
        while True:
            try:
                session.take(read_question(read_line))
            except EOFError:
                break
            except KeyboardInterrupt:
                if not interactive:
                    raise
                console.print()
            except TandemError as error:
                if not interactive:
                    raise
                console.print(f"error: {error}", style="red")
    if interactive:
        console.print()


@dataclass(slots=True)
class ChatSession:
    """Runs a chat, line by line: each is a question or a command.

    Answers go to stdout, and everything else to `console`.
    """

    client: Client
    options: ChatOptions
    console: Console
    system: str = ""
    shows_timeline: bool = False  # after each answer
    # Questions and answers; the next question replaces a last one without an answer.
    messages: list[dict[str, str]] = field(default_factory=list)

    def take(self, line: str) -> None:
        """Handles a question, or a command if the line begins with one slash.

        Raises EOFError at the end of the chat, and a TandemError, after which the session can
        continue.
        """
        match line:
            case "":
                return
            case "/help":
                self.console.print(_HELP)
            case "/clear":
                self.messages.clear()
            case "/retry":
                self._retry()
            case "/quit":
                raise EOFError
            case _ if line.startswith("/") and not line.startswith("//"):
                raise InvalidArgument("no such command; /help lists them", line.partition(" ")[0])
            case _:
                self._ask(line.removeprefix("/"))

    def _ask(self, question: str) -> None:
        """Streams the answer to stdout, and before it the model's reasoning to stderr.

        Keeps the answer in the conversation, also if it is cut off or fails.
        """
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()
        self.messages.append({"role": "user", "content": question})
        system = [{"role": "system", "content": self.system}] if self.system else []
        answer = ""
        after_reasoning = False
        with self.client.stream_chat([*system, *self.messages], **self.options) as stream:
            try:
                for delta in stream:
                    answer += delta.text
                    if delta.reasoning:
                        typer.secho(delta.reasoning, nl=False, err=True, dim=True)
                        after_reasoning = True
                    if delta.text and after_reasoning:
                        typer.echo(err=True)
                        after_reasoning = False
                    typer.echo(delta.text, nl=False)
            except (KeyboardInterrupt, TandemError):
                if answer:
                    self._end(answer)
                raise
            if after_reasoning:
                typer.echo(err=True)
            self._end(answer)
            self._note_cut(stream.completion())
            if self.shows_timeline:
                print_timeline(stream.timeline)

    def _end(self, answer: str) -> None:
        self.messages.append({"role": "assistant", "content": answer})
        typer.echo()

    def _note_cut(self, completion: Completion) -> None:
        """Tells that an answer reached its maximum of tokens."""
        if completion.finish_reason == "length":
            num_tokens = completion.usage.completion_tokens
            self.console.print(f"cut off at {num_tokens} tokens; use --max-tokens", style="dim")

    def _retry(self) -> None:
        if not self.messages:
            raise InvalidArgument("there is no question yet", "/retry")
        if self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        self._ask(self.messages[-1]["content"])
