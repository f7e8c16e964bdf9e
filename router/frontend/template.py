"""Renders chat templates, which are Jinja programs of models, within bounds of time, memory and size.

They run in a process of its own, which is killed when a template takes too long. So whatever a template does, for any
messages, it stops nobody's tokens and takes no memory of the router's. Knows nothing of tokens or messages.
"""

import json
import subprocess
import sys
import weakref
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

from . import template_process


class TemplateRefused(Exception):
    """Says why there is no text, as the end of a sentence about the template."""


class TemplateRenderer:
    """Renders one template after the other, in a process that begins with `start` or the first of them and ends with
    this object. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._connection: Connection | None = None

    def render(self, source: str, variables: Mapping[str, Any], *, max_characters: int, seconds: float) -> str:
        """Renders the template `source`. `variables` are plain JSON values. Raises TemplateRefused."""
        request = json.dumps([source, variables, max_characters]).encode()
        with self._lock:
            reply = self._ask(self._connection or self._start(), request, seconds)
        if "text" not in reply:
            raise TemplateRefused(reply["reason"])
        return reply["text"]

    def start(self) -> None:
        """Starts the process, so that no chat waits for it."""
        with self._lock:
            self._start()

    def _ask(self, connection: Connection, request: bytes, seconds: float) -> dict[str, str]:
        try:
            connection.send_bytes(request)
            if connection.poll(seconds):
                reply: dict[str, str] = json.loads(connection.recv_bytes())
                return reply
            reason = f"takes more than {seconds:g} seconds for these messages"
        except (EOFError, OSError):
            reason = "refuses these messages"  # such as by a recursion that ends the process
        self._connection = None
        self._end()
        return {"reason": reason}

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-P", "-m", template_process.__name__, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._end = weakref.finalize(self, _end, process)
        ours.recv_bytes()  # it is ready
        self._connection = ours
        return ours


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
