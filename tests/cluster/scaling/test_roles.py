"""Tests the choice of roles in virtual time: bounds, hysteresis, oscillation, bursts, failures."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cluster.scaling import reports
from tandem.cluster.scaling.config import RoleScaling, RoleScalingConfig
from tandem.cluster.scaling.policy import DECODE_POOL, PREFILL_POOL
from tandem.cluster.scaling.roles import RoleScaler
from tandem.cluster.scaling.sizing import RoleSplit
from tandem.tests.cluster.scaling.simulation import Arrival, Hardware, Outcome, Simulation, steady
from tandem.tests.examples import num_examples

RATE = 1000.0  # tokens a second of a prefill worker
MOST = 64  # sequences of a decode worker
CONFIG = RoleScalingConfig(utilization=0.8, delay_seconds=4, return_seconds=40, window_seconds=5)
TICK = 1.0  # seconds between two reports of a member

Load = tuple[float, float, float]
"""Seconds, and the numbers of workers that prompts and sequences need in that time."""


@dataclass
class Service:
    """Holds workers that take each role at once; reports a load that their split cannot change."""

    scaler: RoleScaler
    roles: dict[str, str]
    now: float = 100.0
    tokens: float = 0.0
    history: list[tuple[float, int]] = field(default_factory=list)  # time, prefill workers

    @classmethod
    def start(
        cls, num_prefill: int, num_decode: int, config: RoleScalingConfig = CONFIG
    ) -> "Service":
        roles = {f"p{n}": "prefill" for n in range(num_prefill)}
        roles |= {f"d{n}": "decode" for n in range(num_decode)}
        scaling = RoleScaling(
            config=config, num_prefill=num_prefill, num_workers=num_prefill + num_decode
        )
        return cls(RoleScaler(scaling), roles, history=[(100.0, num_prefill)])

    @property
    def num_prefill(self) -> int:
        return list(self.roles.values()).count("prefill")

    @property
    def switches(self) -> list[tuple[float, int]]:
        """Returns the time of each switch, with 1 for one to prefill and -1 for one to decode."""
        pairs = itertools.pairwise(self.history)
        return [(time, after - before) for (_, before), (time, after) in pairs if after != before]

    def run(self, loads: Iterable[Load]) -> None:
        for seconds, prompts, sequences in loads:
            for _ in range(round(seconds / TICK)):
                self.step(prompts, sequences)

    def step(self, prompts: float, sequences: float) -> None:
        self.now += TICK
        self.tokens += prompts * RATE * CONFIG.utilization * TICK
        figures = {
            reports.PREFILL_TOKENS: self.tokens,
            reports.PREFILL_SECONDS: self.tokens / RATE,
        }
        self.scaler.report(self.now, "router", "", figures)
        each = sequences * MOST * CONFIG.utilization / max(len(self.roles) - self.num_prefill, 1)
        for worker_id, role in list(self.roles.items()):
            decodes = role == "decode"
            figures = {
                reports.DECODES: float(decodes),
                reports.SEQUENCES: each if decodes else 0.0,
                reports.MAX_SEQUENCES: MOST,
                reports.KV_TOKENS: 0.0,
                reports.MAX_KV_TOKENS: 1000.0,
            }
            self.roles[worker_id] = self.scaler.report(self.now, worker_id, role, figures)
        self.history.append((self.now, self.num_prefill))


NEEDS = st.floats(0, 6)
LOADS = st.lists(st.tuples(st.floats(1, 30), NEEDS, NEEDS), min_size=1, max_size=6)


@settings(max_examples=num_examples(25))
@given(
    loads=LOADS, num_prefill=st.integers(0, 5), num_decode=st.integers(1, 5), low=st.integers(0, 2)
)
def test_the_bounds_hold_and_a_worker_always_decodes(
    loads: list[Load], num_prefill: int, num_decode: int, low: int
) -> None:
    total = num_prefill + num_decode
    config = CONFIG.model_copy(update={"min_prefill": low})
    service = Service.start(num_prefill, num_decode, config)
    service.run(loads)
    first = min(low, total - 1)
    assert all(number < total for _, number in service.history)
    # An operator's split beyond the bounds is corrected one by one.
    reached = [number >= first for _, number in service.history]
    assert reached == sorted(reached)
    changes = [
        abs(after - before) for (_, before), (_, after) in itertools.pairwise(service.history)
    ]
    assert max(changes) <= 1


@settings(max_examples=num_examples(25))
@given(prompts=NEEDS, sequences=NEEDS, num_prefill=st.integers(1, 5), num_decode=st.integers(1, 5))
def test_a_constant_load_moves_the_split_one_way_and_then_leaves_it(
    prompts: float, sequences: float, num_prefill: int, num_decode: int
) -> None:
    service = Service.start(num_prefill, num_decode)
    service.run([(80, prompts, sequences)])
    ways = {way for _, way in service.switches}
    assert len(ways) <= 1
    assert all(time < 140 for time, _ in service.switches)


@settings(max_examples=num_examples(25))
@given(loads=LOADS, num_prefill=st.integers(1, 4), num_decode=st.integers(1, 4))
def test_no_switch_is_undone_before_its_delay(
    loads: list[Load], num_prefill: int, num_decode: int
) -> None:
    service = Service.start(num_prefill, num_decode)
    service.run(loads)
    for (last, way), (time, other) in itertools.pairwise(service.switches):
        assert way == other or time - last >= CONFIG.delay_seconds - TICK


@settings(max_examples=num_examples(25))
@given(noise=st.lists(st.floats(0.92, 1.08), min_size=30, max_size=60))
def test_noise_around_a_full_load_changes_nothing(noise: list[float]) -> None:
    service = Service.start(2, 2)
    service.run(
        (1, 2 * each, 2 * other) for each, other in zip(noise, reversed(noise), strict=True)
    )
    assert service.switches == []


@given(
    split=st.builds(
        RoleSplit, prefill=st.floats(0, 20), decode=st.floats(0, 20), num_workers=st.integers(2, 12)
    ),
    data=st.data(),
)
def test_a_better_split_is_better_by_a_margin_and_final(
    split: RoleSplit, data: st.DataObject
) -> None:
    current = data.draw(st.integers(0, split.num_workers - 1))
    best = split.best(current, 0, split.num_workers - 1)
    assert split.best(best, 0, split.num_workers - 1) == best
    if best != current:
        assert split.shortage(current) > 1
        number = split.num_workers - best
        giver = split.decode / number if best > current else split.prefill / max(best, 1)
        assert split.shortage(best) <= 0.8 * split.shortage(current) or giver <= 0.8 + 1e-5


def test_a_short_burst_changes_nothing_and_a_long_one_does_until_it_is_over() -> None:
    service = Service.start(1, 3)
    service.run([(20, 0.5, 1.0), (2, 3.0, 1.0), (20, 0.5, 1.0)])
    assert service.switches == []
    service.run([(60, 3.0, 0.5)])
    assert service.num_prefill == 3
    began = service.now
    service.run([(100, 0.5, 0.7)])
    assert service.num_prefill == 1, "the split of the pools"
    assert service.switches[-2][0] - began >= CONFIG.return_seconds


def test_prompts_may_move_to_decode_workers_altogether() -> None:
    config = CONFIG.model_copy(update={"min_prefill": 0})
    service = Service.start(1, 1, config)
    service.run([(30, 0.1, 1.7)])
    assert service.num_prefill == 0
    service.run([(100, 0.1, 0.5)])
    assert service.num_prefill == 1


def test_nothing_is_decided_before_all_workers_are_there() -> None:
    service = Service.start(1, 3)
    workers, service.roles = service.roles, {"p0": "prefill"}
    service.run([(20, 5.0, 5.0)])
    assert service.num_prefill == 1
    service.roles = workers
    service.run([(5, 0.5, 0.5)])
    assert service.switches == []


def test_a_prefill_worker_takes_the_place_of_the_last_decode_worker() -> None:
    service = Service.start(2, 1)
    service.run([(10, 1.0, 0.5)])
    del service.roles["d0"]
    began = service.now
    service.run([(10, 1.0, 0.5)])
    assert sorted(service.roles.values()) == ["decode", "prefill"]
    (time, _), *_ = [each for each in service.switches if each[1] < 0]
    assert time - began <= 5 + 2 * TICK, "as soon as it is silent"
    service.roles["d0"] = "decode"  # its replacement
    service.run([(60, 1.0, 0.5)])
    assert service.num_prefill == 2


def test_a_worker_that_stays_away_does_not_stop_the_decisions(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As when the directory starts again while a machine is down: it has never seen all workers."""
    service = Service.start(1, 4)
    del service.roles["d3"]
    service.run([(110, 3.0, 0.5)])
    assert not service.switches, "the others may still load"
    service.run([(30, 3.0, 0.5)])
    assert service.num_prefill > 1
    assert caplog.text.count("role_scaling begins with 4 of 5 workers") == 1


