"""`tandem plan service`: the planner on a profile of known costs."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cluster.cli.main import app
from tandem.cluster.config import load_config
from tandem.cluster.planner import report
from tandem.cluster.planner.changes import (
    autoscaled,
    chain,
    least_seconds,
    mean_workers,
    parse_faults,
    with_faults,
)
from tandem.cluster.planner.profile import read_profile
from tandem.cluster.planner.report import verdict
from tandem.cluster.planner.search import (
    PlannedRun,
    Planner,
    RateResult,
    SplitPlan,
    choose,
    list_splits,
    rate_bound,
)
from tandem.cluster.planner.site import (
    ArithmeticSite,
    MeasuredSite,
    Site,
    Split,
    check_workload,
)
from tandem.cluster.planner.workload import Objective, PlannedWorkload
from tandem.cluster.sim.cost import StepWork
from tandem.cluster.sim.result import SimulationResult
from tandem.cluster.sim.service import Resize
from tandem.cluster.sim.simulate import simulate
from tandem.cluster.traces.read import TracedRequest
from tandem.proto.errors import InvalidArgument
from tandem.tests.bench.engine.shapes import SHAPES, cost_of
from tandem.tests.profiles import make_profile
from tandem.tests.tiny_decoders import make_tiny_decoder
from tandem.workers.kv_cache.layout import KvLayout, LayerGeometry
from tandem.workers.model.costs.inference import InferenceCost
from tandem.workers.model.costs.roofline import DEVICES
from tandem.workers.model.footprint import kv_layout, memory_budget

MODEL = "smollm2-135m-instruct"


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(make_profile(1, 2).model_dump_json())
    return path


def run(*args: str) -> str:
    result = CliRunner().invoke(app, ["plan", "service", MODEL, *args])
    assert result.exception is None, result.output
    return result.stdout


WORKLOAD = ("--input-len", "128", "--output-len", "8", "--requests", "20", "--rate", "2")
SLO = ("--slo", "ttft=1s,tpot=60ms")


def test_a_plan_is_printed_and_written(profile_file: Path, tmp_path: Path) -> None:
    found, written = tmp_path / "plan.json", tmp_path / "service.yaml"
    files = ("--json", str(found), "--write", str(written))
    text = run(*SLO, *WORKLOAD, "--profile", str(profile_file), "--devices", "1", *files)
    sentence, source, *_ = text.splitlines()
    assert sentence.startswith("together on 1: meets TTFT 1000 ms and TPOT 60 ms for 95% of the")
    assert source.startswith("measured on a processor, 2026-11-27, commit abcdef0; leave-one-out")
    plan = json.loads(found.read_text())
    assert plan["verdict"] == sentence
    (split,) = plan["splits"]
    assert (split["prefill"], split["decode"]) == (0, 1)
    assert 2 < split["knee"] <= split["bound"]
    assert len(plan["requests"]) == 20
    # A chunk takes 62 ms and the router 1 ms.
    assert plan["requests"][0]["timeline"]["ttft_seconds"] >= 0.06
    assert set(plan["sensitivity"]) == {
        f"{what} {sign}10%" for what in ("lengths", "rate", "step time") for sign in "-+"
    }
    config = load_config(written)
    assert (config.model, config.prefill.replicas, config.decode.replicas) == (MODEL, 0, 1)


def plan_of(prefill: int, decode: int, knee: float, at_rate: RateResult | None) -> SplitPlan:
    return SplitPlan(
        split=Split(prefill, decode),
        num_devices=prefill + decode,
        bound=9.0,
        knee=knee,
        at_rate=at_rate,
    )


def outcome(attainment: float, *, is_saturated: bool = False) -> RateResult:
    result = SimulationResult(
        requests=(), workers=(), seconds=1.0, router_busy_share=0.0, queue_seconds={}
    )
    return RateResult(rate=2.0, attainment=attainment, is_saturated=is_saturated, result=result)


OBJECTIVE = Objective(limits={"ttft": 1000.0}, attainment=0.95)


def test_the_cheapest_split_that_meets_the_objective_is_chosen() -> None:
    plans = [
        plan_of(0, 1, 1.5, outcome(0.9)),
        plan_of(0, 2, 4.0, outcome(0.99)),
        plan_of(1, 1, 5.0, outcome(0.96)),
        plan_of(1, 2, 7.0, outcome(1.0)),
        plan_of(2, 1, 3.0, outcome(1.0, is_saturated=True)),
    ]
    chosen = choose(plans, OBJECTIVE)
    assert chosen is plans[2]
    assert verdict(plans, chosen, 2.0, OBJECTIVE) == (
        "1 + 1: meets TTFT 1000 ms for 95% of the requests up to 5 requests/s; together on 2 up to "
        "4, 20% less (1 + 1: its prefill pool 0% and its decode pool 0% busy)"
    )
    assert choose(plans[:1], OBJECTIVE) is None
    assert "the best, together on 1, meets it up to 1.5 requests/s" in verdict(
        plans[:1], None, 2.0, OBJECTIVE
    )
    assert "at any rate" in verdict([plan_of(0, 1, 0.0, None)], None, 2.0, OBJECTIVE)


def test_workers_that_die_and_autoscaling_are_simulated(profile_file: Path, tmp_path: Path) -> None:
    found = tmp_path / "plan.json"
    text = run(
        *SLO,
        *("--input-len", "128", "--output-len", "8", "--requests", "30", "--rate", "2"),
        *("--profile", str(profile_file), "--devices", "2", "--json", str(found)),
        *("--faults", "kill decode every 4s", "--restart", "2", "--autoscale"),
    )
    (faults,) = (line for line in text.splitlines() if line.startswith("faults: "))
    assert re.match(r"faults: [2-4] workers die in \d+ s of .+: attainment ", faults)
    assert "; without faults attainment 100.0%" in faults
    (scaled,) = (line for line in text.splitlines() if line.startswith("autoscaled: "))
    assert "fewer worker hours than 2" in scaled
    scaling = json.loads(found.read_text())["autoscaled"]
    numbers = [number for _, number in scaling["sizes"]["decode"]]
    assert numbers[0] == 1
    assert 0 in numbers  # the only worker dies, because faults hit autoscaled pools as well
    assert max(numbers) <= 2
    assert sum(scaling["mean_workers"].values()) == pytest.approx(2 * (1 - scaling["saved_share"]))


def test_faults_are_repeated_until_the_last_request() -> None:
    (every, once) = parse_faults(["kill decode every 10s,  kill prefill at 25s"])
    assert parse_faults(["kill decode every 10s", "kill prefill at 25s"]) == [every, once]
    assert (every.role, every.times(35.0)) == ("decode", [10.0, 20.0, 30.0])
    assert (once.role, once.times(35.0), once.times(20.0)) == ("prefill", [25.0], [])
    assert (every.times(30.0), once.times(25.0)) == ([10.0, 20.0], [])  # before the end
    service, _ = MeasuredSite(make_profile(1)).service(Split(0, 1))
    changed = with_faults([every, once], 5.0)(service, 26.0)
    assert [(each.role, each.time) for each in changed.faults] == [
        ("decode", 10.0),
        ("decode", 20.0),
    ]


@pytest.mark.parametrize(
    ("rules", "seconds"),
    [
        ([], 0.0),
        (["kill decode at 5s"], 5.0 + 30.0),
        (["kill decode every 5s"], 10.0 + 30.0),
        (["kill decode every 60s, kill prefill at 90s"], 120.0 + 30.0),
    ],
)
def test_requests_arrive_until_the_workers_have_started_again(
    rules: list[str], seconds: float
) -> None:
    assert least_seconds(parse_faults(rules), 30.0) == seconds


def test_requests_arrive_until_workers_have_died_at_any_rate() -> None:
    rules = parse_faults(["kill decode every 1s", "kill prefill at 2s"])
    seconds = least_seconds(rules, 0.5)
    assert seconds == 2.5
    planner = Planner(
        MeasuredSite(make_profile(1, 2)),
        PlannedWorkload.poisson(4.0, 16, 2, 10, seed=0),
        OBJECTIVE,
        change=with_faults(rules, 0.5),
        least_seconds=seconds,
    )
    for rate in (4.0, 40.0):
        result = planner.run(PlannedRun(Split(0, 2), rate)).result
        ends = [each.ended for each in result.workers if each.ended is not None]
        assert sorted(ends)[:2] == pytest.approx([1.0, 2.0])
        assert result.requests[-1].record.started == pytest.approx(seconds, abs=1.0)


def test_an_autoscaled_service_keeps_its_faults_and_has_the_objective_as_target() -> None:
    service, _ = MeasuredSite(make_profile(1, 2)).service(Split(1, 1))
    faults = with_faults(parse_faults(["kill prefill at 9s"]), 5.0)
    changed = chain(faults, autoscaled(5.0, 60.0))(service, 26.0)
    assert [each.role for each in changed.faults] == ["prefill"]
    assert changed.prefill is not None
    assert changed.prefill.scaling is not None
    assert changed.decode.scaling is not None
    assert changed.prefill.scaling.tpot_seconds is None
    assert changed.decode.scaling.tpot_seconds == 0.06
    unreachable = autoscaled(5.0, 90_000.0)(service, 26.0).decode.scaling
    assert unreachable is not None
    assert unreachable.tpot_seconds is None


def test_a_worker_that_starts_counts_as_a_worker() -> None:
    service, costs = MeasuredSite(make_profile(1)).service(Split(0, 1))
    # The second worker is ready at 40 s. The start of the third one is given up after 5 s, and that
    # of the fourth one has not ended.
    sizes = ((10.0, 2), (60.0, 3), (65.0, 2), (90.0, 3))
    changed = replace(
        service,
        decode=replace(service.decode, start_seconds=30.0),
        resizes=tuple(Resize(time=time, role="decode", workers=number) for time, number in sizes),
    )
    requests = PlannedWorkload.poisson(0.1, 16, 2, 11, seed=0).requests
    result = simulate(changed, requests, costs)
    end = result.seconds
    assert 100.0 < end < 101.0
    assert len(result.workers) == 2
    expected = end + (end - 10.0) + 5.0 + (end - 90.0)
    assert mean_workers(result)["decode"] == pytest.approx(expected / end)


class KnownKnees(Planner):
    """Knows the knee of each split on GPUs, and records the simulations that it is asked for.

    The bounds in requests/s: 18 for each worker together, 19.5 for each prefill worker.
    """

    def __init__(self, rate: float, knees: Mapping[Split, float]) -> None:
        site = MeasuredSite(make_profile(1).model_copy(update={"device": "cuda"}))
        super().__init__(site, PlannedWorkload.poisson(rate, 128, 8, 20, seed=0), OBJECTIVE)
        self.knees = knees
        self.simulated: list[tuple[Split, float]] = []

    def run(self, planned: PlannedRun) -> RateResult:
        split, rate = planned.split, planned.rate
        self.simulated.append((split, rate))
        return replace(outcome(1.0 if rate <= self.knees.get(split, 0.0) else 0.0), rate=rate)

    def found(self, num_devices: int) -> dict[Split, float | None]:
        plans = self.search(list_splits(num_devices, [1]))
        assert len(set(self.simulated)) == len(self.simulated)
        return {plan.split: plan.knee for plan in plans}


def near(knee: float) -> object:
    return pytest.approx(knee, rel=0.031)


def test_only_the_splits_of_the_fewest_sufficient_devices_are_searched() -> None:
    planner = KnownKnees(10.0, {Split(0, 1): 8.0, Split(0, 2): 20.0, Split(1, 1): 9.0})
    assert planner.found(3) == {
        Split(0, 1): None,
        Split(0, 2): near(20.0),
        Split(1, 1): near(9.0),
    }
    assert len([split for split, _ in planner.simulated if split == Split(0, 1)]) == 1


def test_a_split_that_another_one_dominates_is_not_searched() -> None:
    knees = {Split(0, 3): 6.0, Split(2, 1): 7.0, Split(1, 2): 5.5}
    planner = KnownKnees(5.0, knees)
    found = planner.found(3)
    assert found[Split(0, 3)] == near(6.0)
    assert found[Split(2, 1)] == near(7.0)
    assert found[Split(1, 2)] is None
    rates = [rate for split, rate in planner.simulated if split == Split(1, 2)]
    assert rates == [near(5.0), found[Split(2, 1)]]
    fast = KnownKnees(30.0, {Split(0, 3): 50.0, Split(2, 1): 35.0})
    assert fast.found(3)[Split(2, 1)] == near(35.0)
    assert Split(1, 2) not in {split for split, _ in fast.simulated}  # its bound is below both


def test_without_a_sufficient_split_the_best_knee_of_all_is_found() -> None:
    planner = KnownKnees(100.0, {Split(0, 1): 18.0, Split(0, 2): 30.0, Split(1, 1): 12.0})
    assert planner.found(2) == {
        Split(0, 1): None,
        Split(0, 2): near(30.0),
        Split(1, 1): near(12.0),
    }


def test_a_knee_far_below_the_bound_is_found_if_the_objective_is_met_at_the_rate() -> None:
    planner = KnownKnees(0.1, {Split(0, 1): 0.12})
    assert planner.plan(Split(0, 1)).knee == near(0.12)
    assert KnownKnees(0.1, {}).plan(Split(0, 1)).knee == 0.0


def test_a_rate_is_simulated_once() -> None:
    workload = PlannedWorkload.poisson(1.0, 128, 8, 10, seed=0)
    planner = Planner(MeasuredSite(make_profile(1)), workload, OBJECTIVE)
    planned = PlannedRun(Split(0, 1), 2.0)
    assert planner.run(planned) is planner.run(planned)
    assert planner.run(planned) is not planner.run(planned._replace(lengths=1.1))


TYPICAL_TOKENS = 4000


@cache
def shape_cost(shape: str) -> InferenceCost:
    """Returns the cost of one of SHAPES; windows: tiny with a window in one of its two layers."""
    config = SHAPES["tiny" if shape == "windows" else shape]
    if shape == "windows":
        layers = (config.layers[0], replace(config.layers[1], window=1024))
        config = replace(config, layers=layers)
    return cost_of(config, "bfloat16")


def arithmetic_site(
    weight_bytes: int | None = None, cost: InferenceCost | None = None
) -> ArithmeticSite:
    """Returns H100s for a model, by default a tiny one; its weights may be said to take other
    bytes.
    """
    cost = cost or shape_cost("tiny")
    if weight_bytes is not None:
        cost = replace(cost, sizes=replace(cost.sizes, weight_bytes=weight_bytes))
    config = load_config(overrides={"model": MODEL, "device": "cuda"})
    return ArithmeticSite(
        config=config,
        cost=cost,
        name="h100",
        device=DEVICES["h100"],
        typical_tokens=TYPICAL_TOKENS,
    )


def test_ranks_that_do_not_hold_the_weights_or_the_longest_sequence_are_known() -> None:
    site = arithmetic_site(100 * 10**9)
    assert [site.holds(tp, 1) for tp in (1, 2, 4)] == [False, True, True]
    with pytest.raises(InvalidArgument, match=r"^--tp: 1 x 80 GB do not hold the weights, 100 GB"):
        site.service(Split(0, 1))
    memory = memory_budget(80 * 10**9, 1.0, site.config.decode.gpu_memory_utilization)
    tight = arithmetic_site(memory - 1_000_000)
    service, costs = tight.service(Split(0, 1))
    assert 16 <= service.context_tokens < 8192
    longer = PlannedWorkload.poisson(1.0, service.context_tokens, 1, 10, seed=0)
    assert tight.holds(1, longer.longest - 1)
    assert not tight.holds(1, longer.longest)
    with pytest.raises(InvalidArgument, match=f"holds at most {service.context_tokens:,}"):
        check_workload(Split(0, 1), service, costs, longer)


@pytest.mark.parametrize("window", [None, 1024])
def test_windows_let_a_device_hold_longer_sequences(window: int | None) -> None:
    """The cache has 10 MB, where 813 blocks of 6 full layers hold 13,008 tokens."""
    config = arithmetic_site().config
    memory = memory_budget(80 * 10**9, 1.0, config.decode.gpu_memory_utilization)
    site = arithmetic_site(memory - 10**7)
    full = site.cost.config.layers[0]
    layers = (full, *[replace(full, window=window)] * 5)
    layout = KvLayout(layers=layers, dtype="bfloat16", model="")
    site = replace(site, cost=replace(site.cost, layout=layout))
    assert site.holds(1, 13_008)
    assert site.holds(1, 40_000) == (window is not None)
    service, _ = site.service(Split(0, 1))
    assert [table.window for table in service.tables] == ([None, window] if window else [None])
    assert sum(table.token_bytes for table in service.tables) == layout.bytes_per_token
    assert service.context_tokens == site.cost.config.max_position_embeddings


def test_a_split_that_serving_refuses_is_not_planned() -> None:
    site = arithmetic_site()
    config = replace(site.cost.config, has_tp_plan=False)
    site = replace(site, cost=replace(site.cost, config=config))
    assert site.holds(1, 1)
    with pytest.raises(InvalidArgument, match=r"^--tp: 2: transformers has no plan .*; use 1$"):
        site.holds(2, 1)


@pytest.mark.parametrize("site", [MeasuredSite(make_profile(1, 2)), arithmetic_site()])
def test_only_without_prefill_workers_simulated_workers_take_whole_chunks_in_bursts(
    site: Site,
) -> None:
    """As real ones do."""
    found = [site.service(Split(num_prefill, 1))[0].decode.budgets for num_prefill in (0, 1)]
    assert [budgets.burst_chunks for budgets in found] == [True, False]


def test_ranks_that_do_not_divide_the_heads_are_named() -> None:
    site = arithmetic_site()
    with pytest.raises(InvalidArgument, match=r"^--tp: 3 does not divide the model's 4 "):
        site.service(Split(0, 1, tp=3))
    with pytest.raises(InvalidArgument, match=r"^--tp: 3 does not divide"):
        site.holds(3, 1)


def test_a_prompt_of_a_device_computes_the_logits_of_its_last_token_only() -> None:
    site = arithmetic_site()
    _, costs = site.service(Split(0, 1))
    work = StepWork(sequences=1) + StepWork.of_prompt(0, 1000)
    seconds = costs.prefill.seconds(replace(work, context_tokens=0)) - costs.prefill.fixed
    flops = site.cost.prefill(1000).flops
    assert seconds == pytest.approx(flops / (0.5 * DEVICES["h100"].roofline.flops_per_s), rel=0.01)


@pytest.mark.parametrize("shape", ["tiny", "windows", "qwen3-30b-a3b"])
def test_no_step_of_a_device_is_shorter_than_the_floor_of_its_cost(shape: str) -> None:
    site = arithmetic_site(cost=shape_cost(shape))
    _, costs = site.service(Split(0, 1))
    floor = site.device.roofline.seconds
    for batch, context in product((1, 4, 32, 256), (1, 100, 1000, 8000)):
        decode = StepWork(sequences=batch, context_tokens=batch * context)
        assert costs.decode.seconds(decode) >= floor(site.cost.decode(context, batch))
    for cached, new in product((0, 100, 5000), (1, 16, 512, 2048)):
        prompt = StepWork(sequences=1) + StepWork.of_prompt(cached, new)
        assert costs.prefill.seconds(prompt) >= floor(site.cost.prefill(cached + new, cached))


@pytest.mark.parametrize("shape", ["tiny", "windows", "qwen3-30b-a3b"])
@pytest.mark.parametrize("batch", [1, 32, 256])
def test_a_typical_decode_of_a_device_has_the_work_of_its_cost(shape: str, batch: int) -> None:
    site = arithmetic_site(cost=shape_cost(shape))
    cost, roofline = site.cost, site.device.roofline
    _, costs = site.service(Split(0, 1))
    work = StepWork(sequences=batch, context_tokens=batch * TYPICAL_TOKENS)
    num_bytes = cost.decode(TYPICAL_TOKENS, batch).num_bytes - cost.decode(0, 0).num_bytes
    assert costs.decode.seconds(work) - costs.decode.fixed == pytest.approx(
        num_bytes / (0.75 * roofline.bytes_per_s)
        + cost.decode(0, batch).flops / (0.5 * roofline.flops_per_s)
    )


def test_ranks_that_hold_the_same_keys_each_read_them() -> None:
    """By hand: two of 4 ranks hold each of 2 KV heads, and every rank holds a latent row."""
    tiny = shape_cost("tiny")
    latent = LayerGeometry(num_heads=4, num_kv_heads=1, head_dim=576, value_dim=512)
    config = replace(tiny.config, layers=(latent, latent))
    latents = replace(tiny, config=config, layout=kv_layout(config, "bfloat16"))
    for cost, copies in ((tiny, 2), (latents, 4)):
        site = arithmetic_site(cost=cost)
        alone, split = (site.service(Split(0, 1, tp=tp))[1].decode for tp in (1, 4))
        seconds = copies * alone.each_context_token / (4 * 0.9**2)
        assert split.each_context_token == pytest.approx(seconds)
        assert split.each_prompt_token == pytest.approx(alone.each_prompt_token / (4 * 0.9**2))


def test_the_bound_counts_the_experts_of_full_batches() -> None:
    workload = PlannedWorkload.poisson(1.0, 8, 101, 10, seed=0)
    service, costs = MeasuredSite(make_profile(1)).service(Split(0, 1))
    decode = replace(costs.decode, expert_seconds=1.0, chosen_share=0.5)
    most = service.decode.budgets.max_sequences
    dense, routed = (
        1 / rate_bound(service, replace(costs, decode=each), workload)
        for each in (costs.decode, decode)
    )
    assert routed - dense == pytest.approx(100 * (1 - 0.5**most) / most)


@pytest.mark.parametrize(
    ("prefill", "num_input", "count"), [(0, 128, 60), (1, 128, 60), (1, 64, 400)]
)
def test_no_simulation_exceeds_the_arithmetic_bound(
    prefill: int, num_input: int, count: int
) -> None:
    """At twice the bound the service is saturated, and its requests end at the bound's rate at
    most.
    """
    site = MeasuredSite(make_profile(1, 2))
    workload = PlannedWorkload.poisson(1.0, num_input, 8, count, seed=0)
    planner = Planner(site, workload, OBJECTIVE)
    split = Split(prefill, 2 - prefill)
    bound = rate_bound(*site.service(split), workload)
    found = planner.run(PlannedRun(split, 2 * bound))
    assert found.is_saturated
    assert len(workload.requests) / found.result.seconds < bound


def test_decode_workers_raise_the_bound_of_short_prompts() -> None:
    bounds = {}
    for num_input in (64, 65):
        workload = PlannedWorkload.poisson(1.0, num_input, 2, 60, seed=0)
        service, costs = MeasuredSite(make_profile(4)).service(Split(1, 3))
        bounds[num_input] = rate_bound(service, costs, workload)
    assert bounds[64] > 2 * bounds[65]


def test_a_rate_far_above_the_knee_hides_no_knee() -> None:
    planner = KnownKnees(10_000.0, {Split(0, 1): 0.5})
    assert planner.plan(Split(0, 1)).knee == near(0.5)


def test_the_change_of_lengths_is_that_of_whole_blocks() -> None:
    def workload(block_tokens: int, hashes: tuple[int, ...]) -> PlannedWorkload:
        request = TracedRequest(
            time=0.0,
            input_length=1000,
            output_length=100,
            block_hashes=hashes,
            block_tokens=block_tokens,
        )
        return PlannedWorkload([request, replace(request, time=1.0)])

    assert workload(1, ()).length_change(1.1) == pytest.approx(0.1)
    assert workload(8, tuple(range(125))).length_change(1.1) == pytest.approx(0.125, abs=0.001)
    assert workload(4, tuple(range(250))).length_change(0.9) == 0.0


def test_an_objective_is_shown_as_it_was_given() -> None:
    assert "for 99.9% of" in str(replace(OBJECTIVE, attainment=0.999))


def test_longer_steps_and_prompts_lower_the_attainment() -> None:
    planner = Planner(
        MeasuredSite(make_profile(1)),
        PlannedWorkload.poisson(1.0, 128, 8, 40, seed=0),
        Objective(limits={"ttft": 120.0}),
    )
    split = Split(0, 1)
    usual = planner.run(PlannedRun(split, 2.0)).attainment
    assert usual > 0.8
    assert planner.run(PlannedRun(split, 2.0, step_time=2.0)).attainment < usual
    assert planner.run(PlannedRun(split, 2.0, lengths=2.0)).attainment < usual


def test_work_outside_the_measured_grid_is_refused() -> None:
    site = MeasuredSite(make_profile(1))
    with pytest.raises(InvalidArgument, match=r"outside the measured grid.*context-tokens 5128"):
        Planner(site, PlannedWorkload.poisson(1.0, 5000, 128, 10, seed=0), OBJECTIVE).plan(
            Split(0, 1)
        )


def test_what_is_not_measured_is_named(profile_file: Path, tmp_path: Path) -> None:
    profile = make_profile(1, 2)
    with pytest.raises(InvalidArgument, match=r"3 workers .* only 1 and 2.*--workers 3"):
        MeasuredSite(profile).service(Split(1, 2))
    with pytest.raises(InvalidArgument, match="--tp 2"):
        MeasuredSite(profile).service(Split(0, 1, tp=2))
    without = profile.model_copy(update={"transfer": None})
    with pytest.raises(InvalidArgument, match="no measured transfer"):
        MeasuredSite(without).service(Split(1, 1))
    broken = tmp_path / "broken.json"
    broken.write_text(profile_file.read_text().replace("token_bytes", "bytes"))
    with pytest.raises(InvalidArgument, match=r"broken\.json: token_bytes: missing"):
        read_profile(broken)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--slo", "", *WORKLOAD), "--slo: must have a limit"),
        (("--slo", "ttft=1h", *WORKLOAD), "--slo: ttft must be a time"),
        ((*SLO, "--profile", "x.json"), "give --rate"),
        ((*SLO, "--trace", "x.csv", "--rate", "0"), "--rate: must be above 0 requests/s"),
        (("--slo", "ttft=1s,ttft=2s", *WORKLOAD), "--slo: ttft is given twice"),
        ((*SLO, *WORKLOAD, "--speed", "0.5"), "--trace: --length-scale, --speed and"),
        ((*SLO, *WORKLOAD, "--spread-arrivals"), "and --spread-arrivals need --trace"),
        ((*SLO, *WORKLOAD, "--length-scale", "1/8"), "and --spread-arrivals need --trace"),
        ((*SLO, *WORKLOAD), "give one of --profile, --measure and --device"),
        ((*SLO, *WORKLOAD, "--device", "h101"), "--device"),
        ((*SLO, *WORKLOAD, "--device", "h100", "--faults", "kill router at 3s"), "--faults: must"),
        ((*SLO, *WORKLOAD, "--faults", "kill decode every 0s"), "a time from 1s to 86400s"),
        (
            (*SLO, "--rate", "90", "--faults", "kill decode every 9000s"),
            "requests arrive until workers have died and started again; the maximum is 1,000,000",
        ),
        ((*SLO, *WORKLOAD, "--restart", "soon"), "--restart: must be a time from 0s to 86400s"),
        ((*SLO, *WORKLOAD, "--json", "/tmp"), "--json: /tmp cannot be written: it is a folder"),
        ((*SLO, *WORKLOAD, "--device", "h100", "--tp", "0"), "--tp: must be numbers"),
        ((*SLO, *WORKLOAD, "--measure", "1s"), "--measure: must be a time from 5s to 86400s"),
        ((*SLO, *WORKLOAD, "--measure", "9s", "--devices", "3"), "--devices: must be at most 2"),
        ((*SLO, *WORKLOAD, "--measure", "9s", "--tp", "2"), "--tp: must be 1 with --measure"),
        ((*SLO, *WORKLOAD, "--attainment", "1.5", "--device", "h100"), "--attainment"),
    ],
)
def test_wrong_options_are_named(args: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["plan", "service", MODEL, *args])
    assert message in str(result.exception)


def test_a_model_that_gpus_do_not_run_is_not_planned_for_them(tmp_path: Path) -> None:
    folder = make_tiny_decoder(tmp_path, "lfm2")
    args = ["plan", "service", str(folder), *SLO, *WORKLOAD, "--device", "h100"]
    result = CliRunner().invoke(app, args)
    assert str(result.exception) == (
        "--device: cuda: models that keep states run on cpu only; Lfm2ForCausalLM keeps states; "
        "plan for CPUs with --measure or --profile"
    )


def test_a_missing_package_is_named_before_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["plan", "service", MODEL, *SLO, *WORKLOAD, "--plot", "p.png"])
    assert str(result.exception) == "--plot: needs matplotlib: pip install 'tandem-llm[bench]'"


def test_lengths_that_are_not_measured_are_left_out(profile_file: Path, tmp_path: Path) -> None:
    found = tmp_path / "plan.json"
    workload = ("--input-len", "4200", "--output-len", "2", "--requests", "10", "--rate", "0.05")
    options = ("--profile", str(profile_file), "--devices", "1", "--json", str(found))
    slo = ("--slo", "ttft=60s")
    result = CliRunner().invoke(app, ["plan", "service", MODEL, *slo, *workload, *options])
    assert result.exception is None, result.output
    assert "without lengths +10%: --profile: steps of together on 1 are outside" in result.stderr
    sensitivity = json.loads(found.read_text())["sensitivity"]
    assert "lengths -10%" in sensitivity
    assert "lengths +10%" not in sensitivity


def test_equal_numbers_of_ranks_are_planned_once(profile_file: Path, tmp_path: Path) -> None:
    found = tmp_path / "plan.json"
    options = ("--profile", str(profile_file), "--devices", "1", "--json", str(found))
    run(*SLO, *WORKLOAD, *options, "--tp", "1,1")
    assert len(json.loads(found.read_text())["splits"]) == 1


def test_only_the_measured_numbers_of_workers_are_planned(tmp_path: Path) -> None:
    path, found = tmp_path / "profile.json", tmp_path / "plan.json"
    path.write_text(make_profile(2).model_dump_json())
    run(*SLO, *WORKLOAD, "--profile", str(path), "--json", str(found))
    splits = json.loads(found.read_text())["splits"]
    assert {(each["prefill"], each["decode"]) for each in splits} == {(0, 2), (1, 1)}
    args = [*SLO, *WORKLOAD, "--profile", str(path), "--devices", "2"]
    result = CliRunner().invoke(app, ["plan", "service", MODEL, *args])
    assert "a split of 1 worker is not measured, only 2" in str(result.exception)


def test_the_ranks_of_a_profile_are_the_default(tmp_path: Path) -> None:
    path, found = tmp_path / "profile.json", tmp_path / "plan.json"
    profile = make_profile(1).model_copy(update={"tp": 2})
    path.write_text(profile.model_dump_json())
    args = (*SLO, *WORKLOAD, "--profile", str(path))
    run(*args, "--json", str(found))
    assert [each["tp"] for each in json.loads(found.read_text())["splits"]] == [2]
    # On CPUs, --devices counts workers, not ranks.
    run(*args, "--devices", "1", "--json", str(found))
    assert len(json.loads(found.read_text())["splits"]) == 1
    result = CliRunner().invoke(app, ["plan", "service", MODEL, *args, "--tp", "1"])
    assert "--tp: 1 is not measured, only 2" in str(result.exception)


def test_workers_on_cpus_share_one_machine() -> None:
    site = MeasuredSite(make_profile(1, 2))
    assert [site.num_devices(split) for split in list_splits(2, [1])] == [1, 1, 1]
    on_gpus = MeasuredSite(make_profile(1).model_copy(update={"device": "cuda"}))
    assert [on_gpus.num_devices(split) for split in list_splits(2, [1])] == [1, 2, 2]


def test_splits() -> None:
    assert list_splits(2, [1]) == [Split(0, 1), Split(0, 2), Split(1, 1)]
    assert list_splits(4, [2]) == [Split(0, 1, 2), Split(0, 2, 2), Split(1, 1, 2)]
    assert list_splits(1, [2]) == []
