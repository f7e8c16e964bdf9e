"""Lists the parts of the benchmark in the order in which they run."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Part:
    """Names a part and the function that measures it."""

    name: str
    group: str  # A: is it right; B: is it fast; C: from prefill to decode
    seconds: float  # until it is cut off
    function: str  # MODULE:FUNCTION; the module is imported in the part's process only


_HERE: Final = "tandem.tests.bench.gpu"


def _part(group: str, name: str, seconds: float, function: str) -> Part:
    return Part(name=name, group=group, seconds=seconds, function=f"{_HERE}.{function}")


PARTS: Final = (
    _part("A", "facts", 40, "correctness:facts"),
    _part("A", "smoke", 90, "correctness:smoke"),
    _part("A", "tests", 300, "correctness:tests"),
    _part("A", "kv", 90, "kv:measure"),
    _part("A", "sampler", 60, "sampler:measure"),
    _part("B", "decode", 130, "speed:decode"),
    _part("B", "prefill", 80, "speed:prefill"),
    _part("B", "profile", 80, "profiling:measure"),
    _part("B", "attention", 100, "attention:measure"),
    _part("B", "gemm", 60, "products:measure"),
    _part("B", "host", 60, "speed:host"),
    _part("B", "moe", 80, "speed:moe"),
    _part("C", "serve", 300, "serve:measure"),
    _part("C", "fuzz", 120, "fuzz:measure"),
    _part("C", "memory", 60, "memory:measure"),
    _part("C", "sanitize", 90, "correctness:sanitize"),
)
"""The parts of the first 45 minutes on a new kind of GPU."""


def find_parts(names: str) -> list[Part]:
    """Returns the parts of groups or names like `A,decode`; raises ValueError for another."""
    wanted = names.split(",")
    known = {part.group for part in PARTS} | {part.name for part in PARTS}
    if unknown := sorted(set(wanted) - known):
        raise ValueError(f"--parts: {unknown[0]} is not one of {', '.join(sorted(known))}")
    return [part for part in PARTS if part.group in wanted or part.name in wanted]
