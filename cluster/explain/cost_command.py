"""`tandem plan cost`: prints the arithmetic of a model's inference.

Starts nothing, and imports no Ray.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, get_args

import typer

from ...proto.errors import InvalidArgument
from ...workers.kv_cache.layout import ITEM_BYTES
from ...workers.model.costs.report import cost_report
from ...workers.model.costs.roofline import DEVICES, Roofline
from ..arithmetic import make_cost
from ..cli.options import check_choice
from ..config import KvCacheDtype, Quantization, load_config
from ..planner.profile import Profile, read_profile
from ..tables import table_console
from .cost import (
    THIS_MACHINE,
    floor_table,
    measured_lines,
    measured_times,
    read_model_config,
    summary,
    work_table,
)

_MAX_PROMPT: Final = 1_048_576
_MAX_OUTPUT: Final = 65_536


def cost_command(
    model: Annotated[
        str,
        typer.Argument(help="A model, named as for `tandem serve`, or the path of a config.json."),
    ],
    prompt: Annotated[
        int, typer.Option(help="Tokens of the prompt.", min=1, max=_MAX_PROMPT)
    ] = 512,
    output: Annotated[
        int, typer.Option(help="Tokens of the output.", min=1, max=_MAX_OUTPUT)
    ] = 128,
    batch: Annotated[
        int, typer.Option(help="Sequences that decode in one step.", min=1, max=65_536)
    ] = 1,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16. Default: that of --profile, or bfloat16."),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            help="Of the weights: int8, int4 or fp8. Default: that of --profile, or none."
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            help="The numbers of the KV cache: auto (--dtype), int8, fp8 or int4. Default: that of "
            "--profile, or auto."
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            help="A device to compute times for; may be given several times. Default: all of "
            f"{', '.join(DEVICES)}."
        ),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(help="GB/s of memory of a device that is not in the list; needs --rate."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="TFLOP/s of a device that is not in the list; needs --bandwidth."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the limits of this machine; takes seconds.")
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(help="A file of `tandem plan measure`: prints its times beside the floors."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute the FLOPs, the bytes and the least times of MODEL for a prompt and an output.

    Reads config.json alone: of a model on the Hugging Face hub, the weights are not fetched. Counts
    matrix products, weights, KV cache and states, each moved once. No program is faster than these
    times: the floor of a step is the longer of the time for its bytes and the time for its FLOPs.
    """
    devices = _devices(device, bandwidth, rate)
    measured = _read_profile(profile, model) if profile is not None else None
    if measured is not None:
        dtype = _as_measured("--dtype", dtype, measured.dtype)
        quantization = _as_measured("--quantization", quantization, measured.quantization)
        kv_cache_dtype = _as_measured("--kv-cache-dtype", kv_cache_dtype, measured.kv_cache_dtype)
    dtype = dtype or "bfloat16"
    kv_cache_dtype = kv_cache_dtype or "auto"
    check_choice("--dtype", dtype, ITEM_BYTES)
    check_choice("--kv-cache-dtype", kv_cache_dtype, get_args(KvCacheDtype))
    if quantization is not None:
        check_choice("--quantization", quantization, get_args(Quantization))
    config = read_model_config(model)
    cost = make_cost(config, dtype, quantization=quantization, cache_dtype=kv_cache_dtype)
    if measure:
        # With torch, which takes a second.
        from .machine import measure_machine

        devices = {
            **(devices if device or rate else {}),
            THIS_MACHINE: measure_machine(config, dtype, prompt),
        }
    report = cost_report(
        model, cost, prompt_tokens=prompt, output_tokens=output, batch=batch, devices=devices
    )
    if measured is not None:
        times = measured_times(measured, prompt_tokens=prompt, output_tokens=output, batch=batch)
        report = replace(report, measured=times)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
        return
    for line in summary(report):
        typer.echo(line)
    console = table_console()
    console.print(work_table(report))
    console.print(floor_table(report))
    for line in measured_lines(report):
        typer.echo(line)


def _read_profile(path: Path, model: str) -> Profile:
    """Returns a profile of a model. Raises InvalidArgument."""
    profile = read_profile(path)
    profile.check_model(load_config(overrides={"model": model}).served_name)
    return profile


def _as_measured(option: str, given: str | None, measured: str | None) -> str | None:
    """Returns the value of the profile. Raises InvalidArgument if the option has another one."""
    if given not in (None, measured):
        raise InvalidArgument(
            f"is {given}, but the profile was measured with {measured or 'none'}; leave the option "
            "out, or measure such a profile",
            option,
        )
    return measured


def _devices(
    names: list[str] | None, bandwidth: float | None, rate: float | None
) -> dict[str, Roofline]:
    """Returns the devices of the options. Raises InvalidArgument."""
    for name in names or ():
        check_choice("--device", name, DEVICES)
    if (bandwidth is None) != (rate is None):
        missing = "--rate" if rate is None else "--bandwidth"
        raise InvalidArgument("must be set, because --bandwidth and --rate go together", missing)
    found = {name: DEVICES[name].roofline for name in names or ()}
    if bandwidth is not None and rate is not None:
        for option, value in (("--bandwidth", bandwidth), ("--rate", rate)):
            if not 0 < value <= 1e9:
                raise InvalidArgument("must be above 0 and at most 1e9", option)
        found["given"] = Roofline(bytes_per_s=bandwidth * 1e9, flops_per_s=rate * 1e12)
    return found or {name: each.roofline for name, each in DEVICES.items()}
