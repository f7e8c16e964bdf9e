"""Tests the policy as Serve runs it (pickled, wrapped, with its contexts) and the reports."""

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfoNotFoundError

import pytest
import yaml
from pydantic import ValidationError
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.common import DeploymentID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_app_level_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from tandem.cluster.config import TandemConfig, load_config
from tandem.cluster.scaling import policy, reports
from tandem.cluster.scaling.config import ScalingConfig
from tandem.cluster.scaling.policy import DECODE_POOL, PREFILL_POOL, ROUTER
from tandem.cluster.serve import serve_app
from tandem.cluster.serve.launch import start_service
from tandem.cluster.serve.members import Continuity
from tandem.cluster.serve.serve_app import _number_options, _reports_to
from tandem.proto.errors import InvalidArgument
from tandem.router.request import TokenRequest
from tandem.router.scheduling.admission import Admission
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.tests.peers import IDENTITY
from tandem.tests.router.pools import fill, request

PAGE = Path(__file__).parents[3] / "docs" / "operations" / "autoscaling.md"
SCALED = {
    "replicas": 1,
    "autoscaling": {"max_replicas": 4, "up_delay_seconds": 2.0, "down_delay_seconds": 4.0},
}
IDLE = {reports.PREFILL_TOKENS: (0, 0), reports.PREFILL_SECONDS: (0, 0)}
# In 10 seconds: two workers' work.
BUSY = {
    reports.PREFILL_TOKENS: (5_000, 25_000),
    reports.PREFILL_SECONDS: (5, 25),
}
DECODING = {
    reports.DECODES: (1, 1),
    reports.SEQUENCES: (3, 30),
    reports.MAX_SEQUENCES: (16, 16),
    reports.KV_TOKENS: (10, 100),
    reports.MAX_KV_TOKENS: (1_000, 1_000),
    reports.STEP_SECONDS: (0.01, 0.02),
}

Figures = Mapping[str, Mapping[str, tuple[float, float]]]


class Serve:
    """Calls the policy as Serve's controller does."""

    def __init__(self, config: TandemConfig) -> None:
        named: Any = AutoscalingPolicy
        given = named(policy_function="tandem.cluster.scaling.policy:ScalingPolicy")
        kept = named.from_serialized_policy_def(
            given.model_dump(), given.get_serialized_policy_def()
        )
        self._policy: Any = _apply_app_level_autoscaling_config(_resolve_policy_callable(kept))
        sizes = {ROUTER: (1, 1, _reports_to(config))}
        for name, pool in ((PREFILL_POOL, config.prefill), (DECODE_POOL, config.decode)):
            if pool.max_replicas:
                sizes[name] = (
                    pool.replicas,
                    pool.max_replicas,
                    pool.autoscaling or _reports_to(config),
                )
        self.configs = {
            name: _number_options(*size)["autoscaling_config"] for name, size in sizes.items()
        }
        self.numbers = {name: size[0] for name, size in sizes.items()}
        self._states: dict[Any, Any] = {}

    def decide(self, now: float, given: Figures) -> dict[str, int]:
        """Calls the policy with two values of each metric, ten seconds apart, for one replica."""
        contexts = {}
        for name, config in self.configs.items():
            key = DeploymentID(name=name, app_name="tandem")
            metrics = {
                figure: {
                    "replica": [TimeStampedValue(now - 10, first), TimeStampedValue(now, last)]
                }
                for figure, (first, last) in given.get(name, {}).items()
            }
            context: Any = AutoscalingContext
            contexts[key] = context(
                deployment_id=key,
                deployment_name=name,
                app_name="tandem",
                current_num_replicas=self.numbers[name],
                target_num_replicas=self.numbers[name],
                running_replicas=[],
                total_num_requests=0,
                total_queued_requests=0,
                aggregated_metrics=None,
                raw_metrics=metrics or None,
                capacity_adjusted_min_replicas=config.min_replicas,
                capacity_adjusted_max_replicas=config.max_replicas,
                policy_state=self._states.get(key, {}),
                last_scale_up_time=None,
                last_scale_down_time=None,
                current_time=now,
                config=config,
            )
        decisions, self._states = self._policy(contexts)
        self.numbers |= {key.name: number for key, number in decisions.items()}
        return {name: number for name, number in self.numbers.items() if name != ROUTER}


