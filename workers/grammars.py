"""Compiles grammars beside the event loop."""

import asyncio
from collections.abc import Callable
from functools import partial

from ..proto.errors import InvalidArgument
from .threads import in_thread


class GrammarCompiler:
    """Compiles each grammar once for all that want it at the time. Lives in one event loop."""

    def __init__(self, load_grammar: Callable[[str], object]) -> None:
        """See `Rank.load_grammar`."""
        self._load_grammar = load_grammar
        self._compiling: dict[str, asyncio.Future[object]] = {}

    async def compile(self, text: str) -> object:
        """Returns what keeps a grammar compiled. Raises InvalidArgument."""
        if text not in self._compiling:
            self._compiling[text] = in_thread(partial(self._load_grammar, text), "tandem-grammar")
            self._compiling[text].add_done_callback(lambda _: self._compiling.pop(text))
        try:
            return await asyncio.shield(self._compiling[text])
        except ValueError as error:
            raise InvalidArgument(str(error), "grammar") from error
