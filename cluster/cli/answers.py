"""Prints completions: streamed, as tables of log probabilities and times, and as JSON."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import typer
from google.protobuf.json_format import MessageToDict
from rich.table import Table

from ...proto import inference_pb2
from ...proto.errors import TandemError
from ...proto.limits import MIN_LOGPROB
from ...router.client.client import Stream
from ...router.client.types import Choice, Completion, Logprob, Timeline, TokenLogprobs
from ...router.telemetry.requests import PARTS
from ..tables import make_table, table_console

_USAGE: Final = tuple(field.name for field in inference_pb2.Usage.DESCRIPTOR.fields)
_CHOICE: Final = ("text", "token_ids", "finish_reason", "stop_reason", "score")
_TIMES: Final = {
    "KV wait" if part == "kv_transfer" else part: f"{part}_seconds" for part in PARTS
} | {
    "total": "end_to_end_seconds",
    "TTFT": "ttft_seconds",
    "TPOT": "tpot_seconds",
}


def print_stream(stream: Stream) -> None:
    """Prints the text of the first choice as it is streamed.

    Raises a TandemError, after a line end if any text has been printed.
    """
    printed = False
    try:
        for delta in stream:
            if delta.choice == 0:
                typer.echo(delta.text, nl=False)
                printed = printed or bool(delta.text)
    except TandemError:
        if printed:
            typer.echo()
        raise
    typer.echo()


def print_choices(completion: Completion, scored: bool) -> None:
    """Prints every choice below a line with its number, and with its score if `scored`."""
    for index, choice in enumerate(completion.choices):
        score = f", score {choice.score:.4f}" if scored else ""
        typer.echo(f"--- {index} ({choice.finish_reason}{score})")
        typer.echo(choice.text)


def print_timeline(timeline: Timeline | None) -> None:
    """Prints a timeline on stderr, if there is one."""
    if timeline is not None:
        table_console(stderr=True).print(timeline_table([("request", timeline)]))


def print_logprobs(completion: Completion) -> None:
    """Prints the requested tables on stderr: one for the prompt and one for each choice."""
    console = table_console(stderr=True)
    if completion.prompt_logprobs:
        console.print(_logprob_table("prompt", completion.prompt_logprobs))
    for index, choice in enumerate(completion.choices):
        if choice.logprobs:
            title = "completion" if len(completion.choices) == 1 else f"completion {index}"
            console.print(_logprob_table(title, choice.logprobs))


def completion_json(completion: Completion) -> dict[str, Any]:
    """Returns the completion as one object; a missing log probability is null."""
    return {
        "request_id": completion.request_id,
        "choices": [_choice_json(choice) for choice in completion.choices],
        "prompt_logprobs": [_token_json(each) for each in completion.prompt_logprobs],
        "usage": {name: getattr(completion.usage, name) for name in _USAGE},
        "timeline": MessageToDict(completion.timeline, preserving_proto_field_name=True),
    }


def _choice_json(choice: Choice) -> dict[str, Any]:
    fields = {name: getattr(choice, name) for name in _CHOICE}
    return fields | {"logprobs": [_token_json(each) for each in choice.logprobs]}


def _token_json(token: TokenLogprobs) -> dict[str, Any]:
    return _logprob_json(token.token) | {"top": [_logprob_json(each) for each in token.top]}


def _logprob_json(given: Logprob) -> dict[str, Any]:
    names = {"token_id": given.token_id, "token": given.text}
    logprob = None if given.logprob is None else max(given.logprob, MIN_LOGPROB)
    return names | {"bytes": list(given.token_bytes), "logprob": logprob}


def _logprob_table(title: str, tokens: Sequence[TokenLogprobs]) -> Table:
    """Returns a table with a line for each token; alternatives stand to its right."""
    table = make_table("token", numbers=["logprob"], title=title)
    for place in range(max(len(each.top) for each in tokens)):
        table.add_column(f"top {place + 1}", no_wrap=True)
    for each in tokens:
        table.add_row(
            repr(each.token.text),
            _number(each.token),
            *(f"{top.text!r} {_number(top)}" for top in each.top),
        )
    return table


def _number(given: Logprob) -> str:
    return "-" if given.logprob is None else f"{given.logprob:.4f}"


def timeline_table(rows: Iterable[tuple[str, inference_pb2.Timeline]]) -> Table:
    """Returns a table with a line for each named request. Times are in ms.

    The times from tokenize to decode add up to total. The KV columns have the bytes moved, the rate
    while they were moving, and the time that the request waited for them; "by" is the transport.
    """
    numbers = (*_TIMES, "KV MB", "KV GB/s", "by", "prompt", "cached", "tokens")
    table = make_table("request", numbers=numbers, title="Where the time went (ms)")
    for name, timeline in rows:
        moved, active = timeline.kv_transfer_bytes, timeline.kv_transfer_active_seconds
        table.add_row(
            name,
            *(f"{1000 * getattr(timeline, field):.1f}" for field in _TIMES.values()),
            f"{moved / 1e6:.2f}" if moved else "-",
            f"{moved / active / 1e9:.2f}" if moved and active else "-",
            timeline.kv_transport or "-",
            *map(str, (timeline.prompt_tokens, timeline.cached_tokens, timeline.completion_tokens)),
        )
    return table
