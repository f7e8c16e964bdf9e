"""Puts the arithmetic of one prompt and its output into a report, for people and as JSON.

The names in the JSON are the names of the fields below. Times are in seconds.
"""

from collections.abc import Sequence
from typing import Final

from rich.table import Table

from ...workers.model.config import Fields, ModelConfig, read_json
from ...workers.model.costs.report import CostReport, MeasuredTimes, WorkReport
from ..planner.profile import Profile, WorkerProfile
from ..sim.cost import StepWork, prompt_steps
from ..store.store import resolve_config
from ..tables import make_table
from .units import amount, milliseconds

THIS_MACHINE: Final = "this machine"


def read_model_config(model: str) -> ModelConfig:
    """Returns the config of MODEL as of `resolve_config`, for which no weights are needed.

    Raises as `resolve_config`, and CheckpointError for a model that cannot be served.
    """
    path = resolve_config(model)
    # With torch, which takes a second.
    from ...workers.model.registry import load_model_config, parse_model_config

    if path.is_dir():
        return load_model_config(path)
    return parse_model_config(Fields(path.name, read_json(path)))


def measured_times(
    profile: Profile, *, prompt_tokens: int, output_tokens: int, batch: int = 1
) -> tuple[MeasuredTimes, ...]:
    """Returns the times of each measured worker for the work of a report."""
    return tuple(
        _measured_times(worker, prompt_tokens, output_tokens, batch) for worker in profile.workers
    )


def _measured_times(
    worker: WorkerProfile, prompt_tokens: int, output_tokens: int, batch: int
) -> MeasuredTimes:
    prefill = prompt_steps(prompt_tokens, worker.budgets.chunk_tokens)
    context = prompt_tokens + (output_tokens + 1) // 2
    decode = StepWork(sequences=batch, context_tokens=batch * context)
    costs = worker.costs()
    longest = max(prefill, key=lambda each: each.prompt_context)
    outside = dict.fromkeys((*costs.outside(longest), *costs.outside(decode)))
    return MeasuredTimes(
        workers=worker.workers,
        threads=worker.threads,
        ttft_seconds=0.0 if outside else sum(map(costs.seconds, prefill)),
        tpot_seconds=0.0 if outside or output_tokens == 1 else costs.seconds(decode),
        outside=tuple(outside),
    )


def measured_lines(report: CostReport) -> list[str]:
    """Returns the measured times as lines."""
    lines = []
    for each in report.measured:
        name = f"measured, {each.workers} x {each.threads} threads"
        if each.outside:
            lines.append(f"{name}: outside the measured grid ({'; '.join(each.outside)})")
            continue
        times = f"TTFT {milliseconds(each.ttft_seconds)}"
        if each.tpot_seconds:
            rate = report.batch / each.tpot_seconds
            times += f", TPOT {milliseconds(each.tpot_seconds)}, {rate:,.0f} tokens/s"
        lines.append(f"{name}: {times}")
    return lines


def summary(report: CostReport) -> list[str]:
    """Returns the figures of the model and of its KV cache as lines."""
    active = ""
    if report.active_parameters != report.parameters:
        active = f", {amount(report.active_parameters)} of them for each token"
    lines = [
        f"{report.model}: {amount(report.parameters)} parameters{active}, "
        f"{amount(report.weight_bytes, 'B')} of weights in {report.dtype}",
        f"KV cache: {report.kv_bytes_per_token:,} B for each token; "
        f"{report.kv_bytes_per_token_without_sharing:,} B if each query head had its own",
    ]
    if report.state_bytes:
        lines.append(f"state: {amount(report.state_bytes, 'B')} for each sequence")
    held = f"{amount(report.kv_bytes, 'B')} after {report.prompt_tokens:,} + "
    held += f"{report.output_tokens:,} tokens"
    if report.kv_bytes != report.kv_bytes_without_windows:
        held += f"; {amount(report.kv_bytes_without_windows, 'B')} without windows"
    lines.append(f"KV cache of a sequence: {held}")
    return lines


def work_table(report: CostReport) -> Table:
    """Returns a table of the work of prefill and decode."""
    table = make_table("step", numbers=["products", "bytes moved", "FLOP/B"])
    last = report.prompt_tokens + max(report.output_tokens - 1, 1)
    of_batch = f", batch {report.batch}" if report.batch > 1 else ""
    rows: Sequence[tuple[str, WorkReport]] = (
        (f"prefill of {report.prompt_tokens:,} tokens", report.prefill),
        (f"decode at {report.prompt_tokens + 1:,} tokens{of_batch}", report.first_decode),
        (f"decode at {last:,} tokens{of_batch}", report.last_decode),
        (f"{report.output_tokens:,} tokens with KV cache", report.with_cache),
        (f"{report.output_tokens:,} tokens without KV cache", report.without_cache),
    )
    for name, work in rows:
        table.add_row(
            name,
            amount(work.flops, "FLOP"),
            amount(work.num_bytes, "B"),
            f"{work.flops_per_byte:,.1f}",
        )
    return table


def floor_table(report: CostReport) -> Table:
    """Returns a table of the least times on each device."""
    numbers = ["memory", "products", "TTFT floor", "bound", "TPOT floor", "bound "]
    numbers += ["tokens/s at most", "with KV cache", "without"]
    table = make_table("device", numbers=numbers)
    for each in report.floors:
        table.add_row(
            each.device,
            f"{amount(each.bytes_per_s, 'B')}/s",
            f"{amount(each.flops_per_s, 'FLOP')}/s",
            milliseconds(each.ttft_seconds),
            each.prefill_bound,
            milliseconds(each.tpot_seconds),
            each.decode_bound,
            f"{each.tokens_per_s:,.0f}",
            milliseconds(each.with_cache_seconds),
            milliseconds(each.without_cache_seconds),
        )
    return table
