"""Tests the errors that clients receive."""

import pickle

import pytest

from tandem.proto import errors

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and issubclass(kind, errors.TandemError)
    and kind is not errors.TandemError  # which is never raised itself
]


def make(kind: type[errors.TandemError]) -> errors.TandemError:
    if issubclass(kind, errors.ContextExceeded):
        return kind(num_prompt=9, num_generated=3, context=10, field="prompt")
    if issubclass(kind, errors.InvalidArgument):
        return kind("must be 1", "field")
    return kind("words", 2.5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_reaches_another_process_whole(kind: type[errors.TandemError]) -> None:
    """multiprocessing.Pool waits for ever for an error that cannot be unpickled."""
    error = make(kind)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - these are no bytes of a stranger
    assert type(copy) is kind
    assert (str(copy), vars(copy)) == (str(error), vars(error))
