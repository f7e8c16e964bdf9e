"""Builds of the C kernels: one for all processes of a machine, and a clear word where there is
none.
"""

import os
import stat
import subprocess
import sys
import tempfile
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

_ARM_CORE = """processor\t: 0
BogoMIPS\t: 50.00
Features\t: fp asimd crc32
CPU implementer\t: 0x41
CPU part\t: 0xd0c

"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only source, which compiles at once."""
    made = tmp_path / "nothing.c"
    made.write_text("int nothing;")
    monkeypatch.setattr(build, "_SOURCES", (made,))
    return made


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
    script = 'case "$1" in --version) exec cc --version;; esac; echo "unknown flag" >&2; exit 1'
    monkeypatch.setenv("CC", str(compiler(tmp_path, script)))
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert build.library.__wrapped__() is None
    assert "no C kernels; plain torch is several times slower" in caplog.text
    assert "returned non-zero exit status 1. unknown flag" in caplog.text


def test_where_the_home_has_no_room_the_temporary_folder_has_the_kernels(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    temporary.mkdir()
    script = f"""case "$*" in *" {home}/"*) echo "No space left on device" >&2; exit 1;; esac
exec cc "$@" """
    monkeypatch.setenv("CC", str(compiler(tmp_path, script)))
    monkeypatch.setenv("TANDEM_HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    kernels = build.library.__wrapped__()
    assert kernels is not None
    assert Path(kernels._name).is_relative_to(temporary)
    assert "storing the C kernels in a temporary folder" in caplog.text
    assert "No space left on device" in caplog.text
    assert "no C kernels" not in caplog.text


def test_the_compiler_may_have_arguments(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `ccache gcc`. Kernels that are compiled with other arguments are not the same."""
    folder = tmp_path / "with a space"
    folder.mkdir()
    wrapper = compiler(folder, '[ "$1" = wrapped ] || exit 1; shift; exec cc "$@"')
    monkeypatch.setenv("CC", f"'{wrapper}' wrapped")
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert build.library.__wrapped__() is not None
    assert build._fingerprint(["cc", "-O1"]) != build._fingerprint(["cc"])


def test_a_command_that_cannot_be_read_is_no_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "'gcc")
    assert build.library.__wrapped__() is None
    assert "no C kernels" in caplog.text
    assert "CC must be a command and its arguments: No closing quotation" in caplog.text


@pytest.mark.parametrize(
    ("field", "other"),
    [("asimd", "asimd sve"), ("0x41", "0xc0"), ("0xd0c", "0xd40")],
)
def test_processors_with_other_instructions_do_not_share_kernels(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, field: str, other: str
) -> None:
    """Their folder may be a volume that machines of several kinds share."""
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(build, "_CPUINFO", cpuinfo)

    def fingerprint(text: str) -> str:
        cpuinfo.write_text(text)
        return build._fingerprint(["cc"])

    assert fingerprint(_ARM_CORE) != fingerprint(_ARM_CORE.replace(field, other))
    second = _ARM_CORE.replace("processor\t: 0", "processor\t: 1")
    assert fingerprint(_ARM_CORE) == fingerprint(_ARM_CORE + second)
