"""`tandem plan measure`: measures a tiny model in worker and router processes."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cluster.cli.main import app
from tandem.cluster.planner import measure
from tandem.cluster.planner.profile import read_profile
from tandem.cluster.sim.cost import StepSample, StepWork
from tandem.proto.costs import TableCost
from tandem.proto.errors import InvalidArgument


def test_two_workers_are_measured(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    args = ["plan", "measure", str(tiny_model), "--seconds", "5", "--workers", "2"]
    result = CliRunner().invoke(app, [*args, "--context-tokens", "256", "--out", str(out)])
    assert result.exception is None, result.output
    assert "leave-one-out error" in result.stdout
    profile = read_profile(out)
    assert (profile.model, profile.device, profile.tp) == (tiny_model.name, "cpu", 1)
    worker = profile.worker(2)
    assert worker.num_blocks * worker.block_size >= worker.context_tokens > 0
    assert profile.tables == (TableCost(worker.block_size, profile.token_bytes),)
    works = [StepSample.of_row(row).work for row in worker.grid]
    assert any(each.prompt_tokens and each.sequences == 1 for each in works)
    assert any(each.prompt_tokens and each.sequences > 1 for each in works)
    assert any(each.sequences == worker.budgets.max_sequences for each in works)
    costs = profile.costs(1, 1)
    assert costs.decode.seconds(StepWork(sequences=1, context_tokens=64)) > 0
    assert min(costs.contention, costs.prefill_contention) >= 1
    # In a second, a fit may give all of the router's time to the tokens.
    assert costs.router_seconds_per_request + costs.router_seconds_per_token > 0
    assert costs.transfer_bytes_per_second > 0
    assert profile.transfer is not None
    assert profile.transfer.transport == "shared"
    with pytest.raises(InvalidArgument, match="--workers 1"):
        profile.costs(0, 1)


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (["--workers", "0"], "--workers"),
        (["--dtype", "int3"], "--dtype"),
        (["--seconds", "1"], "--seconds"),
        (["--out", "/nowhere/profile.json"], "--out"),
    ],
)
def test_wrong_options_are_named(tiny_model: Path, args: list[str], option: str) -> None:
    result = CliRunner().invoke(app, ["plan", "measure", str(tiny_model), *args])
    assert isinstance(result.exception, InvalidArgument)
    assert option in str(result.exception)


def test_a_ray_cluster_is_refused_before_the_model_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setattr(measure, "checked_folder", lambda *_: pytest.fail("fetched"))
    args = ["plan", "measure", "org/name", "--out", str(tmp_path / "profile.json")]
    result = CliRunner().invoke(app, args)
    assert str(result.exception).startswith("RAY_ADDRESS: must be unset")
