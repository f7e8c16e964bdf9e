"""Compares predictions with a service: `python -m tandem.tests.bench.prediction PROFILE`.

Simulates every load first and writes the predictions to a file. Then it starts the service, sends
it the same loads, and prints the measured figures with the errors of the predictions. The figures
of each load are in a file as soon as it ends, so a failure later does not lose them.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tandem.cluster.bench.options import parse_slo
from tandem.cluster.cli.options import SpreadArrivals
from tandem.cluster.planner.profile import Profile, read_profile
from tandem.cluster.planner.site import Split
from tandem.cluster.planner.workload import Objective
from tandem.cluster.traces.read import TraceScale, parse_scale
from tandem.tests.bench.learn.plots import draw
from tandem.tests.bench.prediction.cases import Case, LoadPlan, Prediction, predict, read_fitting
from tandem.tests.bench.prediction.measured import measure
from tandem.tests.bench.prediction.report import Comparison, as_json, table

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    profile_file: Annotated[Path, typer.Argument(help="A file of `tandem plan measure`.")],
    trace: Annotated[list[Path], typer.Option(help="A trace; repeat it for more.")],
    model: Annotated[
        str, typer.Option(help="As for `tandem serve`; by default the name in the profile.")
    ] = "",
    splits: Annotated[str, typer.Option(help="Prefill + decode workers.")] = "0+1,1+1",
    shares: Annotated[str, typer.Option(help="Of the predicted knee.")] = "0.3,0.6,0.8",
    slo: Annotated[str, typer.Option(help="The objective that defines the knee.")] = (
        "ttft=2s,tpot=100ms"
    ),
    attainment: Annotated[float, typer.Option(help="The share that must meet it.")] = 0.95,
    length_scale: Annotated[str, typer.Option(help="A factor for the lengths.")] = "1/8",
    spread_arrivals: SpreadArrivals = False,
    seconds: Annotated[float, typer.Option(help="For each load.")] = 600.0,
    rounds: Annotated[int, typer.Option(help="Measurements of each load.", min=1)] = 2,
    searched: Annotated[int, typer.Option(help="Requests with which to find the knee.")] = 400,
    out: Annotated[Path, typer.Option(help="A folder for JSON and the plot.")] = Path(
        "docs/planning"
    ),
) -> None:
    """Predict the times of a service, then measure them."""
    profile = read_profile(profile_file)
    plan = LoadPlan(
        objective=Objective(limits=parse_slo(slo), attainment=attainment),
        shares=[float(each) for each in shares.split(",")],
        seconds=seconds,
        searched=searched,
    )
    scale = TraceScale(parse_scale(length_scale), spread=spread_arrivals)
    out.mkdir(parents=True, exist_ok=True)
    found: list[Comparison] = []

    def report(case: Case, figures: Mapping[str, float]) -> None:
        (index,) = (at for at, each in enumerate(found) if each.prediction.case is case)
        found[index] = replace(found[index], rounds=(*found[index].rounds, figures))
        _write(out / "measured.json", [each for each in found if each.rounds])

    for split in map(_split, splits.split(",")):
        predictions: list[Prediction] = []
        for path in trace:
            predictions += _predict(profile, split, path, scale, plan)
        unmeasured = [Comparison(prediction=each, rounds=()) for each in predictions]
        _write(out / f"predicted-{split.prefill}-{split.decode}.json", unmeasured)
        found += unmeasured
        cases = [each.case for each in predictions]
        measure(profile, cases, rounds, plan.objective.limits, report, model)
    figure = table(found, _describe(profile, plan), _name(trace[0]))
    typer.echo(figure.as_text())
    draw(figure, out / f"{figure.name}.png")


def _predict(
    profile: Profile, split: Split, path: Path, scale: TraceScale, plan: LoadPlan
) -> list[Prediction]:
    context = profile.worker(split.prefill + split.decode).context_tokens
    requests, num_dropped = read_fitting(path, scale, context)
    try:
        knee, found = predict(profile, split, _name(path), requests, plan)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--slo") from error
    typer.echo(
        f"{split}, {_name(path)}: predicted knee {knee:.3g} requests/s; {num_dropped} requests "
        f"are longer than the context of {context:,} tokens",
        err=True,
    )
    for each in found:
        if each.is_saturated:
            typer.echo(f"  saturated at {each.case.rate:.3g} requests/s", err=True)
    return found


def _describe(profile: Profile, plan: LoadPlan) -> str:
    return (
        f"{profile.model}, {profile.dtype}, {profile.cores} cores of {profile.device_name}, "
        f"{profile.date[:10]}; {plan.objective}; {plan.seconds:g} s for each load."
    )


def _name(path: Path) -> str:
    return path.name.partition(".")[0].replace("_", " ")


def _split(text: str) -> Split:
    prefill, _, decode = text.partition("+")
    return Split(int(prefill), int(decode))


def _write(path: Path, found: list[Comparison]) -> None:
    path.write_text(json.dumps(as_json(found), indent=1) + "\n")


if __name__ == "__main__":
    app()
