"""Makes the objective, the workload and the site of `tandem plan service` from its options.

Starts a service only to measure this machine (`--measure`).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import typer

from ...proto.errors import InvalidArgument
from ...workers.model.costs.roofline import DEVICES
from ...workers.model.footprint import check_device
from ..arithmetic import make_cost
from ..bench.options import parse_slo
from ..cli.options import check_choice
from ..config import TandemConfig, load_config
from ..explain.cost import read_model_config
from ..traces.read import TraceScale, check_scale, read_trace
from .profile import LEAST_SECONDS, Profile, read_profile
from .search import list_splits
from .site import ArithmeticSite, MeasuredSite, Site, Split
from .workload import Objective, PlannedWorkload

CHANGE: Final = 0.1
"""The change of lengths, rate and step time for the sensitivity, as a share."""

DEFAULT_DEVICES: Final = 8
"""The maximum of devices with `--device` and without `--devices`."""

_MAX_SECONDS: Final = 86_400.0
_MEASURED_WORKERS: Final = (1, 2)  # of --measure, on the same machine


def parse_objective(slo: str, attainment: float) -> Objective:
    """Parses an objective. Raises InvalidArgument."""
    objective = Objective(limits=parse_slo(slo), attainment=attainment)
    if not objective.limits:
        raise InvalidArgument("must have a limit, such as ttft=1s,tpot=60ms", "--slo")
    if not 0 < attainment < 1:
        raise InvalidArgument(f"must be between 0 and 1, got {attainment:g}", "--attainment")
    return objective


def make_workload(
    rate: float | None,
    input_len: int,
    output_len: int,
    trace: Path | None,
    scale: TraceScale,
    requests: int,
    seed: int,
) -> PlannedWorkload:
    """Returns the requests of a trace or of a Poisson process. Raises InvalidArgument."""
    check_scale(scale, trace)
    if rate is not None and not 0 < rate < math.inf:
        raise InvalidArgument(f"must be above 0 requests/s, got {rate:g}", "--rate")
    if trace is None:
        if rate is None:
            raise InvalidArgument("give --rate, with --input-len and --output-len, or --trace")
        return PlannedWorkload.poisson(rate, input_len, output_len, requests, seed)
    workload = PlannedWorkload(read_trace(trace, scale)[:requests])
    if not workload.rate:
        raise InvalidArgument("its requests must not all have the same time", "--trace")
    return workload if rate is None else workload.at_rate(rate)


def make_site(
    model: str,
    profile: Path | None,
    measure: str | None,
    device: str | None,
    devices: int | None,
    tp: str | None,
    workload: PlannedWorkload,
) -> tuple[Site, list[Split], TandemConfig]:
    """Returns the site, the splits to plan there, and a configuration.

    Measures this machine if `measure` is given. Without `devices` and `tp`, the splits are those
    that were measured. Raises InvalidArgument.
    """
    if sum(each is not None for each in (profile, measure, device)) != 1:
        raise InvalidArgument(
            "give one of --profile, --measure and --device, from which the costs are taken"
        )
    tps = _parse_tps(tp or "1")
    if device is not None:
        check_choice("--device", device, DEVICES)
        config = load_config(overrides={"model": model, "device": "cuda"})
        model_config = read_model_config(model)
        try:
            check_device(model_config, config.device)
        except ValueError as error:
            reason = str(error).removeprefix("device: ")
            raise InvalidArgument(
                f"{reason}; plan for CPUs with --measure or --profile", "--device"
            ) from None
        site = ArithmeticSite(
            config=config,
            cost=make_cost(model_config, config.dtype, device_type="cuda"),
            name=device,
            device=DEVICES[device],
            typical_tokens=workload.mean_length,
        )
        fitting = [each for each in tps if site.holds(each, workload.longest)]
        return site, _splits(devices or DEFAULT_DEVICES, fitting or tps), config
    if profile is not None:
        found = read_profile(profile)
    else:
        assert measure is not None
        _check_measurable(devices, tps)
        seconds = parse_seconds("--measure", measure, least=LEAST_SECONDS)
        found = _measure(model, seconds, workload)
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
    measured = {each.workers for each in found.workers}
    ranks = found.tp if found.device == "cpu" else 1  # on CPUs, `devices` counts workers
    num_devices = devices * ranks if devices else max(measured) * found.tp
    splits = _splits(num_devices, [found.tp] if tp is None else tps)
    if devices is None and found.device == "cpu":  # where each number of workers has its own costs
        splits = [each for each in splits if each.prefill + each.decode in measured]
    return MeasuredSite(found), splits, config


def _splits(num_devices: int, tps: Sequence[int]) -> list[Split]:
    """Returns all splits on these devices. Raises InvalidArgument without any."""
    splits = list_splits(num_devices, tps)
    if not splits:
        least = min(tps)
        raise InvalidArgument(
            f"a worker of {least} ranks needs more devices than {num_devices}; lower it or raise "
            "--devices",
            "--tp",
        )
    return splits


def _check_measurable(devices: int | None, tps: Sequence[int]) -> None:
    """Raises InvalidArgument for workers that `_measure` does not measure."""
    most = max(_MEASURED_WORKERS)
    remedy = "use `tandem plan measure` and --profile for others"
    if devices is not None and devices > most:
        raise InvalidArgument(
            f"must be at most {most} with --measure, which measures {most} workers; {remedy}",
            "--devices",
        )
    if set(tps) != {1}:
        raise InvalidArgument(
            f"must be 1 with --measure, which measures workers with one rank; {remedy}", "--tp"
        )


def _measure(model: str, seconds: float, workload: PlannedWorkload) -> Profile:
    """Measures this machine, for sequences as long as the longest of the sensitivity."""
    from .measure import measure_profile  # with torch, which takes a second

    config = load_config(overrides={"model": model})
    return measure_profile(
        config,
        workers=_MEASURED_WORKERS,
        seconds=seconds,
        context_tokens=workload.with_lengths(1 + CHANGE).longest,
        report=lambda line: typer.echo(line, err=True),
    )


def _parse_tps(text: str) -> list[int]:
    """Parses numbers of ranks, such as 1,2,4; returns each once. Raises InvalidArgument."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not 1 <= found[0] <= found[-1] <= 64:
        raise InvalidArgument(f"must be numbers from 1 to 64, such as 1,2,4; got {text!r}", "--tp")
    return found


def parse_seconds(option: str, text: str, *, least: float = 0.0) -> float:
    """Parses a time such as 60s, of at least `least` seconds. Raises InvalidArgument."""
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = math.nan
    if not least <= seconds <= _MAX_SECONDS:
        raise InvalidArgument(
            f"must be a time from {least:g}s to {_MAX_SECONDS:g}s, such as 30s, got {text!r}",
            option,
        )
    return seconds
