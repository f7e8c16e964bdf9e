"""Renders chat templates by transformers, in a process of its own that template.py starts.

Knows nothing of tokens.
"""

import json
import resource
import signal
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, Final

import psutil
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

_MEMORY_BYTES: Final = 2**28  # of all renderings, beside what transformers takes
_MAX_REASON: Final = 200


def main() -> None:
    """Answers one request after the other until the other end of the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the service's to handle
    most = psutil.Process().memory_info().vms + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    connection = Connection(int(sys.argv[1]))
    connection.send_bytes(b"ready")
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(json.dumps(_answer(*json.loads(request))).encode())


def _answer(variables: Mapping[str, Any], max_characters: int) -> dict[str, str]:
    """Returns the text, or the reason why there is none and the field at fault. A template can raise anything."""
    try:
        texts: Any = render_jinja_template(**variables)[0]
        if len(texts[0]) <= max_characters:
            return {"text": texts[0]}
    except MemoryError:
        pass
    except Exception as error:
        if str(error).startswith("continue_final_message"):  # by transformers
            return {"reason": "does not repeat the last message", "field": "prompt.chat.continue_final_message"}
        said = f": {str(error)[:_MAX_REASON]}" if type(error) is TemplateError else ""  # by raise_exception
        return {"reason": f"refuses these messages{said}"}
    return {"reason": f"renders more than {max_characters} characters for these messages"}


if __name__ == "__main__":
    main()
