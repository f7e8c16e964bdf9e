"""Asks a process of its own, which is killed when it takes too long: whatever it is asked stops
nobody else.
"""

import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Final

_START_SECONDS: Final = 60.0
_LENGTH_BYTES: Final = 8  # before each message, big-endian
_CHUNK_BYTES: Final = 2**20


def answer_requests(answer: Callable[[bytes], bytes]) -> None:
    """Answers one request after the other, as the `main` of a `ChildProcess`, until the other end
    is closed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the service's to handle
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        _send(connection, b"ready", None)
        while True:
            try:
                request = _receive(connection, None)
            except EOFError:
                return
            _send(connection, answer(request), None)


class ChildProcess:
    """Answers one request after the other, in a process that begins with `start` or the first of
    them and ends with this object. Thread-safe.
    """

    def __init__(self, module: str) -> None:
        """`module`, in this folder, calls `answer_requests`."""
        self._module = module
        self._lock = Lock()
        self._connection: socket.socket | None = None
        self.is_ready = False  # to answer; the process begins with imports that take a second
        self._end: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Starts the process. Idempotent."""
        with self._lock:
            if self._connection is None:
                self._start()

    def wait(self) -> None:
        """Waits until the process can answer, so that no request does; starts it if it is not
        there. Raises ChildProcessError or EOFError if it does not come so far.
        """
        with self._lock, self._dropped_on_error():
            self._ready()

    def ask(self, request: bytes, seconds: float) -> bytes:
        """Returns the reply. Raises TimeoutError if sending the request and receiving the reply
        take longer together, ChildProcessError if the process does not start, and EOFError if the
        request ends it.
        """
        with self._lock, self._dropped_on_error():
            connection = self._ready()
            deadline = time.monotonic() + seconds
            _send(connection, request, deadline)
            return _receive(connection, deadline)

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

    @contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        """Ends the process if what is done with it fails."""
        try:
            yield
        except ConnectionError:
            self._drop()
            raise EOFError from None
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        self._connection, self.is_ready = None, False
        self._end()

    def _start(self) -> socket.socket:
        self._connection, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-P",
                "-m",
                f"{__package__}.{self._module}",
                str(theirs.fileno()),
            ]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._end = weakref.finalize(self, _end, process, self._connection)
        return self._connection


def _send(connection: socket.socket, message: bytes, deadline: float | None) -> None:
    """Sends a message. Raises TimeoutError at `deadline`, a time of time.monotonic(); None: waits
    for as long as it takes.
    """
    connection.settimeout(_remaining(deadline))
    connection.sendall(
        len(message).to_bytes(_LENGTH_BYTES)
    )  # the timeout is that of the whole call
    connection.settimeout(_remaining(deadline))
    connection.sendall(message)


def _receive(connection: socket.socket, deadline: float | None) -> bytes:
    """Receives a message. Raises TimeoutError likewise, and EOFError if the other end is closed."""
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
    """Returns the seconds that are left. Raises TimeoutError if there are none."""
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
