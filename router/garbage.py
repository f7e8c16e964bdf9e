"""Pauses the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collections_paused() -> Iterator[None]:
    """Lets no collection run in the block, unless another thread allows them.

    Imports and weights make a million objects and no garbage. Collections that visit them again and
    again take a fifth of the imports' time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
