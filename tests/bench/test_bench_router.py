"""The commands that measure a router: `python -m tandem.tests.bench.router` and `.console`."""

import json
from typing import Any

import typer
from typer.testing import CliRunner

from tandem.tests.bench import console, router


def measured(app: typer.Typer, *arguments: str) -> list[dict[str, Any]]:
    """Returns the JSON that a command prints; it starts a router and a worker as processes."""
    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    costs: list[dict[str, Any]] = json.loads(done.stdout)
    return costs


def test_it_measures_callers_with_keys_over_tls() -> None:
    sizes = ("--streams", "2", "--tokens", "8", "--rounds", "1")
    costs = measured(router.app, "run", "--keys", "--tls", *sizes)
    assert [(cost["api"], cost["num_streams"]) for cost in costs] == [("grpc", 2), ("http", 2)]
    assert all(cost["tokens_per_second"] > 0 for cost in costs)


def test_it_compares_routers_with_and_without() -> None:
    sizes = ("--streams", "2", "--tokens", "8", "--rounds", "2", "--step-ms", "0")
    costs = measured(router.app, "compare", "metrics", *sizes)
    assert [cost["api"] for cost in costs] == ["grpc", "http"]
    assert all(cost["with_us"] > 0 and cost["without_us"] > 0 for cost in costs)


def test_it_measures_pages_that_poll() -> None:
    sizes = ("--streams", "2", "--pages", "2", "--seconds", "0.2", "--rounds", "1")
    costs = measured(console.app, *sizes)
    assert [cost["pages"] for cost in costs] == [0, 2]
    assert all(cost["percent"] > 0 for cost in costs)
