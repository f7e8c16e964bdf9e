"""`tandem plan service`: finds the workers that meet an objective, on the simulator."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import yaml

from ...proto.errors import InvalidArgument
from ...workers.model.costs.roofline import DEVICES
from ..cli.options import LengthScale, Speed, SpreadArrivals
from ..config import TandemConfig
from ..tables import table_console
from ..text_files import check_writable, write_text
from ..traces.prompts import describe_trace
from ..traces.read import TraceScale, parse_scale
from .changes import (
    FaultRule,
    autoscaled,
    chain,
    least_seconds,
    mean_workers,
    parse_faults,
    unchanged,
    with_faults,
)
from .report import (
    Autoscaling,
    autoscaling_line,
    check_plotting,
    draw_rates,
    fault_line,
    plan_json,
    sensitivity_table,
    split_table,
    use_lines,
    verdict,
)
from .search import (
    MAX_REQUESTS,
    PlannedRun,
    Planner,
    RateResult,
    SplitPlan,
    best_knee,
    choose,
    other_kind,
)
from .service_options import (
    CHANGE,
    DEFAULT_DEVICES,
    make_site,
    make_workload,
    parse_objective,
    parse_seconds,
)
from .simulations import Simulations
from .workload import PlannedWorkload

_LEAST_REQUESTS: Final = 10
_MAX_DEVICES: Final = 1_024
_PLOTTED: Final = 6  # rates of each curve


def service_command(
    model: Annotated[str, typer.Argument(help="A model, named as for `tandem serve`.")],
    slo: Annotated[
        str,
        typer.Option(
            help="Limits of ttft, tpot and e2e (the whole request), such as ttft=1s,tpot=60ms."
        ),
    ],
    attainment: Annotated[
        float, typer.Option(help="The share of the requests that must meet --slo; between 0 and 1.")
    ] = 0.95,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests per second, with Poisson arrivals. With --trace: the default is the "
            "rate of the trace."
        ),
    ] = None,
    input_len: Annotated[
        int, typer.Option(help="Tokens of each prompt, without --trace.", min=1)
    ] = 512,
    output_len: Annotated[
        int, typer.Option(help="Tokens of each output, without --trace.", min=1)
    ] = 128,
    trace: Annotated[
        Path | None,
        typer.Option(help="Take times and lengths from a trace, as `tandem bench --trace`."),
    ] = None,
    length_scale: LengthScale = "1",
    speed: Speed = 1.0,
    spread_arrivals: SpreadArrivals = False,
    requests: Annotated[
        int,
        typer.Option(
            help=f"Requests to simulate, from {_LEAST_REQUESTS} to {MAX_REQUESTS:,}; the first "
            "ones of a trace."
        ),
    ] = 400,
    devices: Annotated[
        int | None,
        typer.Option(
            help="The maximum of devices; on CPUs of workers, which share the machine. Default: "
            f"all that were measured, {DEFAULT_DEVICES} with --device.",
            min=1,
            max=_MAX_DEVICES,
        ),
    ] = None,
    tp: Annotated[
        str | None,
        typer.Option(
            help="Numbers of ranks of a worker to try, such as 1,2,4. Default: those of --profile, "
            "otherwise 1."
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Take the costs from this file of `tandem plan measure`.")
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(help="Measure the costs on this machine first, for a time such as 60s."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help=f"Compute the costs for this device: {', '.join(DEVICES)}."),
    ] = None,
    faults: Annotated[
        list[str] | None,
        typer.Option(
            help="Kill simulated workers: 'kill decode every 60s' or 'kill prefill at 30s'. May be "
            "given several times, or with several faults between commas."
        ),
    ] = None,
    restart: Annotated[
        str, typer.Option(help="The time that a worker takes to start, such as 30s.")
    ] = "30s",
    autoscale: Annotated[
        bool,
        typer.Option(
            "--autoscale", help="Also simulate autoscaling, with the found workers as the maximum."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="The seed of arrivals and prompts.", min=0)] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the plan and all requests to this file.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw TTFT, TPOT and attainment over the rate into this PNG file; needs "
            "matplotlib."
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(help="Write the found workers to this file, for `tandem serve --config`."),
    ] = None,
) -> None:
    """Find the prefill and decode workers that serve MODEL at a rate within an objective.

    Simulates each split with the service's own routers and engines, on a virtual clock, with the
    costs of a profile, of a measurement, or of a device's data sheet. Also simulates the same
    workers together, without disaggregation, which can be the better choice. The knee of a split is
    the highest rate at which it meets the objective.
    """
    objective = parse_objective(slo, attainment)
    if not _LEAST_REQUESTS <= requests <= MAX_REQUESTS:
        raise InvalidArgument(f"must be from {_LEAST_REQUESTS} to {MAX_REQUESTS}", "--requests")
    check_writable({"--json": json_file, "--plot": plot, "--write": write})
    if plot is not None:
        check_plotting()
    start_seconds = parse_seconds("--restart", restart)
    rules = parse_faults(faults or ())
    workload = make_workload(
        rate,
        input_len,
        output_len,
        trace,
        TraceScale(parse_scale(length_scale), speed, spread_arrivals),
        requests,
        seed,
    )
    seconds = _least_seconds(rules, start_seconds, workload)
    site, splits, config = make_site(model, profile, measure, device, devices, tp, workload)
    with Simulations.of(workload.requests) as simulations:
        planner = Planner(
            site,
            workload,
            objective,
            seed=seed,
            change=with_faults(rules, start_seconds),
            least_seconds=seconds,
            simulations=simulations,
            report=lambda line: typer.echo(line, err=True),
        )
        plans = planner.search(splits)
        chosen = choose(plans, objective)
        sentence = verdict(plans, chosen, workload.rate, objective)
        typer.echo(sentence)
        typer.echo(site.description)
        typer.echo(describe_trace(workload.requests))
        table_console().print(split_table(plans, workload.rate))
        if rules:
            _echo_faults(planner, chosen or best_knee(plans))
        sensitivity: dict[str, RateResult] = {}
        scaling: Autoscaling | None = None
        if chosen is not None and chosen.at_rate is not None:
            for line in use_lines(chosen.at_rate):
                typer.echo(line)
            if autoscale:
                scaling = _autoscale(planner, chosen, rules, start_seconds)
            sensitivity = _sensitivity(planner, chosen)
            table_console().print(sensitivity_table(sensitivity))
        if json_file is not None:
            found = plan_json(
                plans,
                chosen,
                sensitivity,
                source=site.description,
                sentence=sentence,
                autoscaling=scaling,
            )
            write_text(json_file, json.dumps(found, indent=1) + "\n", "--json")
        if plot is not None:
            draw_rates(_curves(planner, plans, chosen), objective, plot)
        if write is not None:
            _write(write, config, chosen or best_knee(plans))


def _least_seconds(
    rules: Sequence[FaultRule], start_seconds: float, workload: PlannedWorkload
) -> float:
    """Returns for how long requests must arrive. Raises InvalidArgument for too many requests."""
    seconds = least_seconds(rules, start_seconds)
    num_requests = math.ceil(seconds * workload.rate)
    if num_requests > MAX_REQUESTS:
        raise InvalidArgument(
            f"{num_requests:,} requests arrive until workers have died and started again; the "
            f"maximum is {MAX_REQUESTS:,}; use shorter times",
            "--faults",
        )
    return seconds


def _echo_faults(planner: Planner, plan: SplitPlan) -> None:
    """Prints what the faults cost at the workload's rate, unless that is above the bound."""
    disturbed = plan.at_rate
    if disturbed is None:
        return
    undisturbed = planner.run(PlannedRun(plan.split, disturbed.rate, change=unchanged))
    end = disturbed.result.seconds
    num_faults = sum(each.end_before(end) < end for each in disturbed.result.workers)
    typer.echo(fault_line(plan.split, disturbed, undisturbed, num_faults))


