"""Tests measured profiles: the costs that follow from them, and files that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.planner.profile import Profile, read_profile
from tandem.cluster.planner.site import MeasuredSite, Split
from tandem.cluster.planner.workload import PlannedWorkload
from tandem.cluster.sim.cost import prompt_steps
from tandem.cluster.sim.simulate import simulate
from tandem.proto.costs import TableCost
from tandem.proto.errors import InvalidArgument
from tandem.tests.profiles import PROFILED, make_profile


def with_request_seconds(profile: Profile, seconds: float) -> Profile:
    workers = [
        each.model_copy(update={"request_seconds": seconds, "contention": 1.0})
        for each in profile.workers
    ]
    return profile.model_copy(update={"workers": tuple(workers)})


@pytest.mark.parametrize("has_router", [True, False])
def test_a_request_alone_takes_its_measured_time_besides_its_steps(has_router: bool) -> None:
    profile = with_request_seconds(make_profile(1), 0.020)
    if not has_router:
        profile = profile.model_copy(update={"router": None})
    service, costs = MeasuredSite(profile).service(Split(0, 1))
    requests = PlannedWorkload.poisson(0.01, 300, 2, 2, seed=0).requests
    found = simulate(service, requests, costs).requests[0].record.ttft
    steps = sum(map(PROFILED.seconds, prompt_steps(300, 128)))
    assert found == pytest.approx(steps + 0.020, abs=1e-6)


def test_tokens_take_longer_beside_prompts_of_a_prefill_worker() -> None:
    profile = make_profile(2)
    slowed = profile.worker(2).model_copy(update={"contention": 1.1, "decode_contention": 1.3})
    profile = profile.model_copy(update={"workers": (slowed,)})
    assert [profile.costs(*split).contention for split in ((1, 1), (0, 2))] == [1.3, 1.1]


def test_a_grid_is_fitted_once() -> None:
    worker = make_profile(1).workers[0]
    assert worker.fit() is make_profile(2).workers[0].fit()
    longer = [(*amounts, 2 * seconds) for *amounts, seconds in worker.grid]
    other = worker.model_copy(update={"grid": tuple(longer)})
    assert other.fit().costs.fixed == pytest.approx(2 * worker.fit().costs.fixed)


def test_a_profile_keeps_the_block_tables_of_its_model(tmp_path: Path) -> None:
    windows = (TableCost(96, 3_840), TableCost(16, 19_200, 1024))
    profile = make_profile(1).model_copy(update={"tables": windows})
    path = tmp_path / "profile.json"
    path.write_text(profile.model_dump_json())
    assert read_profile(path) == profile
    service, _ = MeasuredSite(read_profile(path)).service(Split(0, 1))
    assert service.tables == windows
    config = service.engine_config(service.decode)
    assert config.capacity_tokens > 4 * config.num_blocks * config.block_size


def refused(path: Path, profile: dict[str, Any]) -> str:
    path.write_text(json.dumps(profile))
    with pytest.raises(InvalidArgument) as raised:
        read_profile(path)
    return str(raised.value)


def test_another_format_is_named_although_its_fields_differ(tmp_path: Path) -> None:
    profile = make_profile(1).model_dump() | {"format": 2, "old_field": 3}
    assert "has format 2, expected 3; run `tandem plan measure` again" in refused(
        tmp_path / "old.json", profile
    )


def test_a_grid_that_cannot_be_fitted_is_refused(tmp_path: Path) -> None:
    profile = make_profile(1).model_dump()
    (worker,) = profile["workers"]
    short = profile | {"workers": [worker | {"grid": [row[:4] for row in worker["grid"]]}]}
    assert "workers.0.grid.0: " in refused(tmp_path / "short.json", short)
    few = profile | {"workers": [worker | {"grid": worker["grid"][:3]}]}
    assert "workers.0.grid: " in refused(tmp_path / "few.json", few)
    assert "workers: " in refused(tmp_path / "none.json", profile | {"workers": []})
