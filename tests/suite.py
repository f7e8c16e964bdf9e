"""Runs the whole suite; with `--rerun`, each failed test gets a second run, alone, and a run that
was cut short goes on with the tests that it had left.

Its two halves run at the same time. The tests of whole services wait for half of their time, which
the tests of the other half use.

A test that fails beside others and passes alone is printed under the heading FLAKY with its first
failure, and does not fail the suite. `make test` runs this module without `--rerun`, continuous
integration with it. As a pytest plugin (`-p tandem.tests.suite`) it writes what became of each test
to a file (`--log FILE`), and leaves out tests (`--without FILE`, an id per line).
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import pytest

SHARING: Final = ("--sharing", "--durations", "30", "-n", "3", "--dist", "worksteal")
IN_TURN: Final = ("--in-turn", "--durations", "10")
MAX_RERUNS: Final = 30
"""More failures than this have one cause, so running them again tells nothing."""

_END: Final = "[]"


class TestLog:
    """Writes the id of each test that has ended to a file, and the id and the text of each failure,
    a JSON list per line.

    The last line says that the run was not cut short.
    """

    __test__ = False  # for pytest

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._write(json.dumps([report.nodeid, report.longreprtext]))
        if report.when == "teardown":
            self._write(json.dumps([report.nodeid]))

    def pytest_sessionfinish(self) -> None:
        self._write(_END)

    def _write(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(line + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--log", type=Path, help="write the ended and the failed tests to this file")
    parser.addoption("--without", type=Path, help="leave out the tests in this file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--log")
    if path is not None and not hasattr(config, "workerinput"):  # not in a process of xdist
        config.pluginmanager.register(TestLog(path))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = config.getoption("--without")
    if path is not None:
        left_out = set(path.read_text().splitlines())
        items[:] = [item for item in items if item.nodeid not in left_out]


def command_of(options: tuple[str, ...], log: Path) -> list[str]:
    """Returns the command of a pytest that writes a log."""
    command = [sys.executable, "-m", "pytest", "-p", "tandem.tests.suite"]
    return [*command, "--log", str(log), *options]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds the exit code of a run of pytest, the first failure of each failed test, the tests that
    have ended, and False if the run was cut short.
    """

    code: int
    failures: dict[str, str]
    ended: frozenset[str]
    complete: bool

    @classmethod
    def of(cls, code: int, log: Path) -> Self:
        """Reads a file of TestLog.

        A process that did not exit has the code of failed tests as well, but no failed test.
        """
        failures: dict[str, str] = {}
        ended = set()
        text = log.read_text() if log.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # a killed process may leave half a line
        for line in map(json.loads, lines):
            if len(line) == 2:
                failures.setdefault(*line)
            ended.update(line[:1])
        expected = pytest.ExitCode.TESTS_FAILED if failures else pytest.ExitCode.OK
        return cls(code, failures, frozenset(ended), _END in lines and code == expected)

    @property
    def passed(self) -> bool:
        """Returns True if all tests have run and passed."""
        return self.complete and not self.failures


def run_pytest(options: tuple[str, ...], log: Path, seconds: float | None = None) -> Outcome:
    """Runs pytest in a process, for at most so many seconds; replaces the log of an earlier run."""
    log.unlink(missing_ok=True)
    try:
        code = subprocess.run(command_of(options, log), timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        code = pytest.ExitCode.INTERRUPTED
    return Outcome.of(code, log)


def run_halves(first: tuple[str, ...], second: tuple[str, ...], folder: Path) -> list[Outcome]:
    """Runs pytest twice at the same time; prints the output of the second run when both ended."""
    logs = [folder / "first", folder / "second"]
    with (folder / "output").open("w+") as output:
        command = command_of(second, logs[1])
        with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as beside:
            outcome = run_pytest(first, logs[0])
            code = beside.wait()
        output.seek(0)
        shutil.copyfileobj(output, sys.stdout)
        sys.stdout.flush()
    return [outcome, Outcome.of(code, logs[1])]


def settle(outcome: Outcome, options: tuple[str, ...], folder: Path) -> bool:
    """Runs what a run has left, and its failed tests again; returns True if all tests pass now."""
    failures = dict(outcome.failures)
    if not outcome.complete:
        number = len(outcome.ended)
        print(f"\nCUT SHORT: pytest {' '.join(options)} ended with {outcome.code} after {number}")
        print("tests; running those that it had left", flush=True)
        left_out = folder / "left_out"
        left_out.write_text("\n".join(outcome.ended))
        # In one word: pytest would take an existing path for the root of the tests.
        rest = run_pytest((*options, f"--without={left_out}"), folder / "rest")
        if not rest.complete and rest.code != pytest.ExitCode.NO_TESTS_COLLECTED:
            return False
        failures |= rest.failures
    return not failures or rerun(failures, (), folder)


def rerun(failures: dict[str, str], options: tuple[str, ...], folder: Path) -> bool:
    """Runs failed tests again, one by one; returns True if all pass now, and prints them."""
    if len(failures) > MAX_RERUNS:
        print(f"{len(failures)} tests failed; at most {MAX_RERUNS} get a second run", flush=True)
        return False
    print(f"running {len(failures)} failed tests again, alone", flush=True)
    second = run_pytest((*options, *failures), folder / "again")
    flaky = {test: text for test, text in failures.items() if test not in second.failures}
    if not second.complete:
        return False
    if flaky:
        print("\nFLAKY: these tests failed beside others and passed alone")
    for test, text in flaky.items():
        print(f"\n{test}\n{text}")
    return not second.failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rerun", action="store_true", help="run failed tests again, alone")
    arguments = parser.parse_args()
    passed = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        halves = SHARING, IN_TURN
        for outcome, options in zip(run_halves(*halves, folder), halves, strict=True):
            passed &= settle(outcome, options, folder) if arguments.rerun else outcome.passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
