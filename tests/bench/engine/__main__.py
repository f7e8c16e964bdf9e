"""Measures the engine's speed and the device's limits: `python -m tandem.tests.bench.engine`.

Needs no service and no Ray. With --random-weights it needs no checkpoint.
"""

import gc
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, Final

import psutil
import torch

from tandem.proto.errors import InvalidArgument
from tandem.tests.bench.engine.compare import adapter_variants, compare
from tandem.tests.bench.engine.options import (
    COMPARED_CACHES,
    COMPARED_WEIGHTS,
    SWEEP_BATCHES,
    SWEEP_CONTEXT_BATCH,
    SWEEP_CONTEXTS,
    EngineBenchOptions,
    parse,
)
from tandem.tests.bench.engine.report import (
    DecodeFigure,
    PrefillFigure,
    Report,
    plot,
    print_progress,
)
from tandem.tests.bench.engine.shapes import (
    HF_CONFIGS,
    cost_of,
    loaded_bytes,
    random_weight,
)
from tandem.tests.bench.engine.steps import (
    BLOCK_SIZE,
    PARTS,
    BenchRunner,
    blocks_for,
    blocks_of,
    states_for,
)
from tandem.workers.kv_cache.tables import plan_tables
from tandem.workers.model.config import CheckpointError, Fields, ModelConfig
from tandem.workers.model.costs.measure import BUFFER_BYTES, Floors, measure_floors
from tandem.workers.model.device import DTYPES, enter_device
from tandem.workers.model.footprint import CacheBytes, kv_layout
from tandem.workers.model.loader import (
    ReadWeight,
    check_checkpoint,
    checkpoint_reader,
    open_checkpoint,
)
from tandem.workers.model.registry import load_model_config, parse_model_config, with_quantization

_OTHERS: Final[dict[str, dict[str, Any]]] = {
    **{name: {"kv_cache_dtype": dtype} for name, dtype in COMPARED_CACHES.items()},
    **{name: {"quantization": quantization} for name, quantization in COMPARED_WEIGHTS.items()},
    "model-impl": {"model_impl": "transformers"},
}
"""By the value of `--compare`: the options of the variant that takes turns with the plain run."""

OnFigure = Callable[[DecodeFigure | PrefillFigure], None]


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints; returns 0, or 2 after one line on stderr if it cannot run as asked."""
    options = parse(arguments)
    try:
        report = measure(options)
        if options.json:
            options.json.write_text(json.dumps(asdict(report), indent=2) + "\n")
    except (InvalidArgument, CheckpointError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"bench: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    print(report.as_text())
    return 0


def measure(options: EngineBenchOptions, on_figure: OnFigure = lambda figure: None) -> Report:
    """Runs all requested measurements; calls `on_figure` after each decode and prefill.

    Raises InvalidArgument or CheckpointError, before it loads anything, if it cannot run them.
    """
    config = _config(options)
    num_blocks = _check(options, config)
    if options.threads:
        torch.set_num_threads(options.threads)
    enter_device(options.device)
    report = _measure_engine(options, config, num_blocks, on_figure)
    if options.plot:
        title = f"{report.shape}, {report.dtype}, {report.device}: one decode step"
        plot(options.plot, title, report.sweep_batch, report.sweep_context)
    return _with_transformers(options, report) if options.transformers else report


def _config(options: EngineBenchOptions) -> ModelConfig:
    """Returns the model's config; raises CheckpointError if the model cannot be used."""
    if options.model is None:
        shape = options.shape or ""
        config = parse_model_config(Fields(shape, dict(HF_CONFIGS[shape])), options.model_impl)
    else:
        read = load_model_config if options.random_weights else check_checkpoint
        config = read(options.model, options.model_impl)
    return with_quantization(config, options.quantization) if options.quantization else config


