"""Renders chat templates, which are Jinja programs of models, within bounds of time, memory and size.

They run in a process of its own, which is killed when a template takes too long. So whatever a template does, for any
messages, it stops nobody's tokens and takes no memory of the router's. Knows nothing of tokens.
"""

import json
import subprocess
import sys
import weakref
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any, Final

from ...proto.errors import InvalidArgument, Unavailable

_START_SECONDS: Final = 60.0


class TemplateRenderer:
    """Renders one template after the other, in a process that begins with `start` or the first of them and ends with
    this object. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._connection: Connection | None = None
        self._is_ready = False  # to render; the process begins with imports that take a second

    def render(self, variables: Mapping[str, Any], *, max_characters: int, seconds: float) -> str:
        """Renders by transformers' render_jinja_template, whose arguments `variables` are, in plain JSON values.

        Raises InvalidArgument if the template refuses them, writes too much or does not end in time, and Unavailable if
        the process does not start."""
        request = json.dumps([variables, max_characters]).encode()
        with self._lock:
            reply = self._ask(self._connection or self._start(), request, seconds)
        if "text" not in reply:
            raise InvalidArgument(f"the model's chat template {reply['reason']}", reply.get("field", "prompt.chat"))
        return reply["text"]

    def start(self) -> None:
        """Starts the process, so that no chat waits for it. Idempotent."""
        with self._lock:
            if self._connection is None:
                self._start()

    def _ask(self, connection: Connection, request: bytes, seconds: float) -> dict[str, str]:
        try:
            if not self._is_ready:
                if not connection.poll(_START_SECONDS):
                    self._drop()
                    raise Unavailable("chat templates cannot be rendered now")
                connection.recv_bytes()
                self._is_ready = True
            connection.send_bytes(request)
            if connection.poll(seconds):
                reply: dict[str, str] = json.loads(connection.recv_bytes())
                return reply
            reason = f"takes more than {seconds:g} seconds for these messages"
        except (EOFError, OSError):
            reason = "refuses these messages"  # such as by a recursion that ends the process
        self._drop()
        return {"reason": reason}

    def _drop(self) -> None:
        self._connection, self._is_ready = None, False
        self._end()

    def _start(self) -> Connection:
        self._connection, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-P", "-m", f"{__package__}.template_process", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._end = weakref.finalize(self, _end, process)
        return self._connection


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
