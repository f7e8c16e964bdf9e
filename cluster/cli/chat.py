"""`tandem chat`: holds a conversation in the terminal, or through a pipe."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, cast, get_type_hints

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from ...proto.errors import InvalidArgument, TandemError
from ...router.client.client import Client
from ...router.client.types import ChatOptions, Timeline
from ..service_url import GRPC_URL, ServiceAccess
from ..tables import table_console
from ..text_files import write_text
from . import options as o
from .answers import print_timeline
from .conversation import Conversation, open_keyboard, read_question

SETTABLE: Final = (
    "model",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop",
    "priority",
    "template_kwargs",
)
"""The options that /set accepts."""


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
        session = ChatSession(
            client, options, console, Conversation(system), always_timeline=timeline
        )
        if interactive:
            console.print("/help lists the commands, Ctrl-D ends the chat", style="dim")
        while not session.ended:
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
                console.print(f"error: {error}", style="red", markup=False, highlight=False)
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
    conversation: Conversation = field(default_factory=Conversation)
    always_timeline: bool = False
    timeline: Timeline | None = None  # of the last answer; None if it was cut
    ended: bool = False

    def take(self, line: str) -> None:
        """Handles a question, or a command if the line begins with one slash.

        Raises a TandemError, after which the session can continue.
        """
        if line.startswith("/") and not line.startswith("//"):
            self._command(*line[1:].partition(" ")[::2])
        elif line:
            self._ask(line.removeprefix("/") if line.startswith("//") else line)

    def _ask(self, question: str) -> None:
        """Streams the answer to stdout and the model's reasoning to stderr.

        Keeps the answer in the conversation, also if it is cut off or fails.
        """
        self.conversation.ask(question)
        self.timeline = None
        answer = ""
        with self.client.stream_chat(self.conversation.messages, **self.options) as stream:
            try:
                for delta in stream:
                    answer += delta.text
                    if delta.reasoning:
                        typer.secho(delta.reasoning, nl=False, err=True, dim=True)
                    typer.echo(delta.text, nl=False)
            except (KeyboardInterrupt, TandemError):
                if answer:
                    self.conversation.answer(answer)
                    typer.echo()
                raise
            self.conversation.answer(answer)
            typer.echo()
            self.timeline = stream.timeline
        if self.always_timeline:
            print_timeline(self.timeline)

    def _command(self, name: str, argument: str) -> None:
        if name not in _COMMANDS:
            raise InvalidArgument("no such command; /help lists them", f"/{name}")
        _COMMANDS[name][0](self, argument.strip())

    def help(self, _: str) -> None:
        """Lists the commands."""
        table = Table(box=None, show_header=False, pad_edge=False)
        for name, (command, argument) in _COMMANDS.items():
            table.add_row(f"/{name} {argument}", command.__doc__)
        table.add_row('"""', 'Begins a question of several lines, to the next """')
        table.add_row("\\", "At the end of a line: continues the question on the next one")
        table.add_row("//", "Begins a question with a slash")
        self.console.print(table, markup=False)

    def clear(self, _: str) -> None:
        """Clears the conversation; the system message stays."""
        self.conversation.turns.clear()

    def system(self, text: str) -> None:
        """Sets the system message; without TEXT: removes it."""
        self.conversation.system = text

    def retry(self, _: str) -> None:
        """Asks the last question again."""
        question = self.conversation.undo()
        if question is None:
            raise InvalidArgument("there is no question yet", "/retry")
        self._ask(question)

    def undo(self, _: str) -> None:
        """Removes the last question and its answer."""
        question = self.conversation.undo()
        if question is None:
            raise InvalidArgument("there is no question yet", "/undo")
        self._print(f"removed: {question}")

    def save(self, name: str) -> None:
        """Writes the messages as JSON."""
        if not name:
            raise InvalidArgument("needs the name of a file", "/save")
        messages = json.dumps(self.conversation.messages, ensure_ascii=False, indent=2)
        write_text(Path(name), messages + "\n", "/save")
        self._print(f"{len(self.conversation.messages)} messages in {name}")

    def show_timeline(self, switch: str) -> None:
        """Shows the timeline of the last answer; on: of each answer from now on."""
        if switch in ("on", "off"):
            self.always_timeline = switch == "on"
        elif switch:
            raise InvalidArgument("must be on, off or absent", "/timeline")
        elif self.timeline is None:
            self._print("the last answer has no timeline")
        else:
            print_timeline(self.timeline)

    def set(self, assignment: str) -> None:
        """Sets an option, as temperature 0.7; without VALUE its default; without NAME lists all."""
        name, _, value = assignment.partition(" ")
        if not name:
            self._print("  ".join(f"{key}={value}" for key, value in self.options.items()))
        elif name not in SETTABLE:
            raise InvalidArgument(f"cannot be set here; options: {', '.join(SETTABLE)}", name)
        else:
            chosen: dict[str, Any] = {**self.options}
            chosen.pop(name, None)
            self.options = ChatOptions(**chosen, **_parsed(name, value.strip()))  # type: ignore[typeddict-item]

    def quit(self, _: str) -> None:
        """Ends the chat; so does Ctrl-D."""
        self.ended = True

    def _print(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False, highlight=False)


_COMMANDS: Final[dict[str, tuple[Callable[[ChatSession, str], None], str]]] = {
    "help": (ChatSession.help, ""),
    "clear": (ChatSession.clear, ""),
    "system": (ChatSession.system, "TEXT"),
    "retry": (ChatSession.retry, ""),
    "undo": (ChatSession.undo, ""),
    "save": (ChatSession.save, "FILE"),
    "timeline": (ChatSession.show_timeline, "[on|off]"),
    "set": (ChatSession.set, "[NAME [VALUE]]"),
    "quit": (ChatSession.quit, ""),
}
"""Each command with its argument; the docstring is its help."""


def _parsed(name: str, value: str) -> dict[str, object]:
    """Returns the option with its value, parsed by its type; empty without a value."""
    if not value:
        return {}
    adapter: TypeAdapter[object] = TypeAdapter(get_type_hints(ChatOptions)[name])
    try:
        if value[0] in "[{":
            return {name: adapter.validate_json(value)}
        return {name: adapter.validate_python(value)}
    except ValidationError as error:
        raise InvalidArgument(f"{value!r}: {error.errors()[0]['msg']}", name) from None