def _autoscale(
    planner: Planner, chosen: SplitPlan, rules: Sequence[FaultRule], start_seconds: float
) -> Autoscaling:
    """Simulates the chosen workers as the maximum of autoscaled pools; prints the outcome."""
    tpot_ms = planner.objective.limits.get("tpot")
    change = chain(with_faults(rules, start_seconds), autoscaled(start_seconds, tpot_ms))
    outcome = planner.run(PlannedRun(chosen.split, planner.workload.rate, change=change))
    found = Autoscaling(
        outcome=outcome,
        mean_workers=mean_workers(outcome.result),
        num_fixed=chosen.split.prefill + chosen.split.decode,
    )
    typer.echo(autoscaling_line(found))
    return found


def _sensitivity(planner: Planner, chosen: SplitPlan) -> dict[str, RateResult]:
    """Returns the results of the chosen split if one thing changes.

    Leaves out lengths that are not measured, and prints why.
    """
    split, rate = chosen.split, planner.workload.rate
    runs: dict[str, PlannedRun] = {}
    for factor in (1 - CHANGE, 1 + CHANGE):
        change = f"{factor - 1:+.0%}"
        # Blocks keep whole numbers of tokens, so their lengths may change by another share.
        lengths = f"{planner.workload.length_change(factor):+.0%}"
        if lengths != "+0%":
            runs[f"lengths {lengths}"] = PlannedRun(split, rate, lengths=factor)
        runs[f"rate {change}"] = PlannedRun(split, factor * rate)
        runs[f"step time {change}"] = PlannedRun(split, rate, step_time=factor)
    planner.expect(list(runs.values()))
    found: dict[str, RateResult] = {}
    for name, planned in sorted(runs.items()):
        try:
            found[name] = planner.run(planned)
        except InvalidArgument as error:
            typer.echo(f"without {name}: {error}", err=True)
    return found


def _curves(
    planner: Planner, plans: list[SplitPlan], chosen: SplitPlan | None
) -> dict[str, list[RateResult]]:
    """Returns the results at `_PLOTTED` rates by the name of the split.

    The splits are the best one, and the best one of the other kind. The highest rate is above the
    higher knee of both.
    """
    best = chosen or best_knee(plans)
    other = other_kind(plans, best)
    shown = [best] if other is None else [best, other]
    top = max(each.knee or 0.0 for each in shown) or best.bound
    rates = [top * (number + 1) / (_PLOTTED - 1) for number in range(_PLOTTED)]
    runs = {str(each.split): [PlannedRun(each.split, rate) for rate in rates] for each in shown}
    planner.expect([planned for listed in runs.values() for planned in listed])
    return {name: [planner.run(planned) for planned in listed] for name, listed in runs.items()}


def _write(path: Path, config: TandemConfig, plan: SplitPlan) -> None:
    """Writes the configuration of a service with a plan's workers, if they meet the objective."""
    if not plan.knee:
        typer.echo(f"{path} is not written: no split meets the objective", err=True)
        return
    split = plan.split
    tree: dict[str, Any] = config.model_dump(exclude_unset=True, exclude_none=True)
    tree["prefill"] = {"replicas": split.prefill, "tp": split.tp}
    tree["decode"] = {"replicas": split.decode, "tp": split.tp}
    write_text(path, yaml.safe_dump(tree, sort_keys=False), "--write")
