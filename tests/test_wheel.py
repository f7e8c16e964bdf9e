"""Tests that the wheel and the sdist hold all that a service needs."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from tandem.tests.source import ROOT

_DATA_SUFFIXES = {".c", ".h", ".js", ".css", ".html", ".svg", ".jinja", ".proto", ".pyi"}
_BUILD = (
    "import sys, setuptools.build_meta as backend; target = sys.argv[1]; "
    "backend.build_wheel(target); backend.build_sdist(target)"  # the first changes sys.argv
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns a wheel and an sdist, built from a copy of the tracked files."""
    source = tmp_path_factory.mktemp("source")
    target = tmp_path_factory.mktemp("dist")
    for name in tracked_files():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-c", _BUILD, str(target)], cwd=source, check=True, stdout=subprocess.PIPE
    )
    (wheel,) = target.glob("*.whl")
    (sdist,) = target.glob("*.tar.gz")
    return wheel, sdist


def tracked_files() -> list[str]:
    """Returns the files of the repository that exist, without the tests."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [
        name
        for name in listing.stdout.splitlines()
        if not name.startswith("tests/") and (ROOT / name).is_file()
    ]


def package_files() -> set[str]:
    """Returns the files that an installed package must have, relative to the package."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    folders = {package.partition(".")[2].replace(".", "/") for package in packages}
    files = set()
    for name in tracked_files():
        path = PurePosixPath(name)
        folder = "" if path.parent == PurePosixPath(".") else str(path.parent)
        is_module = path.suffix == ".py" and folder in folders
        is_data = path.suffix in _DATA_SUFFIXES and any(
            folder.startswith(package) for package in folders if package
        )
        if is_module or is_data:
            files.add(name)
    return files | {"py.typed"}


def test_the_wheel_has_every_file_of_the_package(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name.removeprefix("tandem/") for name in wheel.namelist() if "/" in name}
    assert package_files() - names == set()
    assert not any(name.startswith(("tests/", "docs/")) for name in names)


def test_the_sdist_has_every_file_of_the_package(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert package_files() - names == set()
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_the_wheel_generates_tokens(
    built: tuple[Path, Path], tiny_model: Path, tmp_path: Path
) -> None:
    """The package is unpacked into an empty folder, which must hold the sources of the kernels."""
    site = tmp_path / "site"
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(site)
    program = (
        "import sys, tandem\n"
        "assert tandem.__file__.startswith(sys.argv[1]), tandem.__file__\n"
        "with tandem.LLM(sys.argv[2]) as llm:\n"
        "    (result,) = llm.generate(['a'], tandem.SamplingParams(max_tokens=3, "
        "ignore_eos=True))\n"
        "print(len(result.outputs[0].token_ids))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(site), str(tiny_model)],
        cwd=tmp_path,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
    )
    assert done.stdout.split()[-1] == "3"
