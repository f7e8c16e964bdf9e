"""`tandem plan service`: finds the workers that meet an objective, on the simulator.

Starts a service only to measure this machine (`--measure`).
"""

import json
import math
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import yaml

from ...proto.errors import InvalidArgument
from ...workers.model.costs.roofline import DEVICES
from ..arithmetic import make_cost
from ..bench.options import parse_slo
from ..cli.options import check_choice
from ..config import TandemConfig, load_config
from ..explain.cost import read_model_config
from ..sim.service import SimulatedService
from ..tables import table_console
from ..traces.prompts import describe_trace
from ..traces.read import TraceScale, parse_scale, read_trace
from .changes import Change, autoscaled, mean_workers, parse_faults, with_faults
from .profile import Profile, read_profile
from .report import (
    autoscaling_line,
    draw_rates,
    fault_line,
    plan_json,
    sensitivity_table,
    split_table,
    use_lines,
    verdict,
)
from .search import Planner, RateResult, SplitPlan, best_knee, choose, list_splits, other_kind
from .site import MEMORY_GB, ArithmeticSite, MeasuredSite, Site
from .workload import Objective, PlannedWorkload

_MAX_REQUESTS: Final = 1_000_000
_PLOTTED: Final = 6  # rates of each curve
_CHANGE: Final = 0.1


