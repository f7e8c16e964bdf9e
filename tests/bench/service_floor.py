"""Prints the most tokens per second that this machine allows a service of a model.

`python -m tandem.tests.bench.service_floor --model FOLDER --concurrency 1 8 32`. The requests run
in waves: the prompts of a wave are computed, then its sequences step together. Each step takes the
longer of two times: reading weights and KV cache once, and computing the matrix products. Both
rates are measured here, unless they are given. `--measured` prints a service's figures as shares.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem.cluster.arithmetic import make_cost
from tandem.cluster.explain.machine import measure_machine
from tandem.tests.bench.engine.shapes import HF_CONFIGS
from tandem.workers.engine.config import default_chunk_tokens
from tandem.workers.model.config import CheckpointError, Fields, ModelConfig
from tandem.workers.model.costs.inference import InferenceCost, Work
from tandem.workers.model.costs.roofline import Roofline
from tandem.workers.model.device import DTYPES
from tandem.workers.model.registry import load_model_config, parse_model_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Describes the requests: `concurrency` at a time, all of the same lengths in tokens."""

    concurrency: int
    num_input: int
    num_output: int


def wave_seconds(cost: InferenceCost, load: Load, device: Roofline) -> float:
    """Returns the least time of one wave of requests.

    The prompts of a wave are computed together, which reads the weights once. They give each
    sequence its first token; each later token takes a decode step.
    """
    prompt = cost.prefill(load.num_input)
    prompts = Work(prompt.num_bytes, load.concurrency * prompt.flops)
    steps = cost.decodes(load.num_input, load.num_output, load.concurrency)
    return sum(device.seconds(work) for work in (prompts, *steps))


def tokens_per_s(cost: InferenceCost, load: Load, device: Roofline) -> float:
    """Returns the output tokens per second of a service that only waits for memory or products."""
    return load.concurrency * load.num_output / wave_seconds(cost, load, device)


def main(arguments: list[str] | None = None) -> int:
    """Prints a row per concurrency; returns 0, or 2 after one line on stderr."""
    options = _parse(arguments)
    try:
        config = _config(options)
    except CheckpointError as error:
        print(f"service_floor: {error}", file=sys.stderr)
        return 2
    if options.threads:
        torch.set_num_threads(options.threads)
    device = _device(options, config)
    cost = make_cost(config, options.dtype)
    print(
        f"read {device.bytes_per_s / 1e9:.1f} GB/s, matmul "
        f"{device.flops_per_s / 1e12:.3f} TFLOP/s, {options.dtype}, "
        f"{options.input} input and {options.output} output tokens"
    )
    print(f"{'concurrency':>11} {'floor tokens/s':>15} {'measured':>10} {'share':>7}")
    for place, concurrency in enumerate(options.concurrency):
        load = Load(concurrency=concurrency, num_input=options.input, num_output=options.output)
        limit = tokens_per_s(cost, load, device)
        row = f"{concurrency:>11} {limit:>15.1f}"
        if place < len(options.measured):
            measured = options.measured[place]
            row += f" {measured:>10.1f} {measured / limit:>7.2f}"
        print(row)
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tandem.tests.bench.service_floor", description=__doc__
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, metavar="FOLDER")
    model.add_argument("--shape", choices=tuple(HF_CONFIGS))
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--concurrency", type=int, nargs="+", default=(1, 8, 32))
    parser.add_argument("--input", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="new tokens of a request")
    parser.add_argument("--threads", type=int, help="threads of torch; default: its choice")
    parser.add_argument("--bandwidth", type=float, help="bytes/s in GB; default: measured")
    parser.add_argument("--matmul-rate", type=float, help="FLOP/s in TFLOP; default: measured")
    parser.add_argument(
        "--measured",
        type=float,
        nargs="+",
        default=(),
        help="output tokens/s of a service at each concurrency",
    )
    return parser.parse_args(arguments)


def _config(options: argparse.Namespace) -> ModelConfig:
    if options.model is not None:
        return load_model_config(options.model)
    return parse_model_config(Fields(options.shape, dict(HF_CONFIGS[options.shape])))


def _device(options: argparse.Namespace, config: ModelConfig) -> Roofline:
    """Returns the given rates, and measures the others."""
    if options.bandwidth and options.matmul_rate:
        return Roofline(bytes_per_s=options.bandwidth * 1e9, flops_per_s=options.matmul_rate * 1e12)
    measured = measure_machine(config, options.dtype, default_chunk_tokens("cpu"))
    return Roofline(
        bytes_per_s=(options.bandwidth or 0) * 1e9 or measured.bytes_per_s,
        flops_per_s=(options.matmul_rate or 0) * 1e12 or measured.flops_per_s,
    )


if __name__ == "__main__":
    sys.exit(main())
