"""Parses the arguments of `python -m tandem.tests.bench.engine`, checked field by field."""

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

from tandem.tests.bench.engine.shapes import HF_CONFIGS
from tandem.workers.engine.config import default_chunk_tokens
from tandem.workers.kv_cache.layout import QUANTIZED
from tandem.workers.model.costs.measure import BUFFER_BYTES
from tandem.workers.model.device import DTYPES
from tandem.workers.model.quant.integer import BITS
from tandem.workers.model.quant.stored_fp8 import FP8

SWEEP_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64)
SWEEP_CONTEXTS: Final = (128, 256, 512, 1024, 2048, 4096)
SWEEP_CONTEXT_BATCH: Final = 8  # batch size of the sweep over contexts
PROFILE_BATCH: Final = 32
ROUNDED: Final = (*BITS, FP8)  # the formats to which plain weights can be rounded on load
COMPARED_CACHES: Final = {f"{dtype}-kv-cache": dtype for dtype in QUANTIZED}
COMPARED_WEIGHTS: Final = {f"{name}-weights": name for name in ROUNDED}
COMPARED: Final = (*COMPARED_CACHES, *COMPARED_WEIGHTS, "model-impl", "adapter")

_DESCRIPTION: Final = "Measures the engine's speed on this device and the limits of the device."
_EPILOG: Final = """
Decode: sequences with --context tokens and noise as KV cache step together through a whole engine
(schedule, prepare, model, sample, emit). Prefill: one prompt at a time, in chunks, from its
submission to its first token. The same run measures the floors: the sum and the copy of a large
tensor, and matrix products of the shapes of one decoder layer over the tokens of a chunk. The
floor of a decode step is the longer of two times: reading the weights and the KV cache once, and
computing the matrix products. The roofline share is that floor divided by the step's time. On a
GPU, --profile waits for the device between the parts, which makes steps slower; take step times
from a run without it. --compare measures a variant in turns with the plain run on the same machine:
a KV cache of 8 or 4 bits, weights rounded when they are loaded, transformers' code in place of
ours, or an adapter of --lora-rank, both used by all rows and loaded but unused. It prints each
variant's time divided by the plain time.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBenchOptions:
    """Holds the arguments, which are not yet checked against the model or the machine."""

    shape: str | None
    model: Path | None
    random_weights: bool
    device: torch.device
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    compare: str | None
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    steps: int
    threads: int | None
    batch_invariant: bool
    lora_rank: int | None
    model_impl: str
    profile: bool
    transformers: bool
    plot: Path | None
    json: Path | None

    @property
    def chunk(self) -> int:
        """Returns the maximum number of tokens of a prefill step."""
        return default_chunk_tokens(self.device.type)

    @property
    def name(self) -> str:
        return self.shape or (self.model.resolve().name if self.model else "")

    @property
    def decodes(self) -> list[tuple[int, int]]:
        """Returns every (batch, context) to decode."""
        wanted = list(itertools.product(self.batches, self.contexts))
        if self.plot:
            wanted += [(batch, self.contexts[0]) for batch in SWEEP_BATCHES]
            wanted += [(SWEEP_CONTEXT_BATCH, context) for context in SWEEP_CONTEXTS]
        return wanted


def parse(arguments: list[str] | None) -> EngineBenchOptions:
    """Returns the options; exits with 2 after one line on stderr if an argument is invalid."""
    parser = _parser()
    options = EngineBenchOptions(**vars(parser.parse_args(arguments)))
    if options.model is None and not options.random_weights:
        parser.error(
            f"--shape {options.shape} has no weights: add --random-weights, or give --model"
        )
    if options.kv_cache_dtype != "auto" and options.compare in COMPARED_CACHES:
        parser.error(f"--compare {options.compare} needs --kv-cache-dtype auto")
    if options.model_impl == "transformers" and options.compare == "model-impl":
        parser.error("--compare model-impl needs --model-impl auto or tandem")
    if options.lora_rank is None and options.compare == "adapter":
        parser.error("--compare adapter needs --lora-rank")
    if options.profile and PROFILE_BATCH not in options.batches:
        return replace(options, batches=tuple(sorted((*options.batches, PROFILE_BATCH))))
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tandem.tests.bench.engine", description=_DESCRIPTION, epilog=_EPILOG
    )
    # Errors are one line, without the usage.
    parser.error = lambda message: parser.exit(2, f"bench: {message}\n")  # type: ignore[method-assign]
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--shape", choices=HF_CONFIGS)
    which.add_argument("--model", type=Path, metavar="FOLDER")
    add = parser.add_argument
    add("--random-weights", action="store_true", help="read only config.json of --model")
    add("--device", type=_device, default="cpu", help="cpu, cuda or cuda:N")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--quantization", choices=ROUNDED, help="format to round plain weights to on load")
    add("--kv-cache-dtype", choices=("auto", *QUANTIZED), default="auto")
    add("--compare", choices=COMPARED, help="variant to measure in turns with the plain run")
    add("--batches", type=_numbers(1, 1024), default=(1, 16, 64, 256), metavar="N,N")
    add(
        "--context",
        dest="contexts",
        type=_numbers(1, 1 << 20),
        default=(256,),
        metavar="N,N",
        help="tokens before the first decoded token; every batch is measured at each",
    )
    add(
        "--prompts",
        type=_numbers(1, 1 << 20),
        default=(512, 8192),
        metavar="N,N",
        help="tokens of each prompt",
    )
    add(
        "--steps",
        type=_number(20, 10_000),
        default=24,
        help="measured steps of each batch, after the warm-up",
    )
    add("--threads", type=_number(1, 1024), help="threads of torch on a CPU; default: its choice")
    add("--batch-invariant", action="store_true", help="use the GPU kernels of `numerics: exact`")
    add(
        "--lora-rank",
        type=_number(1, 1024),
        metavar="R",
        help="use a LoRA adapter of this rank on all linear layers for all rows",
    )
    add(
        "--model-impl",
        choices=("auto", "tandem", "transformers"),
        default="auto",
        help="the implementation of the model",
    )
    add(
        "--profile", action="store_true", help=f"split steps into parts; adds batch {PROFILE_BATCH}"
    )
    add("--transformers", action="store_true", help="also measure transformers' generate_batch")
    add(
        "--plot",
        type=_plot_file,
        metavar="FILE.png",
        help="plot the step time over batch and context",
    )
    add("--json", type=_output_file, metavar="FILE")
    return parser


def _number(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"must be an integer from {least} to {most}, is {text[:40]!r}"
            )
        return int(text)

    return parse


def _numbers(least: int, most: int) -> Callable[[str], tuple[int, ...]]:
    one = _number(least, most)
    return lambda text: tuple(sorted({one(item) for item in text.split(",")}))


def _device(text: str) -> torch.device:
    kind, _, index = text.partition(":")
    if kind not in BUFFER_BYTES or (
        ":" in text and not (kind == "cuda" and index.isascii() and index.isdigit())
    ):
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, is {text[:40]!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"{text}: torch finds no CUDA device here")
    return torch.device(text)


def _output_file(text: str) -> Path:
    if not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{Path(text).parent} is not a folder")
    return Path(text)


def _plot_file(text: str) -> Path:
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "matplotlib is not installed (pip install 'tandem-llm[bench]')"
        )
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text} must end in .png")
    return _output_file(text)
