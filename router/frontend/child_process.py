"""Asks a process of its own, which is killed when it takes too long: whatever it is asked stops nobody else."""

import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Lock
from typing import Final

_START_SECONDS: Final = 60.0


def answer_requests(answer: Callable[[bytes], bytes]) -> None:
    """Answers one request after the other, as the `main` of a `ChildProcess`, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the service's to handle
    connection = Connection(int(sys.argv[1]))
    connection.send_bytes(b"ready")
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(answer(request))


class ChildProcess:
    """Answers one request after the other, in a process that begins with `start` or the first of them and ends with
    this object. Thread-safe."""

    def __init__(self, module: str) -> None:
        """`module`, in this folder, calls `answer_requests`."""
        self._module = module
        self._lock = Lock()
        self._connection: Connection | None = None
        self.is_ready = False  # to answer; the process begins with imports that take a second
        self._end: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Starts the process. Idempotent."""
        with self._lock:
            if self._connection is None:
                self._start()

    def wait(self) -> None:
        """Waits until the process can answer, so that no request does; starts it if it is not there. Raises
        ChildProcessError or EOFError if it does not come so far."""
        with self._lock, self._dropped_on_error():
            self._ready()

    def ask(self, request: bytes, seconds: float) -> bytes:
        """Returns the reply. Raises TimeoutError if it takes longer, ChildProcessError if the process does not start,
        and EOFError if the request ends it."""
        with self._lock, self._dropped_on_error():
            connection = self._ready()
            connection.send_bytes(request)
            if not connection.poll(seconds):
                raise TimeoutError
            return connection.recv_bytes()

    def _ready(self) -> Connection:
        """Returns the connection to a process that can answer."""
        connection = self._connection or self._start()
        if not self.is_ready:
            if not connection.poll(_START_SECONDS):
                raise ChildProcessError("it does not start")
            connection.recv_bytes()
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

    def _start(self) -> Connection:
        self._connection, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-P", "-m", f"{__package__}.{self._module}", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._end = weakref.finalize(self, _end, process)
        return self._connection


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
