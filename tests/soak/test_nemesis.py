"""Runs the nemesis, see nemesis.py: no stream may fail or change while processes of all kinds are killed."""

import pytest


@pytest.mark.soak
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("tp", [1, 2])
def test_no_stream_fails_or_changes_while_processes_are_killed(tp: int) -> None:
    from tandem.tests.soak.nemesis import Plan, run

    report = run(Plan(minutes=5, streams=800 if tp == 1 else 200, tokens=200, tp=tp))
    print(report)
    assert report.passed, str(report)
