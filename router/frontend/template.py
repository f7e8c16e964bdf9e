"""Renders chat templates, which are Jinja programs of models, within bounds of time and memory.

They run in a child process, which is killed when a template takes too long. So no template can
stop the streams of other requests or fill the memory of the router. Knows nothing of tokens.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ...proto.errors import InvalidArgument, PromptTooLong, Unavailable
from .child_process import ChildProcess

TEMPLATE_OF_MODEL: Final = "the model's chat template "
"""How errors about a template begin."""

REFUSAL: Final = "refuses these messages: "
"""How a reason goes on that the template itself gives."""

TOO_LONG: Final = "renders more than "
"""How the reason begins if the text has too many characters."""

NO_PROCESS: Final = "chat templates cannot be rendered now"


def template_process() -> ChildProcess:
    """Returns a process for `render`, which renders one template after the other."""
    return ChildProcess("template_process")


RENDERER: Final = template_process()
"""Shared by all models of this process; it keeps no state of a model."""

_MARK: Final = b'"chat_template"'


def start_for(folder: Path) -> None:
    """Starts `RENDERER` if the model in a folder seems to have a chat template.

    Its imports take half a second. Call this before imports of this process that take as long.
    """
    files = (folder / "chat_template.jinja", folder / "chat_template.json")
    config = folder / "tokenizer_config.json"
    with suppress(OSError):  # others report it
        if any(map(Path.exists, files)) or _MARK in config.read_bytes():
            RENDERER.start()


def render(
    process: ChildProcess,
    variables: Mapping[str, Any],
    *,
    max_characters: int,
    seconds: float,
    now: float,
) -> str:
    """Renders by transformers' render_jinja_template.

    `variables` are its arguments, as plain JSON values. `now`: the time that the template sees, in
    seconds of time.time(). Raises InvalidArgument if the template refuses them, writes too much or
    does not end in time, and Unavailable if the process does not start.
    """
    reply: dict[str, str] = {}
    try:
        request = json.dumps([variables, max_characters, now]).encode()
        reply = json.loads(process.ask(request, seconds))
    except TimeoutError:
        reply["reason"] = f"takes more than {seconds:g} seconds for these messages"
    except EOFError:  # such as by a recursion that ends the process
        reply["reason"] = "refuses these messages"
    except ChildProcessError:
        raise Unavailable(NO_PROCESS) from None
    if "text" not in reply:
        reason = reply["reason"]
        error = PromptTooLong if reason.startswith(TOO_LONG) else InvalidArgument
        raise error(TEMPLATE_OF_MODEL + reason, reply.get("field", "prompt.chat"))
    return reply["text"]