def _measure_engine(
    options: EngineBenchOptions, config: ModelConfig, num_blocks: int, on_figure: OnFigure
) -> Report:
    """Measures the engine and frees the model, because transformers needs the memory."""
    floors = measure_floors(config, DTYPES[options.dtype], options.device, options.chunk)
    runner = _runner(options, config, num_blocks)

    def decode(batch: int, context: int) -> DecodeFigure:
        figure = _decode(options, config, floors, runner, batch, context)
        on_figure(figure)
        return figure

    def prefill(prompt: int) -> PrefillFigure:
        figure = _prefill(options, config, floors, runner, prompt)
        on_figure(figure)
        return figure

    sweeps = options.plot is not None
    report = Report(
        shape=options.name,
        dtype=_dtype(options),
        device=torch.cuda.get_device_name(options.device)
        if options.device.type == "cuda"
        else "cpu",
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        floors=floors,
        decode=tuple(
            decode(batch, context) for context in options.contexts for batch in options.batches
        ),
        prefill=tuple(prefill(prompt) for prompt in options.prompts),
        sweep_batch=tuple(decode(batch, options.contexts[0]) for batch in SWEEP_BATCHES if sweeps),
        sweep_context=tuple(
            decode(SWEEP_CONTEXT_BATCH, context) for context in SWEEP_CONTEXTS if sweeps
        ),
    )
    if options.compare is None:
        return report
    if options.compare == "adapter":
        return compare(
            report, adapter_variants(config, runner, options.lora_rank or 1), options.steps
        )
    other = replace(options, **_OTHERS[options.compare])
    second = _runner(other, _config(other), num_blocks)
    return compare(
        report, {"plain": lambda: runner, options.compare: lambda: second}, options.steps
    )


def _runner(options: EngineBenchOptions, config: ModelConfig, num_blocks: int) -> BenchRunner:
    return BenchRunner(
        config,
        _weights(options),
        dtype=options.dtype,
        cache_dtype=options.kv_cache_dtype,
        device=options.device,
        num_blocks=num_blocks,
        chunk=options.chunk,
        exact=options.profile,
        batch_invariant=options.batch_invariant,
        lora_rank=None if options.compare == "adapter" else options.lora_rank,
        num_states=states_for(config, max(batch for batch, _ in options.decodes)),
    )


def _weights(options: EngineBenchOptions) -> ReadWeight:
    if options.random_weights or options.model is None:
        return random_weight
    return checkpoint_reader(open_checkpoint(options.model, options.model_impl))


def _dtype(options: EngineBenchOptions) -> str:
    cache = "" if options.kv_cache_dtype == "auto" else f", KV cache {options.kv_cache_dtype}"
    return f"{options.quantization or ''} {options.dtype}{cache}".strip()


def _check(options: EngineBenchOptions, config: ModelConfig) -> int:
    """Returns the number of KV blocks to allocate.

    Raises InvalidArgument if the model or the machine is too small.
    """
    longest = config.max_position_embeddings
    for option, context in [("--context", c) for _, c in options.decodes] + [
        ("--prompts", p) for p in options.prompts
    ]:
        reach = context + (0 if option == "--prompts" else BLOCK_SIZE + options.steps)
        if reach > longest:
            raise InvalidArgument(
                f"{context} tokens need {reach} positions, {options.name} has {longest}", option
            )
    layout = kv_layout(config, options.dtype, options.kv_cache_dtype)
    tables = plan_tables(layout, BLOCK_SIZE)
    decode_blocks = [
        blocks_for(batch, context, options.steps, tables) for batch, context in options.decodes
    ]
    prompt_blocks = [blocks_of(prompt + BLOCK_SIZE, tables) for prompt in options.prompts]
    num_blocks = max(decode_blocks + prompt_blocks)
    weights = loaded_bytes(config, options.dtype, options.device)
    kv = num_blocks * CacheBytes.of(layout, 1, block_size=BLOCK_SIZE).block
    if options.compare in _OTHERS:
        weights *= 2
        kv *= 2
    rows = max(options.chunk, *(batch for batch, _ in options.decodes))
    # Logits and activations, in float32 twice.
    beside = 8 * rows * (config.vocab_size + 4 * config.intermediate_size)
    # The floors are measured before the weights are loaded.
    beside = max(beside, 2 * BUFFER_BYTES[options.device.type] - weights)
    free = _free_bytes(options.device)
    if weights + kv + beside > free:
        raise InvalidArgument(
            f"{options.name} in {options.dtype} needs {(weights + kv + beside) / 1e9:.1f} GB "
            f"(weights {weights / 1e9:.1f}, KV cache {kv / 1e9:.1f}); "
            f"{options.device} has {free / 1e9:.1f} GB free"
        )
    return num_blocks


