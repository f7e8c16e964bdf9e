"""Tests the end of a block of code at a signal."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tandem.cluster.stop_signals import signals_deferred, stopped_by_signals, unwound_by_signals
from tandem.tests.waits import WAIT

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def kept_handlers() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if nohup runs the tests
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_block(number: signal.Signals) -> None:
    reached = False
    with stopped_by_signals() as stopped:
        signal.raise_signal(number)
        reached = True
    assert stopped.is_set()
    assert not reached


@pytest.mark.parametrize("number", SIGNALS)
def test_an_interrupt_that_a_library_turns_into_an_error_ends_the_block(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    with stopped_by_signals():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise ImportError("a native module did not load") from None
    assert caplog.messages == ["interrupted, then: ImportError: a native module did not load"]


def test_an_error_without_a_signal_leaves_the_block() -> None:
    with pytest.raises(ImportError), stopped_by_signals():
        raise ImportError("a native module is missing")


@pytest.mark.parametrize("second", SIGNALS)
def test_a_second_signal_does_not_interrupt_the_stop(second: signal.Signals) -> None:
    ended = False
    with stopped_by_signals():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(second)
            ended = True
    assert ended


def test_a_hangup_that_nohup_ignores_ends_no_block() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    reached = False
    with stopped_by_signals() as stopped, unwound_by_signals(), signals_deferred():
        signal.raise_signal(signal.SIGHUP)
        reached = True
    assert reached
    assert not stopped.is_set()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_the_block(number: signal.Signals) -> None:
    ended = []

    @unwound_by_signals()
    def block() -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(signal.SIGHUP)  # the shell of the terminal sends another one
            ended.append(number)

    signal.signal(number, signal.SIG_DFL)
    with pytest.raises(SystemExit) as raised:
        block()
    assert raised.value.code == 128 + number
    assert ended == [number]
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.io
def test_a_block_ends_in_order_though_its_terminal_is_lost(tmp_path: Path) -> None:
    code = (
        "import signal, sys\n"
        "from pathlib import Path\n"
        "from rich.console import Console\n"
        "from tandem.cluster.stop_signals import stopped_by_signals\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "spinner = Console(stderr=True).status('waiting')\n"
        "with stopped_by_signals():\n"
        "    spinner.start()\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        signal.pause()\n"
        "    finally:\n"
        "        spinner.stop()\n"
        "Path(sys.argv[1]).touch()\n"
    )
    ours, terminal = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "ended")],
        preexec_fn=partial(os.login_tty, terminal),
    ) as process:
        os.close(terminal)
        seen = b""
        while b"ready" not in seen:
            seen += os.read(ours, 4096)
        os.close(ours)
        assert process.wait(WAIT) == 0
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_deferred_signal_comes_after_the_block(number: signal.Signals) -> None:
    ended = False
    with stopped_by_signals() as stopped, signals_deferred():
        signal.raise_signal(number)
        ended = True
    assert ended
    assert stopped.is_set()
