"""Generates the Python modules of this folder: `python proto/generate.py [--check]`.

With --check it generates into another folder and exits with 1 if the committed modules differ, so
that nobody edits them by hand.
"""

import filecmp
import re
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def generate(out: Path) -> list[Path]:
    """Writes *_pb2.py, *_pb2.pyi and *_pb2_grpc.py for every .proto file; returns their paths."""
    from grpc_tools import protoc  # lazy: only `make` has the compiler

    names = sorted(path.name for path in HERE.glob("*.proto"))
    flags = [f"-I{HERE}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    if protoc.main(["protoc", *flags, *names]) != 0:
        raise SystemExit("protoc failed")
    made = sorted([*out.glob("*_pb2*.py"), *out.glob("*_pb2.pyi")])
    for path in made:
        # protoc writes `import x_pb2` as if the folder were on sys.path; the package needs a
        # relative import.
        path.write_text(
            re.sub(r"^import (\w+_pb2)", r"from . import \1", path.read_text(), flags=re.MULTILINE)
        )
    return made


def main() -> None:
    if sys.argv[1:] != ["--check"]:
        generate(HERE)
        return
    with tempfile.TemporaryDirectory() as scratch:
        made = generate(Path(scratch))
        stale = [
            p.name
            for p in made
            if not (HERE / p.name).exists() or not filecmp.cmp(p, HERE / p.name, False)
        ]
    if stale:
        raise SystemExit(f"run `make proto`: {', '.join(stale)} no longer match the .proto files")


if __name__ == "__main__":
    main()