def service_command(
    model: Annotated[str, typer.Argument(help="A model, named as for `tandem serve`.")],
    slo: Annotated[
        str, typer.Option(help="The objective of each request, such as ttft=1s,tpot=60ms.")
    ],
    attainment: Annotated[
        float, typer.Option(help="The share of the requests that must meet it.")
    ] = 0.95,
    rate: Annotated[
        float | None, typer.Option(help="Requests/s, of a Poisson process; of a trace: its own.")
    ] = None,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 512,
    output_len: Annotated[int, typer.Option(help="Tokens of an output.", min=1)] = 128,
    trace: Annotated[
        Path | None, typer.Option(help="A trace, as for `tandem bench --trace`.")
    ] = None,
    length_scale: Annotated[str, typer.Option(help="A factor for the trace's lengths.")] = "1",
    speed: Annotated[float, typer.Option(help="Divides the trace's times.")] = 1.0,
    requests: Annotated[
        int, typer.Option(help="Simulated requests; of a trace: its first ones.")
    ] = 400,
    devices: Annotated[
        int | None, typer.Option(help="Devices at most; on CPUs: workers, which share the machine.")
    ] = None,
    tp: Annotated[str, typer.Option(help="Ranks of a worker, such as 1,2,4.")] = "1",
    profile: Annotated[Path | None, typer.Option(help="A file of `tandem plan measure`.")] = None,
    measure: Annotated[
        str | None, typer.Option(help="Measure this machine first, for a time such as 60s.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help=f"Arithmetic for a device: {', '.join(DEVICES)}.")
    ] = None,
    faults: Annotated[
        str | None,
        typer.Option(
            help="Workers that die, such as 'kill decode every 60s, kill prefill at 30s'."
        ),
    ] = None,
    restart: Annotated[
        float, typer.Option(help="Seconds in which a worker starts.", min=0.0, max=86_400.0)
    ] = 30.0,
    autoscale: Annotated[
        bool,
        typer.Option("--autoscale", help="Also simulate the workers as an autoscaled maximum."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of arrivals and prompts.", min=0)] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="A file for JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A file for a PNG.")] = None,
    write: Annotated[
        Path | None, typer.Option(help="A file for the configuration of `tandem serve`.")
    ] = None,
) -> None:
    """Find the prefill and decode workers that serve MODEL at a rate within an objective.

    Simulates each split with the service's own routers and engines, on a virtual clock, with the
    costs of a profile, of a measurement, or of a device's data sheet. Also simulates the same
    workers together, without disaggregation, which can be the better choice. The knee of a split is
    the highest rate at which it meets the objective.
    """
    objective = Objective(limits=parse_slo(slo), attainment=attainment)
    if not objective.limits:
        raise InvalidArgument("must have a limit, such as ttft=1s", "--slo")
    _check_share("--attainment", attainment)
    if not 10 <= requests <= _MAX_REQUESTS:
        raise InvalidArgument(f"must be from 10 to {_MAX_REQUESTS}", "--requests")
    disturb = with_faults(parse_faults(faults), restart) if faults else _unchanged
    workload = _workload(rate, input_len, output_len, trace, length_scale, speed, requests, seed)
    site, most, tps, config = _site(model, profile, measure, device, devices, tp, workload)
    console = table_console()
    planner = Planner(
        site,
        workload,
        objective,
        seed=seed,
        change=disturb,
        report=lambda line: typer.echo(line, err=True),
    )
    plans = planner.search(list_splits(most, tps))
    if not plans:
        raise InvalidArgument(f"{tp} ranks need more devices than {most}", "--tp")
    chosen = choose(plans, objective)
    sentence = verdict(plans, chosen, workload.rate, objective)
    typer.echo(sentence)
    typer.echo(site.description)
    typer.echo(describe_trace(workload.requests))
    console.print(split_table(plans, workload.rate))
    sensitivity: dict[str, RateResult] = {}
    scaled: RateResult | None = None
    if chosen is not None and chosen.at_rate is not None:
        for line in use_lines(chosen.at_rate):
            typer.echo(line)
        if faults:
            _echo_faults(planner, chosen, chosen.at_rate)
        if autoscale:
            scaled = _autoscale(planner, chosen, autoscaled(restart))
        sensitivity = _sensitivity(planner, chosen)
        console.print(sensitivity_table(sensitivity))
    if json_file is not None:
        found = plan_json(
            plans,
            chosen,
            sensitivity,
            source=site.description,
            sentence=sentence,
            autoscaling=scaled,
        )
        json_file.write_text(json.dumps(found, indent=1) + "\n")
    if plot is not None:
        draw_rates(_curves(planner, plans, chosen), objective, plot)
    if write is not None:
        _write(write, config, chosen or best_knee(plans))


def _workload(
    rate: float | None,
    input_len: int,
    output_len: int,
    trace: Path | None,
    length_scale: str,
    speed: float,
    requests: int,
    seed: int,
) -> PlannedWorkload:
    if trace is None:
        if rate is None:
            raise InvalidArgument("give --rate, with --input-len and --output-len, or --trace")
        if not (0 < rate < math.inf):
            raise InvalidArgument("must be above 0 requests/s", "--rate")
        return PlannedWorkload.poisson(rate, input_len, output_len, requests, seed)
    if not (0 < speed < math.inf):
        raise InvalidArgument("must be above 0", "--speed")
    scale = TraceScale(parse_scale(length_scale), speed)
    workload = PlannedWorkload(read_trace(trace, scale)[:requests])
    if not workload.rate:
        raise InvalidArgument("has all its requests at one time", "--trace")
    return workload if rate is None else workload.at_rate(rate)


def _site(
    model: str,
    profile: Path | None,
    measure: str | None,
    device: str | None,
    devices: int | None,
    tp: str,
    workload: PlannedWorkload,
) -> tuple[Site, int, list[int], TandemConfig]:
    """Returns the site, its number of devices, the numbers of ranks, and a configuration."""
    if sum(each is not None for each in (profile, measure, device)) != 1:
        raise InvalidArgument("give one of --profile, --measure and --device")
    tps = _parse_tps(tp)
    if device is not None:
        check_choice("--device", device, DEVICES)
        config = load_config(overrides={"model": model, "device": "cuda"})
        site = ArithmeticSite(
            config=config,
            cost=make_cost(read_model_config(model), config.dtype, device_type="cuda"),
            name=device,
            device=DEVICES[device],
            memory_gb=MEMORY_GB[device],
        )
        return site, devices or 8, tps, config
    if profile is not None:
        found = read_profile(profile)
    else:
        assert measure is not None
        found = _measure(model, _parse_seconds(measure), workload)
    config = load_config(
        overrides={
            "model": model,
            "dtype": found.dtype,
            "quantization": found.quantization,
            "kv_cache_dtype": found.kv_cache_dtype,
            "device": found.device,
        }
    )
    found.check_model(config.served_name)
    most = devices or max(each.workers for each in found.workers) * found.tp
    return MeasuredSite(found), most, [found.tp] if tp == "1" else tps, config


def _measure(model: str, seconds: float, workload: PlannedWorkload) -> Profile:
    """Measures this machine, for sequences as long as the workload's."""
    from ..store.checked import checked_folder
    from .measure import measure_profile  # with torch, which takes a second

    config = load_config(overrides={"model": model})
    return measure_profile(
        config,
        checked_folder(config),
        workers=[1, 2],
        seconds=seconds,
        context_tokens=workload.longest,
        report=lambda line: typer.echo(line, err=True),
    )


def _unchanged(service: SimulatedService, workload: PlannedWorkload) -> SimulatedService:
    return service


def _echo_faults(planner: Planner, chosen: SplitPlan, disturbed: RateResult) -> None:
    """Prints what the faults cost at the workload's rate."""
    undisturbed = planner.run(chosen.split, disturbed.rate, change=_unchanged)
    num_faults = sum(
        each.ended is not None and each.ended < disturbed.result.seconds
        for each in disturbed.result.workers
    )
    typer.echo(fault_line(disturbed, undisturbed, num_faults))


def _autoscale(planner: Planner, chosen: SplitPlan, change: Change) -> RateResult:
    """Simulates the chosen workers as the maximum of autoscaled pools; prints the outcome."""
    found = planner.run(chosen.split, planner.workload.rate, change=change)
    mean = mean_workers(found.result)
    fixed = chosen.split.prefill + chosen.split.decode
    typer.echo(autoscaling_line(found, mean, fixed))
    return found


def _sensitivity(planner: Planner, chosen: SplitPlan) -> dict[str, RateResult]:
    """Returns the results of the chosen split if one thing changes."""
    rate = planner.workload.rate
    found = {}
    for sign in (-1, 1):
        factor = 1 + sign * _CHANGE
        change = f"{sign * _CHANGE:+.0%}"
        found[f"lengths {change}"] = planner.run(chosen.split, rate, lengths=factor)
        found[f"rate {change}"] = planner.run(chosen.split, factor * rate)
        found[f"step time {change}"] = planner.run(chosen.split, rate, step_time=factor)
    return dict(sorted(found.items()))


def _curves(
    planner: Planner, plans: list[SplitPlan], chosen: SplitPlan | None
) -> dict[str, list[RateResult]]:
    """Returns the results over the rate: of the best split, and of the best of the other kind."""
    best = chosen or best_knee(plans)
    other = other_kind(plans, best)
    shown = [best] if other is None else [best, other]
    top = max(each.knee or 0.0 for each in shown) or best.bound
    rates = [top * (number + 1) / (_PLOTTED - 1) for number in range(_PLOTTED)]
    return {str(each.split): [planner.run(each.split, rate) for rate in rates] for each in shown}


def _write(path: Path, config: TandemConfig, plan: SplitPlan) -> None:
    """Writes the configuration of a service with a plan's workers."""
    split = plan.split
    tree: dict[str, Any] = config.model_dump(exclude_unset=True, exclude_none=True)
    tree["prefill"] = {"replicas": split.prefill, "tp": split.tp}
    tree["decode"] = {"replicas": split.decode, "tp": split.tp}
    path.write_text(yaml.safe_dump(tree, sort_keys=False))


def _parse_tps(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(1 <= each <= 64 for each in found):
        raise InvalidArgument(f"must be numbers from 1 to 64, such as 1,2,4; got {text!r}", "--tp")
    return found


def _parse_seconds(text: str) -> float:
    try:
        return float(text.removesuffix("s"))
    except ValueError:
        raise InvalidArgument(f"must be a time such as 60s, got {text!r}", "--measure") from None


def _check_share(option: str, share: float) -> None:
    if not 0 < share < 1:
        raise InvalidArgument(f"must be between 0 and 1, got {share:g}", option)
