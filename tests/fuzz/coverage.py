"""Runs one of the parsers on inputs that atheris makes, guided by coverage, until it fails or for
the seconds named: `python -m tandem.tests.fuzz.coverage "HTTP body" 60`. Not in the tests: `pip
install atheris` first.
"""

import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> None:
    """Runs atheris with the seeds of the target as its corpus."""
    atheris: Any = import_module("atheris")
    name, seconds = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "60"
    with atheris.instrument_imports(include=["tandem", "yaml", "json", "msgpack"]):
        from tandem.tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(target.seeds):
            Path(corpus, str(number)).write_bytes(seed)
        atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", "-max_len=8192", corpus], target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
