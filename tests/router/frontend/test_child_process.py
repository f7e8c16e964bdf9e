"""Tests that a child process that hangs costs its caller the deadline, and no other caller."""

import os
import signal
import threading

import psutil

from tandem.router.frontend.child_process import ChildProcess
from tandem.tests.waits import WAIT

LARGE = b"x" * 2**24  # more than a socket holds


def test_a_message_to_a_process_that_does_not_read_has_a_deadline() -> None:
    child, errors = ChildProcess("template_process"), list[type]()
    before = set(psutil.Process().children())
    child.wait()
    (process,) = set(psutil.Process().children()) - before
    os.kill(process.pid, signal.SIGSTOP)

    def ask() -> None:
        try:
            child.ask(LARGE, 0.05)
        except Exception as error:
            errors.append(type(error))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(WAIT)
    try:
        assert errors == [TimeoutError]
        assert not process.is_running()
        assert (
            child.ask(b'[{"conversations": [[]], "chat_template": "{{ 1 }}"}, 9, 0]', 60)
            == b'{"text": "1"}'
        )
    finally:
        if process.is_running():
            process.kill()