def service(**sections: dict[str, Any]) -> Serve:
    return Serve(load_config(None, {"model": "/models/tiny", **sections}))


def test_pools_follow_what_is_reported_after_their_delays() -> None:
    serve = service(prefill=SCALED, decode=SCALED)
    assert serve.decide(0.0, {}) == {PREFILL_POOL: 1, DECODE_POOL: 1}  # nobody has reported
    load: Figures = {ROUTER: BUSY, DECODE_POOL: DECODING}
    assert serve.decide(1.0, load) == {PREFILL_POOL: 1, DECODE_POOL: 1}
    assert serve.decide(3.0, load) == {PREFILL_POOL: 3, DECODE_POOL: 3}  # at 80 %
    assert serve.decide(9.0, {}) == {PREFILL_POOL: 3, DECODE_POOL: 3}
    idle: Figures = {ROUTER: IDLE, DECODE_POOL: DECODING | {reports.SEQUENCES: (0, 0)}}
    assert serve.decide(10.0, idle) == {PREFILL_POOL: 3, DECODE_POOL: 3}
    assert serve.decide(14.0, idle) == {PREFILL_POOL: 1, DECODE_POOL: 1}


def test_a_worker_counts_for_the_role_that_it_has() -> None:
    """A replica of the decode pool prefills, and one of the prefill pool decodes."""
    serve = service(prefill=SCALED, decode=SCALED)
    switched: Figures = {
        ROUTER: BUSY,
        PREFILL_POOL: DECODING,
        DECODE_POOL: DECODING | {reports.DECODES: (1, 0), reports.SEQUENCES: (900, 900)},
    }
    for now in (1.0, 3.0):
        found = serve.decide(now, switched)
    assert found == {PREFILL_POOL: 3, DECODE_POOL: 3}


def test_an_empty_prefill_pool_leaves_prompts_to_decode_workers() -> None:
    serve = service(prefill=SCALED | {"replicas": 0}, decode=SCALED)
    few = DECODING | {reports.SEQUENCES: (1, 1)}
    load: Figures = {ROUTER: BUSY, DECODE_POOL: few}
    assert serve.decide(0.0, load) == {PREFILL_POOL: 0, DECODE_POOL: 1}
    assert serve.decide(2.0, load) == {PREFILL_POOL: 3, DECODE_POOL: 3}  # neither waits for it
    for now in (7.0, 11.0):
        found = serve.decide(now, load)
    assert found == {PREFILL_POOL: 3, DECODE_POOL: 1}
    quiet = {reports.PREFILL_TOKENS: (0, 500), reports.PREFILL_SECONDS: (0, 0.5)}
    for now in (12.0, 20.0, 20.1):  # Serve stops the last one in a step of its own
        found = serve.decide(now, {ROUTER: quiet, DECODE_POOL: few})
    assert found == {PREFILL_POOL: 0, DECODE_POOL: 1}


NIGHT = 1_764_201_600.0  # Thursday, 27 November 2025, 00:00 UTC


def test_the_schedule_moves_the_bounds_with_and_without_load() -> None:
    hours = [
        {"days": ["thu"], "start": "08:00", "end": "20:00", "replicas": 3},
        {"start": "22:00", "end": "06:00", "max_replicas": 1},
    ]
    scaled = {"replicas": 1, "autoscaling": SCALED["autoscaling"] | {"schedule": hours}}  # type: ignore[operator]
    serve = service(decode=scaled, prefill={"replicas": 1})
    busy: Figures = {ROUTER: BUSY, DECODE_POOL: DECODING}
    found = []
    for hour, load in ((1, busy), (7, busy), (9, {}), (21, {}), (23, busy), (27, busy), (33, {})):
        for second in (0.0, 10.0):
            number = serve.decide(NIGHT + 3600 * hour + second, load)[DECODE_POOL]
        found.append(number)
    # At night one; by day what the load needs, at least three on Thursdays.
    assert found == [1, 3, 3, 3, 1, 1, 1]


