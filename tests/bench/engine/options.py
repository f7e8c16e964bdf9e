"""Parses the arguments of `python -m tandem.tests.bench.engine`, checked field by field."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

from tandem.tests.bench.engine.floor import BUFFER_BYTES
from tandem.tests.bench.engine.shapes import SHAPES
from tandem.workers.engine.config import default_chunk_tokens
from tandem.workers.kv_cache.layout import QUANTIZED
from tandem.workers.model.device import DTYPES
from tandem.workers.model.registry import ROUNDED

SWEEP_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64)
SWEEP_CONTEXTS: Final = (128, 256, 512, 1024, 2048, 4096)
SWEEP_CONTEXT_BATCH: Final = 8  # of the sequences whose context grows
PROFILE_BATCH: Final = 32
COMPARED_CACHES: Final = {f"{dtype}-kv-cache": dtype for dtype in QUANTIZED}
COMPARED_WEIGHTS: Final = {f"{name}-weights": name for name in ROUNDED}
COMPARED: Final = (*COMPARED_CACHES, *COMPARED_WEIGHTS, "model-impl", "adapter")

_DESCRIPTION: Final = "How fast the engine runs on this device, beside what the device could do."
_EPILOG: Final = """
Decode: sequences that hold --context tokens and noise for a KV cache step together through a whole engine (schedule,
prepare, model, sample, emit). Prefill: one prompt at a time, in chunks, from its submission to its first token. The
floors are measured in the same run: the sum and the copy of a large tensor, and products of the shapes of one decoder
layer over 512 tokens. A decode step's floor is the longer of reading the weights and the KV cache once and of
computing its products; its roofline share is that floor over its time. On a GPU --profile waits for the device
between the parts, which makes the steps slower: take the step times from a run without it. --compare measures, in
turns and on the same machine, a KV cache of 8 bits, weights rounded when they are loaded, transformers' code in place
of ours, or an adapter of --lora-rank, used by all rows and loaded but unused, and states their time over that without.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBenchOptions:
    """Holds the arguments, checked one by one but not yet against the model or the machine."""

    shape: str | None
    model: Path | None
    random_weights: bool
    device: torch.device
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    compare: str | None
    batches: tuple[int, ...]
    context: int
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
        """Tokens of a prefill step."""
        return default_chunk_tokens(self.device.type)

    @property
    def name(self) -> str:
        return self.shape or (self.model.resolve().name if self.model else "")

    @property
    def decodes(self) -> list[tuple[int, int]]:
        """Every (batch, context) that is decoded."""
        wanted = [(batch, self.context) for batch in self.batches]
        if self.plot:
            wanted += [(batch, self.context) for batch in SWEEP_BATCHES]
            wanted += [(SWEEP_CONTEXT_BATCH, context) for context in SWEEP_CONTEXTS]
        return wanted


def parse(arguments: list[str] | None) -> EngineBenchOptions:
    """Returns the options; exits with 2 after one line on stderr if an argument is not valid."""
    parser = _parser()
    options = EngineBenchOptions(**vars(parser.parse_args(arguments)))
    if options.model is None and not options.random_weights:
        parser.error(
            f"--shape {options.shape} has no weights: add --random-weights, or give --model"
        )
    cache_dtypes = {options.kv_cache_dtype, COMPARED_CACHES.get(options.compare or "", "auto")} - {
        "auto"
    }
    if cache_dtypes and options.device.type != "cpu":
        parser.error(f"a KV cache of {min(cache_dtypes)} has kernels on cpu only")
    if options.kv_cache_dtype != "auto" and options.compare in COMPARED_CACHES:
        parser.error(f"--compare {options.compare} compares it with --kv-cache-dtype auto")
    if options.model_impl == "transformers" and options.compare == "model-impl":
        parser.error("--compare model-impl compares it with --model-impl tandem")
    if options.lora_rank is None and options.compare == "adapter":
        parser.error("--compare adapter needs --lora-rank")
    if options.profile and PROFILE_BATCH not in options.batches:
        return replace(options, batches=tuple(sorted((*options.batches, PROFILE_BATCH))))
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tandem.tests.bench.engine", description=_DESCRIPTION, epilog=_EPILOG
    )
    # One line, without the usage.
    parser.error = lambda message: parser.exit(2, f"bench: {message}\n")  # type: ignore[method-assign]
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--shape", choices=SHAPES)
    which.add_argument("--model", type=Path, metavar="FOLDER")
    add = parser.add_argument
    add("--random-weights", action="store_true", help="of --model only config.json is read")
    add("--device", type=_device, default="cpu", help="cpu, cuda or cuda:N")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--quantization", choices=ROUNDED, help="of plain weights, when they are loaded")
    add("--kv-cache-dtype", choices=("auto", *QUANTIZED), default="auto")
    add("--compare", choices=COMPARED, help="in turns: its time, over that without")
    add("--batches", type=_numbers(1, 1024), default=(1, 16, 64, 256), metavar="N,N")
    add(
        "--context",
        type=_number(1, 1 << 20),
        default=256,
        metavar="TOKENS",
        help="before the first decoded token",
    )
    add(
        "--prompts",
        type=_numbers(1, 1 << 20),
        default=(512, 8192),
        metavar="N,N",
        help="tokens of each",
    )
    add(
        "--steps",
        type=_number(20, 10_000),
        default=24,
        help="measured for each batch, after the warm-up",
    )
    add("--threads", type=_number(1, 1024), help="of torch on the CPU; its own choice if not given")
    add("--batch-invariant", action="store_true", help="on a GPU the kernels of `numerics: exact`")
    add(
        "--lora-rank",
        type=_number(1, 1024),
        metavar="R",
        help="all rows use a LoRA adapter of all linear layers",
    )
    add(
        "--model-impl",
        choices=("auto", "tandem", "transformers"),
        default="auto",
        help="whose code computes the model",
    )
    add("--profile", action="store_true", help=f"split the step, at batch {PROFILE_BATCH} too")
    add("--transformers", action="store_true", help="also measure transformers' generate_batch")
    add(
        "--plot",
        type=_plot_file,
        metavar="FILE.png",
        help="draw step time against batch and context",
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
        raise argparse.ArgumentTypeError(f"{Path(text).parent} is no folder")
    return Path(text)


def _plot_file(text: str) -> Path:
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "matplotlib is not installed (pip install 'tandem-llm[bench]')"
        )
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text} must end in .png")
    return _output_file(text)
