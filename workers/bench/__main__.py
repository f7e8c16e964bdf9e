"""`python -m tandem.workers.bench`: how fast the engine runs on this device, beside what the device could do.

Needs no service and no Ray, and with --random-weights no checkpoint.
"""

import gc
import json
import statistics
import sys
from dataclasses import replace
from datetime import UTC, datetime

import psutil
import torch

from ..model.checkpoint import check_checkpoint
from ..model.config import CheckpointError, ModelConfig, load_model_config
from ..model.kv_store import kv_bytes_per_block
from ..model.weights import DTYPES, Weights
from .floor import BUFFER_BYTES, Floors, measure_floors
from .options import SWEEP_BATCHES, SWEEP_CONTEXT_BATCH, SWEEP_CONTEXTS, EngineBenchOptions, parse
from .plot import plot
from .report import DecodeFigure, PrefillFigure, Report, decode_figure
from .shapes import SHAPES, BenchError, RandomWeights, decode_cost, prefill_cost, weight_bytes
from .steps import BLOCK_SIZE, BenchRunner, blocks_for


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints. Returns 0, or 2 after one line on stderr if it cannot run as asked."""
    options = parse(arguments)
    try:
        report = measure(options)
        if options.json:
            options.json.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    except (BenchError, CheckpointError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"bench: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    print(report.as_text())
    return 0


def measure(options: EngineBenchOptions) -> Report:
    """Runs everything that was asked for. Raises BenchError or CheckpointError, before anything is loaded, if it
    cannot."""
    config = _config(options)
    num_blocks = _check(options, config)
    if options.threads:
        torch.set_num_threads(options.threads)
    report = _measure_engine(options, config, num_blocks)
    if options.plot:
        title = f"{report.shape}, {report.dtype}, {report.device}: one decode step"
        plot(options.plot, title, report.sweep_batch, report.sweep_context)
    return _with_transformers(options, config, report) if options.transformers else report


def _measure_engine(options: EngineBenchOptions, config: ModelConfig, num_blocks: int) -> Report:
    """Holds the model for no longer than the call: transformers needs the memory."""
    floors = measure_floors(config, DTYPES[options.dtype], options.device)
    weights = _weights(options, config)
    bed = BenchRunner(
        config, weights, dtype=options.dtype, num_blocks=num_blocks, chunk=options.chunk, exact=options.profile
    )

    def decode(batch: int, context: int) -> DecodeFigure:
        return _decode(options, config, floors, bed, batch, context)

    sweeps = options.plot is not None
    return Report(
        shape=options.name,
        dtype=options.dtype,
        device=torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else "cpu",
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        floors=floors,
        decode=tuple(decode(batch, options.context) for batch in options.batches),
        prefill=tuple(_prefill(options, config, floors, bed, prompt) for prompt in options.prompts),
        sweep_batch=tuple(decode(batch, options.context) for batch in SWEEP_BATCHES if sweeps),
        sweep_context=tuple(decode(SWEEP_CONTEXT_BATCH, context) for context in SWEEP_CONTEXTS if sweeps),
    )


def _config(options: EngineBenchOptions) -> ModelConfig:
    if options.model is None:
        return SHAPES[options.shape or ""]
    return load_model_config(options.model) if options.random_weights else check_checkpoint(options.model)


def _weights(options: EngineBenchOptions, config: ModelConfig) -> Weights:
    dtype = DTYPES[options.dtype]
    if options.random_weights or options.model is None:
        return RandomWeights(config, dtype=dtype, device=options.device)
    return Weights(options.model, dtype=dtype, device=options.device)


def _check(options: EngineBenchOptions, config: ModelConfig) -> int:
    """Returns the KV blocks to take. Raises BenchError if the model or the machine is too small."""
    longest = config.max_position_embeddings
    for option, context in [("--context", c) for _, c in options.decodes] + [("--prompts", p) for p in options.prompts]:
        reach = context + (0 if option == "--prompts" else BLOCK_SIZE + options.steps)
        if reach > longest:
            raise BenchError(f"{option}: {context} tokens need {reach} positions, {options.name} has {longest}")
    decode_blocks = [blocks_for(batch, context, options.steps) for batch, context in options.decodes]
    num_blocks = max([*decode_blocks, *(-(-prompt // BLOCK_SIZE) + 1 for prompt in options.prompts)])
    weights = weight_bytes(config, options.dtype, options.device)
    kv = num_blocks * kv_bytes_per_block(config, BLOCK_SIZE, options.dtype)
    rows = max(options.chunk, *(batch for batch, _ in options.decodes))
    beside = 8 * rows * (config.vocab_size + 4 * config.intermediate_size)  # logits and activations, in float32 twice
    beside = max(beside, 2 * BUFFER_BYTES[options.device.type] - weights)  # the floors come before the weights
    free = _free_bytes(options.device)
    if weights + kv + beside > free:
        raise BenchError(
            f"{options.name} in {options.dtype} needs {(weights + kv + beside) / 1e9:.1f} GB (weights "
            f"{weights / 1e9:.1f}, KV cache {kv / 1e9:.1f}); {options.device} has {free / 1e9:.1f} GB free"
        )
    return num_blocks


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def _decode(
    options: EngineBenchOptions, config: ModelConfig, floors: Floors, bed: BenchRunner, batch: int, context: int
) -> DecodeFigure:
    run = bed.decode(batch, context, options.steps)
    cost = decode_cost(config, options.dtype, batch, run.context)
    figure = decode_figure(run, context=context, cost=cost, floors=floors, has_split=options.has_split)
    _tell(f"decode, batch {batch}, context {context}: {figure.step_ms:.3f} ms/step")
    if not options.raw:
        return figure
    seconds, sampled = bed.replay(run)
    return replace(figure, raw_ms=statistics.median(seconds) * 1e3, raw_same_tokens=sampled == run.sampled)


def _prefill(
    options: EngineBenchOptions, config: ModelConfig, floors: Floors, bed: BenchRunner, prompt: int
) -> PrefillFigure:
    seconds, token = bed.prefill(prompt)
    _tell(f"prefill of {prompt}: {seconds:.3f} s")
    flops = prefill_cost(config, options.dtype, prompt).flops
    return PrefillFigure(
        prompt=prompt,
        seconds=seconds,
        tokens_per_s=prompt / seconds,
        matmul_share=flops / floors.matmul_flops_per_s / seconds,
        first_token=token,
    )


def _with_transformers(options: EngineBenchOptions, config: ModelConfig, report: Report) -> Report:
    from .transformers_peer import TransformersPeer  # seconds of import that nothing else needs

    gc.collect()
    if options.device.type == "cuda":
        torch.cuda.empty_cache()
    peer = TransformersPeer(config, _weights(options, config), folder=options.model)

    def decode(figure: DecodeFigure) -> DecodeFigure:
        seconds = peer.decode_seconds(figure.batch, figure.context, options.steps)
        _tell(f"transformers' decode, batch {figure.batch}, context {figure.context}: {seconds * 1e3:.3f} ms/step")
        return replace(figure, transformers_ms=seconds * 1e3)

    def prefill(figure: PrefillFigure) -> PrefillFigure:
        seconds = peer.prefill_seconds(figure.prompt)
        _tell(f"transformers' prefill of {figure.prompt}: {seconds:.3f} s")
        return replace(figure, transformers_tokens_per_s=figure.prompt / seconds)

    return replace(
        report,
        transformers=peer.method,
        decode=tuple(decode(figure) for figure in report.decode),
        prefill=tuple(prefill(figure) for figure in report.prefill),
    )


def _tell(progress: str) -> None:
    """A large model or a slow peer takes minutes, and may be cut short."""
    print(f"bench: {progress}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
