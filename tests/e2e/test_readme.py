"""Runs the commands of README as a newcomer would: in fresh shells, from top to bottom."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil
import pytest

from tandem.tests.source import ROOT

README: Final = (ROOT / "README.md").read_text()
ACTIVATE: Final = "source .venv/bin/activate"
SERVE: Final = "tandem serve smollm2-135m-instruct"
DEADLINE: Final = 240  # seconds for any command, on however busy a machine
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_READY = re.compile(r"tandem ready grpc=(\S+) http=(\S+) ops=(\S+)\n")
_ADDRESSES: Final = ("127.0.0.1:50051", "127.0.0.1:8080", "127.0.0.1:9464")


def fresh_shell(code: str, **variables: str) -> list[str]:
    """Returns the command of a shell that knows nothing but the user's home and the usual PATH."""
    known = {"HOME": os.environ["HOME"], "PATH": "/usr/local/bin:/usr/bin:/bin"} | variables
    environment = [f"{name}={value}" for name, value in known.items()]
    activate = f"source {sys.prefix}/bin/activate"
    return ["env", "-i", *environment, "bash", "--noprofile", "--norc", "-c", f"{activate}\n{code}"]


def blocks(language: str) -> list[str]:
    """Returns the blocks of code in a language."""
    return [code for found, code in _BLOCK.findall(README) if found == language]


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    """Starts the service of README on free ports; returns its addresses by those of README."""
    install = next(code for code in blocks("") if "make demo" in code)
    assert [line.partition("#")[0].strip() for line in install.splitlines()] == [
        "export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu",
        "make demo",
        ACTIVATE,
        SERVE,
    ]
    ports = "--grpc-port 0 --http-port 0 --ops-port 0"
    service = subprocess.Popen(
        fresh_shell(f"exec {SERVE} {ports}"),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert service.stdout is not None
        ready = _READY.fullmatch(service.stdout.readline())
        assert ready
        yield dict(zip(_ADDRESSES, ready.groups(), strict=True))
    finally:
        family = psutil.Process(service.pid).children(recursive=True)
        os.killpg(service.pid, signal.SIGINT)
        service.communicate(timeout=DEADLINE)
        assert not psutil.wait_procs(family, timeout=DEADLINE)[1]


def run(code: str, tmp_path: Path, addresses: dict[str, str]) -> str:
    """Runs a block in a fresh shell with the service's own addresses; returns its output."""
    for written, real in addresses.items():
        code = code.replace(written, real)
    url = f"grpc://{addresses[_ADDRESSES[0]]}"
    done = subprocess.run(
        fresh_shell(code, TANDEM_URL=url),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_block_of_commands_runs(tmp_path: Path, addresses: dict[str, str]) -> None:
    found = blocks("bash")
    assert len(found) >= 2
    for code in found:
        assert run(code, tmp_path, addresses).strip()


def test_every_block_of_python_runs(tmp_path: Path, addresses: dict[str, str]) -> None:
    found = blocks("python")
    assert len(found) >= 2
    for number, code in enumerate(found):
        for written, real in addresses.items():
            code = code.replace(written, real)
        script = tmp_path / f"{number}.py"
        script.write_text(code)
        assert run(f"python {script}", tmp_path, addresses).strip()


def test_the_commands_of_the_text_run(tmp_path: Path, addresses: dict[str, str]) -> None:
    for command in ("tandem status", "tandem dashboard"):
        assert f"`{command}`" in README
        assert run(command, tmp_path, addresses).strip()