def _free_bytes(device: torch.device) -> int:
    return (
        torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda"
        else psutil.virtual_memory().available
    )


def _decode(
    options: EngineBenchOptions,
    config: ModelConfig,
    floors: Floors,
    runner: BenchRunner,
    batch: int,
    context: int,
) -> DecodeFigure:
    run = runner.decode(batch, context, options.steps)
    cost = cost_of(config, options.dtype, options.kv_cache_dtype, options.device.type).decode(
        run.context, batch
    )
    totals = [sum(step.values()) for step in run.steps]
    seconds = statistics.median(totals)
    has_split = options.profile or options.device.type == "cpu"
    overheads = [1 - step["model"] / total for step, total in zip(run.steps, totals, strict=True)]
    print_progress(f"decode, batch {batch}, context {context}: {seconds * 1e3:.3f} ms/step")
    return DecodeFigure(
        batch=batch,
        context=context,
        step_ms=seconds * 1e3,
        p90_ms=statistics.quantiles(totals, n=10, method="inclusive")[-1] * 1e3,
        tokens_per_s=batch / seconds,
        floor_ms=floors.seconds(cost) * 1e3,
        roofline_share=floors.seconds(cost) / seconds,
        bandwidth_share=cost[0] / floors.bytes_per_s / seconds,
        matmul_share=cost[1] / floors.matmul_flops_per_s / seconds,
        split_ms={part: statistics.median(step[part] for step in run.steps) * 1e3 for part in PARTS}
        if has_split
        else None,
        overhead_share=statistics.median(overheads) if has_split else None,
    )


def _prefill(
    options: EngineBenchOptions,
    config: ModelConfig,
    floors: Floors,
    runner: BenchRunner,
    prompt: int,
) -> PrefillFigure:
    seconds, token = runner.prefill(prompt)
    print_progress(f"prefill of {prompt}: {seconds:.3f} s")
    return PrefillFigure(
        prompt=prompt,
        seconds=seconds,
        tokens_per_s=prompt / seconds,
        matmul_share=cost_of(config, options.dtype).prefill(prompt).flops
        / floors.matmul_flops_per_s
        / seconds,
        first_token=token,
    )


def _with_transformers(options: EngineBenchOptions, report: Report) -> Report:
    from transformers import AutoConfig  # the import takes seconds, and nothing else needs it

    from tandem.tests.bench.engine.transformers_peer import TransformersPeer

    gc.collect()
    if options.device.type == "cuda":
        torch.cuda.empty_cache()
    fields = dict(HF_CONFIGS[options.shape]) if options.shape else {}
    config = (
        AutoConfig.from_pretrained(options.model)
        if options.model
        else AutoConfig.for_model(**fields)
    )
    peer = TransformersPeer(
        config, _weights(options), dtype=DTYPES[options.dtype], device=options.device
    )
    decode = []
    prefill = []
    for decoded in report.decode:
        seconds = peer.decode_seconds(decoded.batch, decoded.context, options.steps)
        name = f"transformers' decode, batch {decoded.batch}, context {decoded.context}"
        print_progress(f"{name}: {seconds * 1e3:.3f} ms/step")
        decode.append(replace(decoded, transformers_ms=seconds * 1e3))
    for prefilled in report.prefill:
        seconds = peer.prefill_seconds(prefilled.prompt)
        print_progress(f"transformers' prefill of {prefilled.prompt}: {seconds:.3f} s")
        prefill.append(replace(prefilled, transformers_tokens_per_s=prefilled.prompt / seconds))
    return replace(report, decode=tuple(decode), prefill=tuple(prefill))


if __name__ == "__main__":
    sys.exit(main())
