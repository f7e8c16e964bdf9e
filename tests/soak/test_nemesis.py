"""Runs the nemesis, see nemesis.py: no stream may fail or change while processes of all kinds are
killed, and nothing may grow.
"""

from typing import Any

import pytest


@pytest.mark.soak
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(
    "plan",
    [
        {"minutes": 20, "streams": 800, "spares": True},  # what lives throughout does not grow
        {"minutes": 5, "streams": 200},  # nothing does
        {"minutes": 5, "streams": 200, "tp": 2},
    ],
)
def test_no_stream_fails_or_changes_while_processes_are_killed(plan: dict[str, Any]) -> None:
    from tandem.tests.soak.nemesis import Plan, run

    report = run(Plan(tokens=200, **plan))
    print(report)
    assert report.passed, str(report)
