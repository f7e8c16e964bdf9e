"""Measures what only a GPU can show: `python -m tandem.tests.bench.gpu`.

Needs no Ray, no network and no checkpoint. With --device cpu --shape tiny every part runs something
small, so that a mistake in the benchmark shows before there is a GPU.
"""

import argparse
import sys
from pathlib import Path

from tandem.tests.bench.gpu.driver import Run, as_text, run_parts
from tandem.tests.bench.gpu.parts import PARTS, find_parts


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints; returns 0 if every part is ok, 1 if one is not, 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m tandem.tests.bench.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cpu, cuda or cuda:N")
    parser.add_argument("--shape", default="llama-3-8b", help="a shape of the engine's benchmark")
    parser.add_argument("--parts", default="A,B,C", help="groups or names of parts")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of all parts together")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), metavar="FOLDER")
    parser.add_argument("--list", action="store_true", help="list the parts and their seconds")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{part.group} {part.name} {part.seconds:.0f}" for part in PARTS))
        return 0
    try:
        parts = find_parts(options.parts)
    except ValueError as error:
        print(f"gpu bench: {error}", file=sys.stderr)
        return 2
    run = Run(
        device=options.device,
        shape=options.shape,
        seconds=options.seconds,
        out=options.out.absolute(),
    )
    results = run_parts(run, parts)
    text = as_text(results)
    (run.out / "gpu.txt").write_text(text + "\n")
    print(text)
    return 0 if all(part["status"] == "ok" for part in results["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
