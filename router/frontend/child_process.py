"""Asks a separate process, which is killed if an answer takes too long.

So a request that never ends costs other requests of this process nothing.
"""

import resource
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from importlib import import_module
from threading import Lock
from typing import Final

import psutil

_START_SECONDS: Final = 60.0
_LENGTH_BYTES: Final = 8  # before each message, big-endian
_CHUNK_BYTES: Final = 2**20


def main() -> None:
    """Answers one request after the other, in the child process, until the other end closes."""
    module, descriptor = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service itself handles Ctrl-C
    answer: Callable[[bytes], bytes] = import_module(f"{__package__}.{module}").make_answer()
    with socket.socket(fileno=int(descriptor)) as connection:
        _send(connection, b"ready", None)
        while True:
            try:
                request = _receive(connection, None)
            except EOFError:
                return
            _send(connection, answer(request), None)


def limit_memory(num_bytes: int) -> None:
    """Bounds the address space of this process to what it has now and `num_bytes` more."""
    most = psutil.Process().memory_info().vms + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


class ChildProcess:
    """Answers one request after the other in a child process. Thread-safe.

    The process begins with `start` or the first request, and ends with this object.
    """

    def __init__(self, module: str) -> None:
        """`module`: a module of this folder, whose `make_answer` returns the answering function."""
        self._module = module
        self._lock = Lock()
        self._connection: socket.socket | None = None
        self.is_ready = False  # the process can answer; its imports take a second
        self._end: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Starts the process. Idempotent."""
        with self._lock:
            if self._connection is None:
                self._start()

    def wait(self) -> None:
        """Starts the process if necessary, and waits until it can answer.

        Raises ChildProcessError if the process does not start in time, and EOFError if it ends.
        """
        self._exchange(None, 0.0)

    def ask(self, request: bytes, seconds: float) -> bytes:
        """Returns the reply to a request.

        Raises TimeoutError if sending the request and receiving the reply together take more than
        `seconds`, ChildProcessError if the process does not start, and EOFError if it ends.
        """
        return self._exchange(request, seconds)

    def _exchange(self, request: bytes | None, seconds: float) -> bytes:
        """Waits until the process can answer and, with a request, returns the reply.

        Any failure ends the process.
        """
        with self._lock:
            # A context manager of contextlib would keep the exception, and its frames this object,
            # until a garbage collection (Python 3.12).
            try:
                connection = self._ready()
                if request is None:
                    return b""
                deadline = time.monotonic() + seconds
                _send(connection, request, deadline)
                return _receive(connection, deadline)
            except ConnectionError:
                self._drop()
                raise EOFError from None
            except BaseException:
                self._drop()
                raise

    def _ready(self) -> socket.socket:
        """Returns the connection to a process that can answer."""
        connection = self._connection or self._start()
        if not self.is_ready:
            try:
                _receive(connection, time.monotonic() + _START_SECONDS)
            except TimeoutError:
                raise ChildProcessError("it does not start") from None
            self.is_ready = True
        return connection

    def _drop(self) -> None:
        self._connection, self.is_ready = None, False
        self._end()

    def _start(self) -> socket.socket:
        self._connection, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", __name__, self._module, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._end = weakref.finalize(self, _end, process, self._connection)
        return self._connection


def _send(connection: socket.socket, message: bytes, deadline: float | None) -> None:
    """Sends a message. Raises TimeoutError at `deadline`, a time of time.monotonic(), if any."""
    # The timeout bounds the whole call.
    connection.settimeout(_remaining(deadline))
    connection.sendall(len(message).to_bytes(_LENGTH_BYTES))
    connection.settimeout(_remaining(deadline))
    connection.sendall(message)


def _receive(connection: socket.socket, deadline: float | None) -> bytes:
    """Receives a message. Raises TimeoutError at `deadline`, and EOFError at the end."""
    length = int.from_bytes(_receive_bytes(connection, _LENGTH_BYTES, deadline))
    return _receive_bytes(connection, length, deadline)


def _receive_bytes(connection: socket.socket, length: int, deadline: float | None) -> bytes:
    found = bytearray()
    while len(found) < length:
        connection.settimeout(_remaining(deadline))
        part = connection.recv(min(length - len(found), _CHUNK_BYTES))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def _remaining(deadline: float | None) -> float | None:
    """Returns the seconds until the deadline, None without one. Raises TimeoutError after it."""
    if deadline is None:
        return None
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining


def _end(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


if __name__ == "__main__":
    main()
