"""`tandem check` and `tandem plan memory`: tell if a model would run, and the memory that it needs.

Starts nothing, and imports no Ray.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Annotated, Final, get_args

import typer
from rich.table import Table

from ...proto.errors import InvalidArgument, TandemError
from ...workers.kv_cache.layout import ITEM_BYTES, KvLayout
from ...workers.kv_cache.memory import plan_memory
from ...workers.model.config import CheckpointError, ModelConfig, read_fields
from ...workers.model.footprint import (
    SequenceMemory,
    check_cache_dtype,
    check_config_split,
    check_draft,
    kv_bytes_per_token,
    memory_budget,
    sequence_memory,
)
from ..config import KvCacheDtype, ModelImpl, Numerics, Quantization, load_config
from ..store.generation_defaults import FILE, describe_defaults, generation_defaults
from ..store.store import resolve_model
from ..tables import make_table, table_console
from .options import check_choice

DEFAULT_TPS: Final = (1, 2, 4, 8)
GIB: Final = 1024**3

plan_app = typer.Typer(help="Compute what a service will need.", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Holds the bytes that each of `tp` ranks keeps.

    With a draft model, which rank 0 alone holds, they are the bytes of rank 0.
    """

    tp: int
    weights: int
    kv_per_token: int
    kv_on_all_ranks: int  # of a token
    num_copies: int  # of a KV head's cache, on all ranks together, without the draft model
    layout: KvLayout
    draft_kv_per_token: int = 0  # part of kv_per_token

    def kv_cache(
        self, num_bytes: int, block_size: int, context_tokens: int
    ) -> tuple[int, int, int]:
        """Returns the bytes, the tokens and the sequences of KV cache within `num_bytes` of a rank.

        The bytes are the rest beside the weights, negative if these do not fit. The sequences have
        `context_tokens` each. The tokens are in whole blocks, of a model with windows in whole
        sequences; every rank holds its heads of each token.
        """
        rest = num_bytes - self.weights
        memory = plan_memory(self.layout, num_blocks=1, block_size=block_size, tp=self.tp, rank=0)
        draft_bytes = memory.tables[0].block_size * self.draft_kv_per_token
        num_blocks = max(rest, 0) // (memory.block_bytes + draft_bytes)
        of_sequence = self.sequence(block_size, context_tokens).num_blocks
        num_sequences = num_blocks // sum(of_sequence)
        has_windows = any(table.window is not None for table in memory.tables)
        num_tokens = num_sequences * context_tokens if has_windows else num_blocks * block_size
        return rest, num_tokens, num_sequences

    def sequence(self, block_size: int, num_tokens: int) -> SequenceMemory:
        """Returns the KV cache of one sequence on a rank, without the draft model."""
        return sequence_memory(self.layout, self.tp, block_size=block_size, num_tokens=num_tokens)


def rank_memory(
    config: ModelConfig,
    tp: int,
    dtype: str,
    kv_cache_dtype: str = "auto",
    draft: ModelConfig | None = None,
    *,
    device: str = "cpu",
    numerics: str = "fast",
) -> RankMemory:
    """Computes the memory of a rank.

    With `numerics` exact, a GPU converts the quantized weights whose products depend on the batch.
    Raises InvalidArgument if `tp` does not split the heads, or the cache cannot have the dtype.
    """
    from ...workers.model.loader import weight_bytes  # with torch, which takes a second

    try:
        check_config_split(config, tp)
        check_cache_dtype(config, kv_cache_dtype)
    except ValueError as error:
        field, reason = str(error).split(": ", 1)
        raise InvalidArgument(reason, f"--{field.replace('_', '-')}") from None
    per_rank, whole = (
        kv_bytes_per_token(config, ranks, dtype, kv_cache_dtype) for ranks in (tp, 1)
    )
    draft_kv = kv_bytes_per_token(draft, 1, dtype) if draft else 0
    # The draft model always has fast numerics: a wrong guess changes no token.
    draft_weights = weight_bytes(draft, 1, dtype, device) if draft else 0
    weights = weight_bytes(config, tp, dtype, device, batch_invariant=numerics == "exact")
    return RankMemory(
        tp=tp,
        weights=weights + draft_weights,
        kv_per_token=per_rank + draft_kv,
        kv_on_all_ranks=per_rank * tp + draft_kv,
        num_copies=per_rank * tp // whole,
        layout=KvLayout(layers=config.layers, dtype=dtype, model="", cache_dtype=kv_cache_dtype),
        draft_kv_per_token=draft_kv,
    )


