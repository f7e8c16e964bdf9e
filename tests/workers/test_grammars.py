"""Whose grammar is compiled next, and what becomes of one that nobody waits for any more."""

import asyncio
import threading
from queue import Full

import pytest

from tandem.proto.errors import InvalidArgument, Unavailable
from tandem.tests.waits import WAIT
from tandem.workers.serve.grammars import GrammarCompiler

ADA, BOB, EVE = b"ada", b"bob", b"eve"


class Loads:
    """Compiles each grammar when the test says so."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, bytes, bytes]] = []
        self._changed = threading.Condition()
        self._done: set[str] = set()

    def __call__(self, grammar: str, owner: bytes, tenant: bytes) -> str:
        with self._changed:
            self.begun.append((grammar, owner, tenant))
            assert self._changed.wait_for(lambda: grammar in self._done, WAIT)
        return grammar.upper()

    def finish(self, *grammars: str) -> None:
        with self._changed:
            self._done.update(grammars)
            self._changed.notify_all()

    @property
    def names(self) -> list[str]:
        return [grammar for grammar, _, _ in self.begun]

    async def wait(self, *grammars: str) -> None:
        """Waits until exactly these have begun."""
        async with asyncio.timeout(WAIT):
            while sorted(self.names) != sorted(grammars):
                await asyncio.sleep(0.001)


def start(compiler: GrammarCompiler, grammar: str, tenant: bytes) -> "asyncio.Task[object]":
    return asyncio.create_task(compiler.compile(grammar, tenant, tenant))


async def test_a_tenant_waits_for_one_grammar_of_each_other_tenant_at_most() -> None:
    loads = Loads()
    compiler = GrammarCompiler(loads)
    many = [start(compiler, f"a{number}", ADA) for number in range(20)]
    await loads.wait("a0")
    bobs = [start(compiler, name, BOB) for name in ("b0", "b1")]
    await loads.wait("a0", "b0")  # a slot was free: Ada has one of two
    eve = start(compiler, "e0", EVE)
    loads.finish("a0")
    await loads.wait("a0", "b0", "e0")  # before Ada's next, which came first
    loads.finish("b0", "e0")
    assert (await bobs[0], await eve) == ("B0", "E0")
    await loads.wait("a0", "b0", "e0", "a1", "b1")
    loads.finish("b1", *(f"a{number}" for number in range(20)))
    assert await asyncio.gather(*many, bobs[1]) == [*(f"A{number}" for number in range(20)), "B1"]
    assert loads.names.index("b1") < loads.names.index("a2")


async def test_what_one_owner_has_compiled_is_compiled_again_for_another() -> None:
    loads = Loads()
    loads.finish("g")
    compiler = GrammarCompiler(loads)
    await asyncio.gather(*(start(compiler, "g", tenant) for tenant in (ADA, BOB, ADA)))
    assert sorted(loads.begun) == [("g", ADA, ADA), ("g", BOB, BOB)]


async def test_a_grammar_without_waiting_requests_is_not_compiled_unless_it_has_begun() -> None:
    loads = Loads()
    compiler = GrammarCompiler(loads)
    first, second, third = (start(compiler, name, ADA) for name in ("a0", "a1", "a2"))
    await loads.wait("a0")
    first.cancel()
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    await asyncio.sleep(0)
    assert loads.names == ["a0"], "a thread cannot be stopped, so nothing else of the tenant begins"
    loads.finish("a0", "a1", "a2")
    assert await third == "A2"
    assert loads.names == ["a0", "a2"]
    assert not compiler._compiling


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ValueError("line 1"), InvalidArgument),
        (OSError("cannot be read"), Unavailable),
        (MemoryError(), Unavailable),
        (RuntimeError("can't start new thread"), Unavailable),
        (Full("the memory for grammars is in use"), Full),
    ],
)
async def test_only_a_grammar_that_is_wrong_is_the_fault_of_its_request(
    raised: Exception, expected: type[Exception]
) -> None:
    def load(grammar: str, owner: bytes, tenant: bytes) -> object:
        raise raised

    with pytest.raises(expected):
        await GrammarCompiler(load).compile("g")