def test_a_manual_switch_stays_until_the_load_or_the_way_back_changes_it() -> None:
    service = Service.start(2, 2)
    service.run([(10, 0.5, 0.5)])
    service.roles["p0"] = "decode"
    service.run([(30, 0.5, 0.5)])
    assert service.num_prefill == 1
    service.run([(30, 0.5, 0.5)])
    assert service.num_prefill == 2


def test_a_worker_that_cannot_switch_is_not_waited_for_without_end() -> None:
    service = Service.start(1, 2)
    service.run([(10, 0.5, 0.5)])
    stuck = min(name for name, role in service.roles.items() if role == "decode")
    for _ in range(60):
        service.step(2.5, 0.3)
        service.roles[stuck] = "decode"
    assert service.scaler.report(service.now, stuck, "decode", {}) in ("decode", "prefill")
    del service.roles[stuck]
    service.run([(30, 0.5, 0.3)])
    assert sorted(service.roles.values()) == ["decode", "prefill"]


HARDWARE = Hardware(prefill_rate=1000, step_fixed=0.02, step_each=0.001)
SWITCHING = RoleScalingConfig(tpot_seconds=0.06, delay_seconds=3, return_seconds=60)


def burst() -> Sequence[Arrival]:
    """Returns chats, and for a minute also prompts with more tokens than one worker computes."""
    found = [
        *steady(2.0, 300, prompt=200, output=150),
        *steady(2.0, 60, prompt=1100, output=4, start=100),
    ]
    return sorted(found, key=lambda each: each.time)


def in_time(outcome: Outcome) -> float:
    return len(outcome.in_time(5.0, 0.08)) / len(outcome.numbers)


def test_a_burst_of_prompts_is_served_by_more_prefill_workers() -> None:
    fixed = Simulation(HARDWARE, 1, 3).run(burst())
    switching = Simulation(HARDWARE, 1, 3, roles=SWITCHING).run(burst(), extra_seconds=100)
    assert in_time(switching) > 0.9
    assert in_time(fixed) < 0.5
    assert max(number for _, number in switching.targets[PREFILL_POOL]) > 1
    assert switching.targets[PREFILL_POOL][-1][1] == 1
    assert switching.reversals(DECODE_POOL, SWITCHING.delay_seconds) == 0


@pytest.mark.parametrize("per_second", [0.5, 2.0, 4.0])
def test_roles_stay_at_a_constant_load(per_second: float) -> None:
    arrivals = list(steady(per_second, 300, prompt=300, output=100))
    outcome = Simulation(HARDWARE, 2, 2, roles=SWITCHING).run(arrivals)
    assert len(outcome.targets[PREFILL_POOL]) <= 2, outcome.targets
