"""Runs the whole suite; with `--rerun`, each failed test gets a second run, alone.

Its two halves run at the same time. The tests of whole services wait for half of their time, which
the tests of the other half use.

A test that fails beside others and passes alone is printed under the heading FLAKY with its first
failure, and does not fail the suite. `make test` runs this module without `--rerun`, continuous
integration with it. As a pytest plugin (`-p tandem.tests.suite --failures FILE`) it writes the
failed tests of one run to a file.
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

_SOME_FAILED: Final = pytest.ExitCode.TESTS_FAILED
_END: Final = "[]"


class FailureLog:
    """Writes the id and the failure of each failed test to a file, a JSON list per line.

    The last line says that the run was not cut short.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._write(json.dumps([report.nodeid, report.longreprtext]))

    def pytest_sessionfinish(self) -> None:
        self._write(_END)

    def _write(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(line + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures", type=Path, help="write the failed tests to this file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--failures")
    if path is not None and not hasattr(config, "workerinput"):  # not in a process of xdist
        config.pluginmanager.register(FailureLog(path))


def command_of(options: tuple[str, ...], failures: Path) -> list[str]:
    """Returns the command of a pytest that writes its failed tests to a file."""
    command = [sys.executable, "-m", "pytest", "-p", "tandem.tests.suite"]
    return [*command, "--failures", str(failures), *options]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds the exit code of a run of pytest, and the first failure of each failed test."""

    code: int
    failures: dict[str, str]

    @classmethod
    def of(cls, code: int, log: Path) -> Self:
        """Reads a file of FailureLog; the code becomes INTERRUPTED if the run was cut short."""
        failures: dict[str, str] = {}
        lines = log.read_text().splitlines() if log.exists() else []
        for line in lines:
            if line != _END:
                test, text = json.loads(line)
                failures.setdefault(test, text)
        return cls(code if _END in lines else pytest.ExitCode.INTERRUPTED, failures)


def run_pytest(options: tuple[str, ...], log: Path) -> Outcome:
    """Runs pytest in a process."""
    return Outcome.of(subprocess.run(command_of(options, log)).returncode, log)


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


def rerun(failures: dict[str, str], options: tuple[str, ...], folder: Path) -> bool:
    """Runs failed tests again, one by one; returns True if all pass now, and prints them."""
    if len(failures) > MAX_RERUNS:
        print(f"{len(failures)} tests failed; at most {MAX_RERUNS} get a second run", flush=True)
        return False
    print(f"running {len(failures)} failed tests again, alone", flush=True)
    again = folder / "again"
    again.unlink(missing_ok=True)  # of the other half
    second = run_pytest((*options, *failures), again)
    flaky = {test: text for test, text in failures.items() if test not in second.failures}
    if second.code not in (pytest.ExitCode.OK, _SOME_FAILED):
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
        for outcome in run_halves(SHARING, IN_TURN, folder):
            if outcome.code == _SOME_FAILED and arguments.rerun and outcome.failures:
                passed &= rerun(outcome.failures, (), folder)
            else:
                passed &= outcome.code == pytest.ExitCode.OK
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
