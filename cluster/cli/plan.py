"""`tandem check` and `tandem plan memory`: tell if a model would run, and the memory that it needs.

Starts nothing, and imports no Ray.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Annotated, Final, get_args

import typer

from ...proto.errors import InvalidArgument, TandemError
from ...proto.limits import MAX_TOKENS
from ...workers.engine.block_table import NUM_STATES
from ...workers.kv_cache.layout import ITEM_BYTES
from ...workers.model.config import CheckpointError, ModelConfig, read_fields
from ...workers.model.footprint import (
    check_config_split,
    check_device,
    check_draft,
    kv_layout,
    memory_budget,
)
from ..config import KvCacheDtype, ModelImpl, Numerics, Quantization, load_config
from ..explain.cost_command import cost_command
from ..planner.measure_command import measure_command
from ..planner.service_command import service_command
from ..store.generation_defaults import FILE, describe_defaults, generation_defaults
from ..store.store import resolve_model
from ..tables import table_console
from .memory import (
    GIB,
    Budget,
    describe_fit,
    describe_sequence,
    memory_table,
    rank_memory,
)
from .options import check_choice

DEFAULT_TPS: Final = (1, 2, 4, 8)

plan_app = typer.Typer(help="Compute what a service will need.", no_args_is_help=True)
plan_app.command("cost")(cost_command)
plan_app.command("measure")(measure_command)
plan_app.command("service")(service_command)


@plan_app.command("memory")
def memory_command(
    model: Annotated[str, typer.Argument(help="A model, named as for `tandem serve`.")],
    tp: Annotated[
        list[int] | None,
        typer.Option(help="Ranks of a worker; may be given several times, for several rows."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    quantization: Annotated[
        str | None,
        typer.Option(
            help="Rounds the weights when they are loaded: int8 (CPUs only), int4 or fp8."
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(help="The numbers of the KV cache: auto (--dtype), int8, fp8, int4 (CPUs)."),
    ] = "auto",
    device: Annotated[str, typer.Option(help="The device of the service, cpu or cuda.")] = "cpu",
    numerics: Annotated[
        str, typer.Option(help="exact (a token does not depend on its batch) or fast.")
    ] = "fast",
    draft_model: Annotated[
        str | None, typer.Option(help="The MODEL of `tandem serve --speculative draft=MODEL`.")
    ] = None,
    gpu_memory_gb: Annotated[
        float | None,
        typer.Option(help="GiB of memory of each rank's device; shows how many sequences fit."),
    ] = None,
    gpu_memory_utilization: Annotated[
        float,
        typer.Option(
            "--gpu-memory-utilization",
            "--utilization",
            help="The part of --gpu-memory-gb that a rank may use.",
        ),
    ] = 0.9,
    num_gpus: Annotated[
        float, typer.Option(help="GPUs of each rank; 0.5 if two ranks share a GPU.")
    ] = 1.0,
    kv_cache_gb: Annotated[
        float | None,
        typer.Option(help="GiB of KV cache of each rank, in place of --gpu-memory-gb."),
    ] = None,
    state_slots: Annotated[
        int | None,
        typer.Option(
            help="States in the KV cache, if the model keeps states; by default at most half of it."
        ),
    ] = None,
    max_sequences: Annotated[
        int | None,
        typer.Option(help="The maximum of sequences in one batch, which bounds the states."),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block.")] = 16,
    context_tokens: Annotated[
        int | None, typer.Option(help="Tokens of each sequence; by default the model's context.")
    ] = None,
) -> None:
    """Show the memory of MODEL on each rank: weights, KV cache per token, tokens that fit.

    With --context-tokens also the blocks, states and bytes of KV cache of one sequence of that
    length. With --gpu-memory-gb or --kv-cache-gb also the sequences that fit; of a model that keeps
    states, those that the states allow and those that the blocks allow.

    Without --tp: 1, 2, 4 and 8 ranks, as far as they divide the query heads. With --draft-model:
    the memory of rank 0, which alone holds the whole draft model; no rank has more tokens than rank
    0. In bfloat16 on CPUs a model whose head is tied to its embedding holds the embedding twice;
    this command counts it once. With --device cuda, quantized weights count in --dtype, to which a
    GPU converts them when it loads them, except weights that it multiplies in FP8 or in 4 bits.
    With --numerics exact these are converted too, except experts in FP8. Activations and CUDA
    graphs are not counted: a service on GPUs measures them when it starts, and its KV cache is
    smaller by as much. The tables of rotary positions on CPUs are not counted either: for each
    token of the context, two vectors of a head's size in --dtype.
    """
    check_choice("--dtype", dtype, ITEM_BYTES)
    if quantization is not None:
        check_choice("--quantization", quantization, get_args(Quantization))
    check_choice("--kv-cache-dtype", kv_cache_dtype, get_args(KvCacheDtype))
    check_choice("--numerics", numerics, get_args(Numerics))
    _check("--gpu-memory-gb", gpu_memory_gb, 0.001, 4096)
    _check("--gpu-memory-utilization", gpu_memory_utilization, 0.01, 1)
    _check("--num-gpus", num_gpus, 0.01, 1)
    _check("--block-size", block_size, 1, 1024)
    _check("--context-tokens", context_tokens, 2, MAX_TOKENS)
    _check("--kv-cache-gb", kv_cache_gb, 0.001, 4096)
    _check("--state-slots", state_slots, NUM_STATES, 1_048_576)
    _check("--max-sequences", max_sequences, 1, 65_536)
    if None not in (gpu_memory_gb, kv_cache_gb):
        raise InvalidArgument("cannot be set together with --gpu-memory-gb", "--kv-cache-gb")
    settings = load_config(
        None,
        {
            "model": model,
            "device": device,
            "quantization": quantization,
            "kv_cache_dtype": kv_cache_dtype,
            "numerics": numerics,
            "decode.max_sequences": max_sequences,
        },
    )
    folder = resolve_model(model, dtype=dtype)
    from ...workers.model.loader import open_checkpoint

    config = open_checkpoint(
        folder, quantization=quantization, context_tokens=context_tokens
    ).config
    draft = _open_draft(draft_model, config, dtype) if draft_model else None
    sizes = tp or _default_tps(config)
    rows = [
        rank_memory(config, each, dtype, kv_cache_dtype, draft, device=device, numerics=numerics)
        for each in sizes
    ]
    budget = None
    if gpu_memory_gb is not None or kv_cache_gb is not None:
        total = int((gpu_memory_gb or kv_cache_gb or 0) * GIB)
        if gpu_memory_gb is not None:
            total = memory_budget(total, num_gpus, gpu_memory_utilization)
        budget = Budget(
            num_bytes=total,
            has_weights=gpu_memory_gb is not None,
            block_size=block_size,
            context_tokens=config.context_tokens,
            state_slots=state_slots,
            max_sequences=settings.max_sequences(settings.decode),
        )
    where = "each rank" if draft is None else f"rank 0, with {draft_model} in {dtype}"
    typer.echo(f"{model}, {quantization or dtype}: {_heads(config)}; on {where}:")
    table_console().print(memory_table(rows, budget))
    for row in rows:
        if context_tokens is not None:
            sequence = row.sequence(block_size, context_tokens)
            typer.echo(
                f"tp {row.tp}: a sequence of {context_tokens:,} tokens holds "
                f"{describe_sequence(sequence)}"
            )
        if budget and (line := describe_fit(row, budget)):
            typer.echo(f"tp {row.tp}: {line}")


def _open_draft(name: str, model: ModelConfig, dtype: str) -> ModelConfig:
    """Returns the configuration of a draft model. Raises InvalidArgument if it does not fit."""
    from ...workers.model.loader import open_checkpoint

    try:
        draft = open_checkpoint(resolve_model(name, dtype=dtype)).config
        check_draft(draft, model)
    except (TandemError, ValueError) as error:
        raise InvalidArgument(str(error).removeprefix("model: "), "--draft-model") from None
    return draft


def check(
    model: Annotated[str, typer.Argument(help="A model, named as for `tandem serve`.")],
    tp: Annotated[
        list[int] | None,
        typer.Option(help="Ranks of a worker; may be given several times, for several rows."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    model_impl: Annotated[
        str, typer.Option(help="The code that computes: auto, tandem or transformers.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="The device of the service, cpu or cuda.")] = "cpu",
    numerics: Annotated[
        str, typer.Option(help="exact (a token does not depend on its batch) or fast.")
    ] = "fast",
) -> None:
    """Tell if MODEL would run: its code, its size, its context, and the memory on each rank.

    Reads config.json and the headers of the weights, but no weights. Exit code 0: it would run. 1:
    it is refused, and one line names the file, the field and the reason.
    """
    check_choice("--dtype", dtype, ITEM_BYTES)
    check_choice("--model-impl", model_impl, get_args(ModelImpl))
    check_choice("--numerics", numerics, get_args(Numerics))
    settings = load_config(None, {"model": model, "device": device, "numerics": numerics})
    # With torch, which takes a second.
    from ...workers.model.loader import check_checkpoint, weight_schemes, weight_shapes

    try:
        folder = resolve_model(model, dtype=dtype)
        config = check_checkpoint(folder, model_impl)
        given = generation_defaults(settings, folder)
        refused = [
            _device_refusal(config, device, numerics),
            *(_refusal(config, each) for each in tp or ()),
        ]
    except CheckpointError as error:
        typer.echo(f"{model}: refused: {error}")
        raise typer.Exit(1) from error
    for reason in filter(None, refused):
        typer.echo(f"{model}: refused: {reason}")
        raise typer.Exit(1)
    num_parameters = sum(map(prod, weight_shapes(replace(config, quantization={})).values()))
    typer.echo(f"{model}: runs, {_implementation(config)}")
    if config.text_model_of:
        for name, value in read_fields(folder).items():
            if name.endswith("_config") and name != "text_config" and isinstance(value, dict):
                typer.echo(f"text only: {name} is not loaded")
    typer.echo(
        f"{num_parameters:,} parameters, stored as {config.dtype}; context of "
        f"{config.max_position_embeddings:,} tokens"
    )
    for scheme in weight_schemes(config, dtype, device, batch_invariant=numerics == "exact"):
        typer.echo(f"weights: {scheme}")
    if defaults := describe_defaults(given):
        typer.echo(f"defaults of requests, by {FILE}: {defaults}")
    if any(layer.states for layer in config.layers):
        typer.echo(_describe_states(config, dtype))
    typer.echo(f"in {dtype} on {device}, on each rank:")
    sizes = tp or _default_tps(config)
    rows = [rank_memory(config, each, dtype, device=device, numerics=numerics) for each in sizes]
    table_console().print(memory_table(rows, None))
    if not config.has_tp_plan:
        typer.echo(_refusal(config, 2))


def _refusal(config: ModelConfig, tp: int) -> str:
    """Returns the reason why a model cannot be split over `tp` ranks; empty if it can be."""
    try:
        check_config_split(config, tp)
    except ValueError as error:
        return str(error)
    return ""


def _device_refusal(config: ModelConfig, device: str, numerics: str) -> str:
    """Returns the reason why a device cannot run a model with `numerics`; empty if it can."""
    try:
        check_device(config, device, batch_invariant=numerics == "exact")
    except ValueError as error:
        return str(error)
    return ""


def _default_tps(config: ModelConfig) -> list[int]:
    """Returns the usual numbers of ranks over which a model can be split."""
    return [each for each in DEFAULT_TPS if not _refusal(config, each)]


def _implementation(config: ModelConfig) -> str:
    if config.transformers is None:
        return f"by Tandem's own {config.architecture}"
    return f"by transformers' {config.architecture} over Tandem's attention"


def _heads(config: ModelConfig) -> str:
    """Returns the head counts as text; if layers differ, all of them."""
    counts = dict.fromkeys(
        (layer.num_heads, layer.num_kv_heads) for layer in config.layers if layer.num_kv_heads
    )
    if not counts:
        return "no attention"
    return " or ".join(f"{heads} query heads, {kv_heads} KV heads" for heads, kv_heads in counts)


def _describe_states(config: ModelConfig, dtype: str) -> str:
    """Returns the layers that keep states, and the bytes of a state, as text."""
    numbers = [number for number, layer in enumerate(config.layers) if layer.states]
    size = kv_layout(config, dtype).bytes_per_state
    return (
        f"states: layers {_runs(numbers)} (of {len(config.layers)} with a cache) keep {size:,} B "
        f"for each of the {NUM_STATES} states of a sequence"
    )


def _runs(numbers: Iterable[int]) -> str:
    """Returns ascending numbers as text, with consecutive ones as FIRST-LAST."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _check(option: str, number: float | None, low: float, high: float) -> None:
    if number is not None and not low <= number <= high:
        raise InvalidArgument(f"must be from {low} to {high}, got {number}", option)