def test_a_schedule_in_utc_needs_no_database_of_time_zones(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in the policy would stop Serve's controller."""

    def refuse(name: str) -> None:
        raise ZoneInfoNotFoundError(name)

    monkeypatch.setattr("tandem.cluster.scaling.config.ZoneInfo", refuse)
    hours = [{"start": "08:00", "end": "20:00", "replicas": 3}]
    config = ScalingConfig.model_validate({"max_replicas": 4, "schedule": hours})
    assert config.bounds_at(NIGHT, 1, 4) == (1, 4)
    assert config.bounds_at(NIGHT + 9 * 3600, 1, 4) == (3, 4)
    with pytest.raises(ValidationError, match="Mars is unknown"):
        ScalingConfig(max_replicas=4, timezone="Mars")


def test_a_pool_of_a_fixed_size_stays_and_what_waits_counts() -> None:
    serve = service(prefill={"replicas": 2}, decode=SCALED)
    waiting = BUSY | {reports.WAITING_SEQUENCES: (0, 20), reports.WAITING_KV_TOKENS: (0, 4_000)}
    for now in (0.0, 5.0):
        found = serve.decide(now, {ROUTER: waiting, DECODE_POOL: DECODING})
    assert found == {PREFILL_POOL: 2, DECODE_POOL: 4}


def test_without_a_prefill_pool_the_prompts_are_the_decode_pools() -> None:
    serve = service(prefill={"replicas": 0}, decode=SCALED)
    idle = DECODING | {reports.SEQUENCES: (1, 1)}
    for now in (0.0, 5.0):
        found = serve.decide(now, {ROUTER: BUSY, DECODE_POOL: idle})
    assert found[DECODE_POOL] == 3


def test_prompts_that_wait_while_none_is_computed_change_nothing() -> None:
    serve = service(prefill=SCALED, decode=SCALED)
    for now in (0.0, 3.0):
        serve.decide(now, {ROUTER: BUSY, DECODE_POOL: DECODING})
    stuck = IDLE | {reports.WAITING_PREFILL_TOKENS: (0, 1_000)}
    for now in (4.0, 20.0):
        assert serve.decide(now, {ROUTER: stuck, DECODE_POOL: DECODING})[PREFILL_POOL] == 3


def test_the_decode_pool_does_not_wait_for_what_is_known_of_prompts() -> None:
    serve = service(prefill=SCALED, decode=SCALED)
    stuck = IDLE | {reports.WAITING_PREFILL_TOKENS: (0, 1_000)}
    for now in (0.0, 5.0):
        found = serve.decide(now, {ROUTER: stuck, DECODE_POOL: DECODING})
    assert found == {PREFILL_POOL: 1, DECODE_POOL: 3}


def test_a_deployment_with_an_autoscaling_config_of_another_kind_stays() -> None:
    serve = service(prefill=SCALED, decode=SCALED)
    serve.configs[DECODE_POOL] = AutoscalingConfig(
        max_replicas=4, upscale_delay_s=0, downscale_delay_s=0
    )
    for now in (0.0, 5.0):
        found = serve.decide(now, {ROUTER: BUSY, DECODE_POOL: DECODING})
    assert found == {PREFILL_POOL: 3, DECODE_POOL: 1}


def test_a_worker_reports_what_it_has_and_can_do() -> None:
    registry = WorkerRegistry()
    fill(registry, prefill=1, decode=1, max_sequences=8, num_blocks=256)
    found = reports.worker_report(registry.workers()[1])
    assert found[reports.MAX_SEQUENCES] == 8
    assert found[reports.MAX_KV_TOKENS] == 256 * registry.workers()[1].block_size
    assert found[reports.KV_TOKENS] == 0


async def test_a_router_reports_what_it_sent_and_for_which_pool_requests_wait() -> None:
    registry = WorkerRegistry()
    fill(registry, prefill=1, decode=1, max_sequences=1, num_blocks=256)
    admission = Admission(registry)
    first = request(range(40), "first", max_tokens=4)
    async with admission.permit(first):
        placement = registry.place(first)
        assert placement is not None
        registry.dispatched(placement.prefill or "", first, 40)
        registry.dispatched(placement.decode, first, 0)
        found = reports.router_report(admission, registry)
        assert found[reports.PREFILL_TOKENS] == 40
        assert found[reports.PREFILL_SECONDS] > 0
        assert found[reports.WAITING_SEQUENCES] == 0
        waiting = asyncio.create_task(hold(admission, request(range(24), "second", max_tokens=4)))
        await asyncio.sleep(0)
        found = reports.router_report(admission, registry)
        assert (found[reports.WAITING_SEQUENCES], found[reports.WAITING_KV_TOKENS]) == (1, 28)
        assert found[reports.WAITING_PREFILL_TOKENS] == 0  # that pool has room
        waiting.cancel()


async def hold(admission: Admission, asked: TokenRequest) -> None:
    async with admission.permit(asked):
        raise AssertionError("the only sequence is taken")


def test_tandem_serve_refuses_what_only_a_serve_configuration_can_start() -> None:
    config = load_config(None, {"model": "/models/tiny", "decode": SCALED})
    with (
        pytest.raises(InvalidArgument, match="needs a configuration of Ray Serve"),
        start_service(config, "/models/tiny"),
    ):
        pass


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            {"decode.autoscaling": {"max_replicas": 2, "timezone": "Mars"}},
            r"^decode\.autoscaling\.timezone: Mars is unknown",
        ),
        (
            {
                "decode.autoscaling": {
                    "max_replicas": 2,
                    "schedule": [{"start": "8:00", "end": "09:00"}],
                }
            },
            "decode.autoscaling.schedule.0.start: must be a time of day",
        ),
        (
            {
                "decode.autoscaling": {
                    "max_replicas": 2,
                    "schedule": [{"start": "18:00", "end": 1200}],
                }
            },
            "decode.autoscaling.schedule.0.end: must be a time of day .* in quotes, got 1200",
        ),
        (
            {
                "decode.autoscaling": {
                    "max_replicas": 2,
                    "schedule": [{"start": "08:00", "end": "09:00", "replicas": 3}],
                }
            },
            "decode.autoscaling.schedule.0: replicas 3 and max_replicas 2 must lie within",
        ),
        (
            {"decode.replicas": 1, "prefill.replicas": 0, "role_scaling": {}},
            "role_scaling: needs 2 workers .* got 1",
        ),
        (
            {"decode.replicas": 2, "prefill.replicas": 2, "role_scaling.max_prefill": 1},
            "role_scaling: prefill.replicas, 2, must lie within min_prefill, 1, and max_prefill, 1",
        ),
        (
            {
                "decode.replicas": 2,
                "prefill.replicas": 2,
                "role_scaling": {"min_prefill": 3, "max_prefill": 2},
            },
            "role_scaling.min_prefill: must be at most max_prefill, 2, got 3",
        ),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused(
    overrides: dict[str, object], reason: str
) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        load_config(None, {"model": "m", **overrides})


def test_the_configuration_of_serve_on_the_page_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the files that it names are made up."""
    (block,) = re.findall(r"```yaml\n(applications:.*?)```", PAGE.read_text(), re.DOTALL)
    (application,) = yaml.safe_load(block)["applications"]
    continuity = Continuity(
        identity=IDENTITY, resume_key=b"k" * 32, layout=b"l" * 16, ends_with_launcher=False
    )
    monkeypatch.setattr(serve_app, "checked_folder", lambda config: Path(config.model))
    monkeypatch.setattr(serve_app, "first_continuity", lambda config, folder: continuity)
    assert application["import_path"] == f"{serve_app.__name__}:{serve_app.build.__name__}"
    named = application["autoscaling_policy"]["policy_function"]
    assert named == f"{policy.__name__}:{policy.ScalingPolicy.__name__}"
    router: Any = serve_app.build(application["args"])._bound_deployment
    assert router._deployment_config.autoscaling_config.min_replicas == 2
    assert load_config(None, application["args"]).auth.needs_key  # pods do not listen on loopback
