"""Tests the end of a block of code at a signal."""

import signal
from collections.abc import Iterator

import pytest

from tandem.cluster.stop_signals import signals_deferred, stopped_by_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def kept_handlers() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
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


def test_a_second_signal_does_not_interrupt_the_stop() -> None:
    ended = False
    with stopped_by_signals():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGINT)
            ended = True
    assert ended


@pytest.mark.parametrize("number", SIGNALS)
def test_a_deferred_signal_comes_after_the_block(number: signal.Signals) -> None:
    ended = False
    with stopped_by_signals() as stopped, signals_deferred():
        signal.raise_signal(number)
        ended = True
    assert ended
    assert stopped.is_set()
