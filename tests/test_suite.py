"""Tests that both halves run at the same time, that failed tests get a second run alone, that only
those that fail again count, and that a run that was cut short goes on.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from tandem.tests import suite
from tandem.tests.source import ROOT

_SOURCE = """
from pathlib import Path

import pytest


def test_passes() -> None:
    pass


def test_fails_once(request: pytest.FixtureRequest) -> None:
    mark = Path(__file__).with_name("mark")
    if not mark.exists():
        mark.touch()
        pytest.fail("the first run")
"""
_BROKEN = """

def test_fails_always() -> None:
    assert "always" == ""
"""
_MEETING = """
import time
from pathlib import Path


def test_meets_{other}() -> None:
    Path("{name}").touch()
    deadline = time.monotonic() + 120
    while not Path("{other}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
{more}
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def options_for(tmp_path: Path) -> tuple[str, ...]:
    """Returns options of pytest for files outside the repository."""
    folder = ("--rootdir", str(tmp_path), "-c", "/dev/null")
    return ("-q", "-n", "0", "-p", "no:schemathesis", *folder)


def test_both_halves_run_at_the_same_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each has a test that waits for the other half's; one of them then fails."""
    files = []
    for name, other, more in (("one", "two", ""), ("two", "one", "    assert not 'two'")):
        files.append(tmp_path / f"test_{name}.py")
        files[-1].write_text(_MEETING.format(name=name, other=other, more=more))
    options = [(*options_for(tmp_path), file.name) for file in files]
    passed, failed = suite.run_halves(options[0], options[1], tmp_path)
    ended = frozenset(["test_one.py::test_meets_two"])
    assert passed == suite.Outcome(pytest.ExitCode.OK, {}, ended, complete=True)
    assert failed.code == pytest.ExitCode.TESTS_FAILED
    assert [test.rpartition("::")[2] for test in failed.failures] == ["test_meets_one"]
    output = capfd.readouterr().out
    assert 0 < output.index("1 passed") < output.index("assert not 'two'")


def run_twice(tmp_path: Path, source: str) -> tuple[int, dict[str, str], bool]:
    """Runs a file of tests and then its failures again.

    Returns the exit code of the first run, its failures, and True if the second run passed.
    """
    file = tmp_path / "test_made_up.py"
    file.write_text(source)
    options = options_for(tmp_path)
    first = suite.run_pytest((*options, file.name), tmp_path / "failures")
    return first.code, first.failures, suite.rerun(first.failures, options, tmp_path)


def test_a_test_that_passes_alone_is_flaky(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, failures, passed = run_twice(tmp_path, _SOURCE)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert [test.rpartition("::")[2] for test in failures] == ["test_fails_once"]
    assert passed
    output = capfd.readouterr().out
    assert "FLAKY" in output
    assert "the first run" in output.partition("FLAKY")[2]


def test_a_test_that_fails_again_fails_the_suite(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, failures, passed = run_twice(tmp_path, _SOURCE + _BROKEN)
    assert len(failures) == 2
    assert not passed
    flaky = capfd.readouterr().out.partition("FLAKY")[2]
    assert "test_fails_once" in flaky
    assert "test_fails_always" not in flaky


def test_many_failures_are_not_run_again(tmp_path: Path) -> None:
    failures = {f"test_{number}": "" for number in range(suite.MAX_RERUNS + 1)}
    assert not suite.rerun(failures, (), tmp_path)
    assert list(tmp_path.iterdir()) == []


_CUT_SHORT = """
import os
from pathlib import Path

import pytest


def test_passes_once() -> None:
    Path("passed").touch(exist_ok=False)


def test_ends_the_process_once() -> None:
    mark = Path(__file__).with_name("mark")
    if not mark.exists():
        mark.touch()
        os._exit(1)


def test_fails_always() -> None:
    assert "always" == ""
"""


def test_a_run_that_was_cut_short_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "test_made_up.py"
    file.write_text(_CUT_SHORT)
    options = (*options_for(tmp_path), file.name)
    outcome = suite.run_pytest(options, tmp_path / "first")
    assert not outcome.complete
    assert outcome.ended == {"test_made_up.py::test_passes_once"}
    assert not suite.settle(outcome, options, tmp_path)
    output = capfd.readouterr().out
    assert "ended with 1 after 1\ntests" in output
    assert "1 failed, 1 passed" in output


_WITH_SETTINGS = """
import os
from pathlib import Path


def test_has_the_settings(pytestconfig) -> None:
    assert pytestconfig.getini("python_functions") == ["test", "check"]
    if not Path("mark").exists():
        Path("mark").touch()
        os._exit(1)
"""


def test_the_rest_of_a_run_has_the_settings_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its list of ended tests is in a folder outside, as a temporary folder is."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "pytest.ini").write_text("[pytest]\npython_functions = test check\n")
    (project / "test_made_up.py").write_text(_WITH_SETTINGS)
    monkeypatch.chdir(project)
    options = ("-q", "-n", "0", "-p", "no:schemathesis")
    outcome = suite.run_pytest(options, tmp_path / "first")
    assert not outcome.complete
    assert suite.settle(outcome, options, tmp_path)


def test_a_run_without_failures_that_did_not_exit_goes_on_with_nothing(tmp_path: Path) -> None:
    file = tmp_path / "test_made_up.py"
    file.write_text("def test_passes() -> None:\n    pass\n")
    (tmp_path / "conftest.py").write_text(
        "import os\n"
        "def pytest_unconfigure():\n"
        "    if not os.path.exists('mark'):\n"
        "        os.close(os.open('mark', os.O_CREAT))\n"
        "        os._exit(1)\n"
    )
    options = (*options_for(tmp_path), file.name)
    outcome = suite.run_pytest(options, tmp_path / "first")
    assert not outcome.complete
    assert suite.settle(outcome, options, tmp_path)


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
@pytest.mark.parametrize(
    ("environment", "arguments", "expected"),
    [
        (".venv-gpu", ["test-gpu-versions"], "PYTHONPATH={folder}/.venv-gpu/tree\n"),
        (".venv", ["gpu", "OUT=a folder"], "<--out>\n<a folder>\n"),
        (".venv", ["gpu-tree", "OUT=a folder"], "<a folder>\n"),
    ],
)
def test_make_takes_folders_of_any_name(
    tmp_path: Path, environment: str, arguments: list[str], expected: str
) -> None:
    """Its targets run a Python that prints what it was given."""
    folder = tmp_path / "a clone of 'Tandem'"
    python = folder / environment / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "PYTHONPATH=$PYTHONPATH"\nprintf "<%s>\\n" "$@"\n')
    python.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "tests/gpu/requirements.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    (folder / environment / ".installed").touch()
    done = subprocess.run(
        ["make", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert expected.format(folder=folder) in done.stdout


_HANGING = """
import threading
import pytest


@pytest.fixture
def waits_for_ever():
    yield
    threading.Event().wait()


def test_fails() -> None:
    assert "first" == ""


def test_fails_and_hangs(waits_for_ever: None) -> None:
    assert "then" == ""
"""


def test_a_test_that_hangs_is_ended_with_the_stacks_of_its_threads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The hang is in a fixture's end, where pytest has disarmed its own faulthandler."""
    (tmp_path / "conftest.py").write_text(
        "from tandem.tests import conftest\n"
        "def pytest_configure(config):\n"
        "    conftest.HANG_SECONDS = 3.0\n"
        "    config.pluginmanager.register(conftest.HangGuard(1))\n"
    )
    file = tmp_path / "test_made_up.py"
    file.write_text(_HANGING)
    options = (*options_for(tmp_path), "-p", "no:timeout")
    outcome = suite.run_pytest((*options, file.name), tmp_path / "failures")
    assert not outcome.complete
    assert [test.rpartition("::")[2] for test in outcome.failures] == [
        "test_fails",
        "test_fails_and_hangs",
    ]
    error = capfd.readouterr().err
    assert "waits_for_ever" in error
