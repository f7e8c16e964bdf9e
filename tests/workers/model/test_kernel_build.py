"""Builds of the C kernels: one for all processes of a machine, and a clear word where there is
none.
"""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.workers.model.kernels.c import build

_BUILD = """
import sys
from pathlib import Path
from tandem.workers.model.kernels.c import build
build._SOURCES = (Path(sys.argv[1]),)
print(build.library())
"""


def compiler(folder: Path, script: str) -> Path:
    """Makes a command that does what the script says before it compiles."""
    made = folder / "cc"
    made.write_text(f"#!/bin/sh\n{script}\n")
    made.chmod(made.stat().st_mode | stat.S_IXUSR)
    return made


def test_of_many_processes_that_need_the_kernels_one_builds_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    source = tmp_path / "nothing.c"
    source.write_text("int nothing;")
    # Takes long enough for all others to come.
    script = f"""case "$1" in --version) exec cc --version;; esac
case "$*" in *" -c"*) echo built >> {log}; sleep 2;; esac
exec cc "$@" """
    environment = os.environ | {"CC": str(compiler(tmp_path, script)), "TANDEM_HOME": str(tmp_path)}
    command = [sys.executable, "-c", _BUILD, str(source)]
    running = [
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for each in running:
        out, err = each.communicate(timeout=120)
        assert "CDLL" in out, err
    assert log.read_text() == "built\n"


def test_a_compiler_that_does_not_end_ends_the_worker_s_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker in plain torch would continue the streams of those with kernels with other
    tokens.
    """
    script = 'case "$1" in --version) exec cc --version;; esac; exec sleep 600'
    monkeypatch.setenv("CC", str(compiler(tmp_path, script)))
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_BUILD_SECONDS", 1)
    with pytest.raises(subprocess.TimeoutExpired, match="timed out after 1 seconds"):
        build.library.__wrapped__()


def test_where_the_compiler_fails_plain_torch_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = 'case "$1" in --version) exec cc --version;; esac; exit 1'
    monkeypatch.setenv("CC", str(compiler(tmp_path, script)))
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    assert build.library.__wrapped__() is None
    assert "no C kernels; plain torch is several times slower" in caplog.text