@plan_app.command("memory")
def memory_command(
    model: Annotated[str, typer.Argument(help="A model, named as for `tandem serve`.")],
    tp: Annotated[
        list[int] | None, typer.Option(help="Ranks; may be given several times, for several rows.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    quantization: Annotated[
        str | None,
        typer.Option(
            help="Rounds the weights when they are loaded: int8 (CPUs only), int4 or fp8."
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="The numbers of the KV cache: auto (--dtype), int8 or fp8.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="The device of the service, cpu or cuda.")] = "cpu",
    numerics: Annotated[
        str, typer.Option(help="As in the service's configuration: exact or fast.")
    ] = "fast",
    draft_model: Annotated[
        str | None, typer.Option(help="The MODEL of `tandem serve --speculative draft=MODEL`.")
    ] = None,
    gpu_memory_gb: Annotated[
        float | None, typer.Option(help="GiB of memory of each rank's device.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float,
        typer.Option(
            "--gpu-memory-utilization",
            "--utilization",
            help="The part of that memory that a rank may use.",
        ),
    ] = 0.9,
    num_gpus: Annotated[
        float, typer.Option(help="GPUs of each rank; 0.5 if two ranks share a GPU.")
    ] = 1.0,
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block.")] = 16,
    context_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a sequence; by default the model's context.")
    ] = None,
) -> None:
    """Show the memory of MODEL on each rank: weights, KV cache per token, tokens that fit.

    With --context-tokens also the blocks and bytes of KV cache of one sequence of that length.

    Without --tp: 1, 2, 4 and 8 ranks, as far as they divide the query heads. With --draft-model:
    the memory of rank 0, which alone holds the whole draft model; no rank has more tokens than rank
    0. In bfloat16 on CPUs a model whose head is tied to its embedding holds the embedding twice;
    this command counts it once. With --device cuda, quantized weights count in --dtype, to which a
    GPU converts them when it loads them, except weights that it multiplies in FP8 or in 4 bits.
    With --numerics exact these are converted too, except experts in FP8. Activations and CUDA
    graphs are not counted: a service on GPUs measures them when it starts, and has so much less for
    its KV cache.
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
    _check("--context-tokens", context_tokens, 2, 1_048_576)
    load_config(
        None,
        {
            "model": model,
            "device": device,
            "quantization": quantization,
            "kv_cache_dtype": kv_cache_dtype,
            "numerics": numerics,
        },
    )
    folder = resolve_model(model, dtype=dtype)
    from ...workers.model.loader import open_checkpoint

    config = open_checkpoint(
        folder, quantization=quantization, context_tokens=context_tokens
    ).config
    draft = _open_draft(draft_model, config, dtype) if draft_model else None
    sizes = tp or [each for each in DEFAULT_TPS if _divides(each, config)]
    rows = [
        rank_memory(config, each, dtype, kv_cache_dtype, draft, device=device, numerics=numerics)
        for each in sizes
    ]
    budget = None
    if gpu_memory_gb is not None:
        context = context_tokens or config.max_position_embeddings
        total = int(gpu_memory_gb * GIB)
        budget = memory_budget(total, num_gpus, gpu_memory_utilization), block_size, context
    where = "each rank" if draft is None else f"rank 0, with {draft_model} in {dtype}"
    typer.echo(f"{model}, {quantization or dtype}: {_heads(config)}; on {where}:")
    table_console().print(memory_table(rows, budget))
    for row in rows:
        if context_tokens is not None:
            sequence = row.sequence(block_size, context_tokens)
            typer.echo(
                f"tp {row.tp}: a sequence of {context_tokens:,} tokens holds {_describe(sequence)}"
            )
        if budget and row.weights > budget[0]:
            typer.echo(
                f"tp {row.tp}: the weights alone, {_size(row.weights)}, do not fit "
                f"{_size(budget[0])}"
            )


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
        list[int] | None, typer.Option(help="Ranks; may be given several times, for several rows.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    model_impl: Annotated[
        str, typer.Option(help="auto, tandem or transformers; see docs/transformers.md.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="The device of the service, cpu or cuda.")] = "cpu",
    numerics: Annotated[
        str, typer.Option(help="As in the service's configuration: exact or fast.")
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
        refused = [_refusal(config, each) for each in tp or ()]
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
    typer.echo(f"in {dtype} on {device}, on each rank:")
    sizes = tp or [each for each in DEFAULT_TPS if not _refusal(config, each)]
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


def _implementation(config: ModelConfig) -> str:
    if config.transformers is None:
        return f"by Tandem's own {config.architecture}"
    return f"by transformers' {config.architecture} over Tandem's attention"


def memory_table(rows: Sequence[RankMemory], budget: tuple[int, int, int] | None) -> Table:
    """Returns a table with a line for each number of ranks.

    `budget` adds columns for the tokens and sequences that fit: the bytes of one rank, the tokens
    of a block, and the tokens of a sequence.
    """
    columns = ["tp", "weights", "KV a token", "on all ranks", "copies of KV"]
    if budget:
        columns += ["for KV cache", "tokens", f"sequences of {budget[2]:,}"]
    table = make_table(numbers=columns)
    for row in rows:
        kv_cells = [f"{row.kv_per_token:,} B", f"{row.kv_on_all_ranks:,} B", str(row.num_copies)]
        cells = [str(row.tp), _size(row.weights), *kv_cells]
        if budget:
            rest, num_tokens, num_sequences = row.kv_cache(*budget)
            cells += [_size(rest) if rest >= 0 else "-", f"{num_tokens:,}", f"{num_sequences:,}"]
        table.add_row(*cells)
    return table


def _divides(tp: int, config: ModelConfig) -> bool:
    return all(layer.num_heads % tp == 0 for layer in config.layers)


def _heads(config: ModelConfig) -> str:
    """Returns the head counts as text; if layers differ, all of them."""
    counts = dict.fromkeys((layer.num_heads, layer.num_kv_heads) for layer in config.layers)
    return " or ".join(f"{heads} query heads, {kv_heads} KV heads" for heads, kv_heads in counts)


def _describe(sequence: SequenceMemory) -> str:
    """Returns the blocks of a sequence, and its bytes that are held and moved, as text."""
    blocks = " and ".join(
        f"{count:,} blocks of {table.block_size} tokens"
        + ("" if table.window is None else f" (window {table.window:,})")
        for table, count in zip(sequence.tables, sequence.num_blocks, strict=True)
    )
    text = f"{blocks}, {_size(sequence.held_bytes)}; moves {_size(sequence.moved_bytes)}"
    if any(table.window is not None for table in sequence.tables):
        text += f"; without windows {_size(sequence.unwindowed_bytes)}"
    return text


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB else f"{num_bytes / 1024**2:,.1f} MiB"


def _check(option: str, number: float | None, low: float, high: float) -> None:
    if number is not None and not low <= number <= high:
        raise InvalidArgument(f"must be from {low} to {high}", option)
