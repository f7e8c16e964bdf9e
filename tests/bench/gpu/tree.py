"""Makes a folder with the repository and the packages that a bare GPU machine lacks.

`python -m tandem.tests.bench.gpu.tree FOLDER` downloads the packages for Python 3.12 in the
versions of constraints.txt, checks the size of the folder, and prints the command to run there. The
machine has torch, Triton, transformers and pytest, and needs no network.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tandem.tests.paths import ROOT

MAX_BYTES: Final = 64 * 2**20  # of the folder
WHEELS: Final = (
    "annotated-types",
    "cffi",
    "crc32c",
    "cryptography",
    "grpcio",
    "grpcio-health-checking",
    "grpcio-reflection",
    "llguidance",
    "platformdirs",
    "protobuf",
    "pycparser",
    "pydantic",
    "pydantic_core",
    "pytest-asyncio",
    "typing-inspection",
)
"""Packages that are not on the machine, or there in another version; their needs are listed."""

OTHERS: Final = ("nvidia-cudnn-frontend==1.18.0",)  # an attention to compare with; 1.32 needs more
_PLATFORMS: Final = ("2_31", "2_28", "2_27", "2_17", "2_12", "2_5")  # of glibc, oldest last
_BENCH: Final = "python3 -m tandem.tests.bench.gpu --seconds 540 --parts A --out OUT"


class TreeTooLarge(Exception):
    """Says by how much the folder is too large."""


def pinned(names: Iterable[str], constraints: str) -> list[str]:
    """Returns NAME==VERSION of each name; raises KeyError for a name without a version."""
    versions = dict(
        line.split("==")
        for line in constraints.splitlines()
        if "==" in line and not line.startswith("#")
    )
    return [f"{name}=={versions[name]}" for name in names]


def download_command(packages: Iterable[str], folder: Path) -> list[str]:
    """Returns the command that downloads wheels for Python 3.12 on x86-64."""
    platforms = [f"manylinux_{version}_x86_64" for version in _PLATFORMS]
    platforms += ["manylinux2014_x86_64", "manylinux1_x86_64"]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12"]
    options += ["--implementation", "cp", "--quiet", "--dest", str(folder)]
    options += [word for platform in platforms for word in ("--platform", platform)]
    return [sys.executable, "-m", "pip", "download", *options, *packages]


def run_command(bench: str = _BENCH) -> str:
    """Returns the command to run in the folder on the GPU machine."""
    install = "python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir"
    return (
        f"{install} --upgrade --target /tmp/site .whl/*.whl && "
        'mkdir -p /tmp/tree && ln -sfn "$PWD" /tmp/tree/tandem && '
        "export PYTHONPATH=/tmp/site:/tmp/tree TANDEM_HOME=/tmp/home TRITON_CACHE_DIR=/tmp/triton "
        f"PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 && {bench}"
    )


def copy_repository(folder: Path) -> None:
    """Copies the files that git tracks or does not ignore."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def check_size(folder: Path, max_bytes: int = MAX_BYTES) -> int:
    """Returns the bytes of all files; raises TreeTooLarge if there are more than `max_bytes`."""
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    total = sum(sizes.values())
    if total > max_bytes:
        largest = max(sizes, key=lambda path: sizes[path])
        raise TreeTooLarge(
            f"{folder} has {total:,} bytes, the maximum is {max_bytes:,}; the largest file is "
            f"{largest.relative_to(folder)} with {sizes[largest]:,}: leave it out of WHEELS"
        )
    return total


def main(arguments: list[str] | None = None) -> int:
    """Makes the folder; returns 0, or 2 after one line on stderr if it exists or is too large."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(arguments).folder
    if folder.exists() and any(folder.iterdir()):
        print(f"gpu tree: {folder} is not empty; name another folder", file=sys.stderr)
        return 2
    copy_repository(folder)
    packages = [*pinned(WHEELS, (ROOT / "constraints.txt").read_text()), *OTHERS]
    subprocess.run(download_command(packages, folder / ".whl"), check=True)
    try:
        total = check_size(folder)
    except TreeTooLarge as error:
        print(f"gpu tree: {error}", file=sys.stderr)
        return 2
    print(f"{folder}: {total / 2**20:.1f} MiB. In it, on the GPU machine:\n{run_command()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
