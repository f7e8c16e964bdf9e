"""`tandem plan measure`: measures a model on this machine and writes a profile."""

import math
from pathlib import Path
from typing import Annotated, Final, get_args

import typer

from ...proto.errors import InvalidArgument
from ...proto.limits import MAX_TOKENS
from ...workers.kv_cache.layout import ITEM_BYTES
from ..cli.options import check_choice
from ..config import KvCacheDtype, Quantization, load_config
from ..text_files import check_writable, write_text
from .profile import LEAST_CONTEXT, LEAST_SECONDS, describe_fit

DEFAULT_CONTEXT: Final = 4096
_MAX_WORKERS: Final = 64


def measure_command(
    model: Annotated[str, typer.Argument(help="A model, named as for `tandem serve`.")],
    seconds: Annotated[
        float,
        typer.Option(
            help=f"Seconds to measure, at least {LEAST_SECONDS:g}. Starts of workers and services "
            "take more time."
        ),
    ] = 60.0,
    out: Annotated[Path, typer.Option(help="The file for the profile.")] = Path("profile.json"),
    workers: Annotated[
        list[int] | None,
        typer.Option(
            help="Workers that share this machine; may be given several times, for several "
            "numbers. Default: 1 and 2 on CPUs, 1 on GPUs."
        ),
    ] = None,
    context_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens of the longest sequence to measure.", min=LEAST_CONTEXT, max=MAX_TOKENS
        ),
    ] = DEFAULT_CONTEXT,
    tp: Annotated[int, typer.Option(help="Ranks of each worker.", min=1, max=64)] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    quantization: Annotated[
        str | None, typer.Option(help="Of the weights: int8, int4 or fp8.")
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="The format of the KV cache: auto (--dtype), int8, fp8 or int4.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Measure MODEL on this machine and write a profile for `tandem plan service`.

    Measures the steps of an engine over a grid of batches, contexts and prompts, decodes and
    prompts mixed as well, and how much longer they take while the other workers on the same cores
    compute. Then starts a service with these workers, and measures how much longer steps take
    there, the time between two steps and of a request besides its steps, the CPU time of the
    router, and KV transfers. Prints the fitted costs and their leave-one-out error: the error of a
    prediction for a step that was left out of the fit.
    """
    check_choice("--dtype", dtype, ITEM_BYTES)
    check_choice("--kv-cache-dtype", kv_cache_dtype, get_args(KvCacheDtype))
    if quantization is not None:
        check_choice("--quantization", quantization, get_args(Quantization))
    if not LEAST_SECONDS <= seconds < math.inf:
        raise InvalidArgument(f"must be at least {LEAST_SECONDS:g}, got {seconds:g}", "--seconds")
    numbers = sorted(set(workers or ([1, 2] if device == "cpu" else [1])))
    if not all(1 <= each <= _MAX_WORKERS for each in numbers):
        raise InvalidArgument(f"must be from 1 to {_MAX_WORKERS}", "--workers")
    if device == "cuda" and (numbers != [1] or tp != 1):
        raise InvalidArgument(
            "on cuda only one worker with one rank can be measured; use 1 for both, or "
            "`tandem plan service --device`, which computes the costs",
            "--workers" if numbers != [1] else "--tp",
        )
    check_writable({"--out": out})
    config = load_config(
        overrides={
            "model": model,
            "dtype": dtype,
            "quantization": quantization,
            "kv_cache_dtype": kv_cache_dtype,
            "device": device,
            "prefill.tp": tp,
            "decode.tp": tp,
        }
    )
    from .measure import measure_profile  # with torch, which takes a second

    profile = measure_profile(
        config,
        workers=numbers,
        seconds=seconds,
        context_tokens=context_tokens,
        report=lambda line: typer.echo(line, err=True),
    )
    write_text(out, profile.model_dump_json(indent=1) + "\n", "--out")
    for worker in profile.workers:
        typer.echo(describe_fit(worker))
        if worker.workers > 1:
            typer.echo(
                f"contention: steps take {worker.contention:.2f} times as long; with a prefill "
                f"worker, prompts take {worker.prefill_contention:.2f} times as long beside "
                f"streams, and tokens {worker.decode_contention:.2f} times beside prompts"
            )
        typer.echo(
            f"service: steps take {worker.background:.2f} times as long, a request "
            f"{1e3 * worker.request_seconds:.3g} ms besides its steps"
        )
        typer.echo(
            f"host: {1e3 * worker.host_seconds:.3g} ms between two steps + "
            f"{1e6 * worker.host_seconds_per_sequence:.3g} us a sequence"
        )
    if profile.router is not None:
        typer.echo(
            f"router: {1e6 * profile.router.seconds_per_request:,.0f} us a request, "
            f"{1e6 * profile.router.seconds_per_token:,.0f} us a token"
        )
    if profile.transfer is not None:
        typer.echo(
            f"KV transfer ({profile.transfer.transport}): {1e3 * profile.transfer.seconds:.3g} ms, "
            f"{profile.transfer.bytes_per_second / 1e9:.3g} GB/s"
        )
    typer.echo(f"wrote {out}")
