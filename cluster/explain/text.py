"""Prints an explanation for a terminal."""

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..tables import make_table, table_console
from .cost import summary, work_table
from .record import Explanation, Step
from .units import amount, milliseconds


def print_text(found: Explanation) -> None:
    """Prints all parts of an explanation on stdout."""
    console = table_console()
    for line in summary(found.cost):
        typer.echo(line)
    _print_prompt(found, console)
    console.print(_stage_table(found))
    console.print(work_table(found.cost))
    typer.echo(prefill_text(found))
    console.print(_step_table(found))
    typer.echo(f"output: {found.text!r}")
    typer.echo(f"stopped: {found.stopped_because}")
    for line in total_lines(found):
        typer.echo(line)


def prefill_text(found: Explanation) -> str:
    """Returns one line about the time of the prefill."""
    first = found.steps[0]
    return (
        f"prefill: {amount(first.flops, 'FLOP')} and {amount(first.num_bytes, 'B')} in "
        f"{milliseconds(first.seconds)}; floor {milliseconds(first.floor_seconds)}, by "
        f"{first.bound}"
    )


def total_lines(found: Explanation) -> list[str]:
    """Returns the totals as lines: times, recomputation, memory, power."""
    (floor,) = found.cost.floors
    timeline = found.timeline
    lines = [
        f"device: {amount(floor.bytes_per_s, 'B')}/s of memory and "
        f"{amount(floor.flops_per_s, 'FLOP')}/s of products; compute is the bound above "
        f"{floor.flops_per_s / floor.bytes_per_s:,.1f} FLOP/B",
        f"TTFT {milliseconds(timeline.get('ttft_seconds', 0.0))} (floor "
        f"{milliseconds(floor.ttft_seconds)}), TPOT "
        f"{milliseconds(timeline.get('tpot_seconds', 0.0))} (floor "
        f"{milliseconds(floor.tpot_seconds)}), {found.tokens_per_second:,.1f} tokens/s",
        f"with KV cache: {milliseconds(timeline.get('end_to_end_seconds', 0.0))}, "
        f"{amount(found.cost.with_cache.flops, 'FLOP')}",
        recomputation_text(found),
        "memory: "
        + ", ".join(f"{name} {amount(size, 'B')}" for name, size in found.memory.items()),
    ]
    return [*lines, power_text(found)]


def recomputation_text(found: Explanation) -> str:
    """Returns one line about the tokens computed without KV cache."""
    flops = amount(found.cost.without_cache.flops, "FLOP")
    again = found.recomputation
    if again is None:
        return f"without KV cache: {found.recomputation_note or 'not measured'}, {flops}"
    times = again.total_seconds / max(found.timeline.get("end_to_end_seconds", 0.0), 1e-9)
    return (
        f"without KV cache: {milliseconds(again.total_seconds)} measured, {times:,.1f} times as "
        f"long, {flops}; tokens that differ: {again.num_different}"
    )


def power_text(found: Explanation) -> str:
    """Returns one line about the power."""
    if not found.watts:
        return "power: cannot be read here (RAPL in /sys/class/powercap, NVML)"
    return "power: " + ", ".join(f"{name} {watts:,.1f} W" for name, watts in found.watts.items())


def percent(probability: float | None) -> str:
    """Returns a probability as text; `-` if it is unknown."""
    if probability is None:
        return "-"
    return "0" if probability == 0 else f"{100 * probability:.2f} %"


def _print_prompt(found: Explanation, console: Console) -> None:
    table = make_table("prompt", "ids and tokens")
    tokens = " ".join(f"{each.token_id}{each.text!r}" for each in found.prompt_tokens)
    table.add_row(f"{len(found.prompt_tokens)} tokens", Text(tokens))
    console.print(table)


def _stage_table(found: Explanation) -> Table:
    table = make_table("stage", "axes", numbers=["prefill", "first decode step"])
    for stage in found.stages:
        table.add_row(stage.name, stage.axes, shape(stage.prefill), shape(stage.decode))
    return table


def shape(sizes: tuple[int, ...]) -> str:
    """Returns a shape as text."""
    return " x ".join(map(str, sizes))


def _step_table(found: Explanation) -> Table:
    table = make_table("", "token", numbers=["model", "drawn from"])
    table.add_column("candidates: model > after temperature and filters")
    for name in ("KV cache", "time", "floor", "bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, step in enumerate(found.steps):
        table.add_row(
            str(number),
            Text(f"{step.token_id}{step.text!r}"),
            percent(step.probability),
            percent(step.drawn_probability),
            Text(_candidates(step)),
            amount(step.kv_bytes, "B"),
            milliseconds(step.seconds),
            milliseconds(step.floor_seconds),
            step.bound,
        )
    return table


def _candidates(step: Step) -> str:
    return "  ".join(
        f"{each.text!r} {percent(each.probability)} > {percent(each.drawn_probability)}"
        for each in step.candidates
    )
