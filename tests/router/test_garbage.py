"""Tests that the garbage collector pauses during starts and is as before afterwards."""

import gc

import pytest

from tandem.router.garbage import collections_paused


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_pauses_and_is_as_before_afterwards(enabled: bool) -> None:
    if not enabled:
        gc.disable()
    try:
        with collections_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
