"""`tandem chat`: a conversation in the terminal, or through a pipe."""

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
from . import options as o
from .answers import error_console, print_timeline
from .conversation import Conversation, read_question
from .keyboard import open_keyboard

SETTABLE: Final = (
    *("model", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "bad_words", "seed", "max_tokens", "min_tokens", "stop", "priority", "template_kwargs"),
)
"""The options that /set knows."""


@o.request_options(
    *("model", "max_tokens", "stop", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed"),
    max_tokens=512,
    temperature=0.0,
)
def chat(
    context: typer.Context,
    target: o.Target = o.DEFAULT_TARGET,
    api_key: o.ApiKey = "",
    system: Annotated[str, typer.Option(help="A system message to begin with.")] = "",
    timeline: o.ShowTimeline = False,
) -> None:
    """Talk with the model; what was said goes along. /help tells the commands. Ctrl-C cuts an answer short, Ctrl-D ends
    the chat. In a pipe each line is a question, and the first error ends it."""
    options = cast(ChatOptions, o.given_options(context.params))
    console = error_console()
    interactive = sys.stdin.isatty()
    with Client(target, api_key=api_key) as client, open_keyboard() as read_line:
        session = ChatSession(client, options, console, Conversation(system), always_timeline=timeline)
        if interactive:
            console.print("/help tells the commands, Ctrl-D ends the chat", style="dim")
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
                _print_error(console, error)
    if interactive:
        console.print()


@dataclass(slots=True)
class ChatSession:
    """A chat under way: what `take` gets is said or done. Answers go to stdout, all else to `console`."""

    client: Client
    options: ChatOptions
    console: Console
    conversation: Conversation = field(default_factory=Conversation)
    always_timeline: bool = False
    timeline: Timeline | None = None  # of the last answer; None if it was cut
    ended: bool = False

    def take(self, line: str) -> None:
        """A question, or a command if it begins with one slash. Raises a TandemError; the session can go on then."""
        if line.startswith("/") and not line.startswith("//"):
            self._command(*line[1:].partition(" ")[::2])
        elif line:
            self._ask(line.removeprefix("/") if line.startswith("//") else line)

    def _ask(self, question: str) -> None:
        """Prints the answer as it comes and keeps it; if it is cut or fails, what had come of it."""
        self.conversation.ask(question)
        self.timeline = None
        said = ""
        with self.client.stream_chat(self.conversation.messages, **self.options) as stream:
            try:
                for delta in stream:
                    said += delta.text
                    typer.echo(delta.text, nl=False)
            except (KeyboardInterrupt, TandemError):
                if said:
                    self.conversation.answer(said)
                    typer.echo()
                raise
            self.conversation.answer(said)
            typer.echo()
            self.timeline = stream.timeline
        if self.always_timeline:
            print_timeline(self.timeline)

    def _command(self, name: str, argument: str) -> None:
        if name not in _COMMANDS:
            raise InvalidArgument("no such command; /help tells them", f"/{name}")
        _COMMANDS[name].run(self, argument.strip())

    def help(self, _: str) -> None:
        table = Table(box=None, show_header=False, pad_edge=False)
        for name, command in _COMMANDS.items():
            table.add_row(f"/{name} {command.argument}", command.meaning)
        table.add_row('"""', 'begins a question of several lines, to the next """')
        table.add_row("\\", "at the end of a line: the question goes on")
        table.add_row("//", "begins a question with a slash")
        self.console.print(table, markup=False)

    def clear(self, _: str) -> None:
        self.conversation.turns.clear()

    def system(self, text: str) -> None:
        self.conversation.system = text

    def retry(self, _: str) -> None:
        question = self.conversation.undo()
        if question is None:
            raise InvalidArgument("nothing was asked yet", "/retry")
        self._ask(question)

    def undo(self, _: str) -> None:
        question = self.conversation.undo()
        if question is None:
            raise InvalidArgument("nothing was asked yet", "/undo")
        self._say(f"forgotten: {question}")

    def save(self, name: str) -> None:
        if not name:
            raise InvalidArgument("names no file", "/save")
        try:
            Path(name).write_text(json.dumps(self.conversation.messages, ensure_ascii=False, indent=2) + "\n")
        except OSError as error:
            raise InvalidArgument(f"{name}: {error.strerror}", "/save") from None
        self._say(f"{len(self.conversation.messages)} messages in {name}")

    def show_timeline(self, switch: str) -> None:
        if switch in ("on", "off"):
            self.always_timeline = switch == "on"
        elif switch:
            raise InvalidArgument("takes on, off or nothing", "/timeline")
        elif self.timeline is None:
            self._say("the last answer has none")
        else:
            print_timeline(self.timeline)

    def set(self, assignment: str) -> None:
        name, _, value = assignment.partition(" ")
        if not name:
            self._say("  ".join(f"{key}={value}" for key, value in self.options.items()))
        elif name not in SETTABLE:
            raise InvalidArgument(f"cannot be set here; what can: {', '.join(SETTABLE)}", name)
        else:
            chosen: dict[str, Any] = {**self.options}
            chosen.pop(name, None)
            self.options = ChatOptions(**chosen, **_parsed(name, value.strip()))  # type: ignore[typeddict-item]

    def quit(self, _: str) -> None:
        self.ended = True

    def _say(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False, highlight=False)


@dataclass(frozen=True, kw_only=True)
class _Command:
    run: Callable[[ChatSession, str], None]
    argument: str = ""
    meaning: str


_COMMANDS: Final = {
    "help": _Command(run=ChatSession.help, meaning="these lines"),
    "clear": _Command(run=ChatSession.clear, meaning="forget what was said; the system message stays"),
    "system": _Command(
        run=ChatSession.system, argument="TEXT", meaning="set the system message; without TEXT: have none"
    ),
    "retry": _Command(run=ChatSession.retry, meaning="ask the last question again"),
    "undo": _Command(run=ChatSession.undo, meaning="forget the last question and its answer"),
    "save": _Command(run=ChatSession.save, argument="FILE", meaning="write the messages as JSON"),
    "timeline": _Command(
        run=ChatSession.show_timeline,
        argument="[on|off]",
        meaning="where the last answer's time went, or each answer's",
    ),
    "set": _Command(
        run=ChatSession.set, argument="[NAME [VALUE]]", meaning="such as temperature 0.7; without VALUE: the default"
    ),
    "quit": _Command(run=ChatSession.quit, meaning="end; so does Ctrl-D"),
}


def _parsed(name: str, value: str) -> dict[str, object]:
    """The option as its type says; empty without a value."""
    if not value:
        return {}
    adapter: TypeAdapter[object] = TypeAdapter(get_type_hints(ChatOptions)[name])
    try:
        if value[0] in "[{":
            return {name: adapter.validate_json(value)}
        return {name: adapter.validate_python(value)}
    except ValidationError as error:
        raise InvalidArgument(f"{value!r}: {error.errors()[0]['msg']}", name) from None


def _print_error(console: Console, error: TandemError) -> None:
    console.print(f"error: {error}", style="red", markup=False, highlight=False)
