"""`python -m tandem.tests.decoders_page` tests every decoder of the table and writes
docs/transformers.md; minutes.
"""

import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import torch
import transformers

from tandem.proto.limits import MAX_TOKENS
from tandem.tests.source import ROOT
from tandem.tests.tiny_decoders import DECODERS, make_tiny_decoder
from tandem.tests.tiny_multimodal import MULTIMODAL
from tandem.tests.workers.model import decoder_checks as checks
from tandem.tests.workers.model.helpers import reference
from tandem.workers.model.generic.config import PUBLISHED_NAMES
from tandem.workers.model.registry import TEXT_MODELS

PAGE: Final = ROOT / "docs" / "transformers.md"

_HEAD: Final = """# Decoders of transformers

Written by `python -m tandem.tests.decoders_page`. `tandem check MODEL` prints if and how a model \
would run.

[models.md](models.md) lists the architectures with a file in Tandem. Any other decoder of \
transformers (tested with {version}) runs through transformers' modelling code. Tandem replaces \
its attention, so paged KV cache, chunked prefill, prefix cache, KV transfer and tensor \
parallelism work in the same way. Checkpoints of these names run as transformers' \
class: {published}.

`model_impl` chooses the code, as in vLLM:

- `auto` (default): Tandem's if it has the architecture, else transformers'
- `tandem`: Tandem's; other architectures are refused
- `transformers`: transformers'

Rules for transformers' code:

- Code in a model's folder is never run.
- Weights are converted as in transformers.
- Several ranks need a plan in transformers (`base_model_tp_plan`), and `tp` must divide the KV \
heads. With latent attention it must divide the query heads.
- Latent attention (DeepSeek V2 and later) keeps the latent and the shared part of the key: one \
row of a token for all heads, on every rank. `kv_cache_dtype` must be `auto`.
- Layers that read the keys and values of an earlier layer (Gemma 3n, Gemma 4) keep no KV cache.
- Sparse attention (DeepSeek V3.2, GLM-5) runs as dense attention up to `index_topk` tokens. Set \
`context_tokens` to at most this number; longer contexts are refused.
- Layers that keep a state for each sequence (Mamba, Mamba 2, gated delta nets, short \
convolutions) compute it with Tandem's kernels. Every rank holds the whole state. On CPUs only.
- Nemotron-H through transformers' code raises the time steps of Mamba 2 to `time_step_min`. \
Tandem's code has the limits that the checkpoint states (`time_step_limit`), as other engines have.
- On GPUs, sums of transformers' code depend on the batch: `numerics: exact` is refused.
- A decoder without positions (Mamba, Mamba 2, Falcon-Mamba) names no context length. Its context \
is {most:,} tokens, the longest prompt that a service accepts; vLLM assumes 2,048. Set \
`context_tokens` to limit the length of answers.
- Refused, with the reason in one line: states that a layer keeps in another way (RWKV, xLSTM, \
RecurrentGemma), encoders, attention with a mask of the model (ALiBi), the sparse attention of \
MiniMax-M3, and decoders whose code in transformers attends by itself instead of through \
`AttentionInterface` (Falcon, GPT-J, GPT-Neo, CodeGen, BLOOM, MPT).
- [Quantised weights](quantization.md) of linear layers keep their form, and `--quantization` \
rounds them. Stacked experts, the latent projection `kv_b_proj` and weights that transformers' \
code multiplies by itself must be plain: a checkpoint that quantises them is refused by their \
name. \
`--quantization` leaves the latter two plain, and refuses models with stacked experts.
- LongRoPE uses its long factors for every prompt, if the model's context exceeds the original \
context, as in vLLM. `context_tokens` does not change this.

Each decoder is tested as a tiny random model:

- Logits in float32 are within 1e-4 of transformers' for prompts of 1 to 300 tokens: whole, in \
chunks, and in a batch.
- Greedy tokens are equal: alone, after a KV transfer from one worker to another, and over two \
ranks if there is a plan.

`make test` tests all of them, and some over two ranks. `make matrix` tests all over two ranks.

## Multimodal checkpoints

A model for images, video or sound (`*ForConditionalGeneration`) is served as its text model: the \
weights of its encoders are not read, and messages with images or sound are refused. A text model \
that has a file in Tandem runs through it ({native}); the others run through transformers' code. \
Fields that `text_config` leaves out have transformers' defaults. The chat template may be the \
processor's. `make test` tests these types in the same way:

{multimodal}

Published checkpoints of Gemma 3n (`Gemma3nForConditionalGeneration`) need the package `timm`, \
with which transformers builds their encoders; without it they are refused.

## Decoders

| architecture | `model_type` | largest difference of a logit | after a KV transfer | two ranks |
|---|---|---|---|---|
"""


def main() -> int:
    """Returns 1 if a decoder fails, and then leaves the page as it is."""
    with ProcessPoolExecutor(
        mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        rows = list(pool.map(table_row, sorted(DECODERS)))
    if failed := [row for row in rows if "differ" in row]:
        print(*failed, sep="\n", file=sys.stderr)
        return 1
    write(rows)
    return 0


def write(rows: Sequence[str]) -> None:
    PAGE.write_text(head() + "\n".join(rows) + "\n")


def head() -> str:
    """Returns the page above its rows."""
    natives = ", ".join(
        f"`{name.removesuffix('ForConditionalGeneration')}`" for name in TEXT_MODELS
    )
    return _HEAD.format(
        version=transformers.__version__,
        most=MAX_TOKENS,
        native=natives,
        published=", ".join(f"`{old}` ({new})" for old, new in PUBLISHED_NAMES.items()),
        multimodal=", ".join(f"`{kind}`" for kind in sorted(MULTIMODAL)),
    )


def table_row(kind: str) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = make_tiny_decoder(Path(name), kind)
        model, runner = reference(folder), checks.load_generic(folder)
        difference = checks.logit_difference(model, runner)
        expected = checks.greedy_tokens(model)
        alone = checks.tokens_alone(runner) == expected
        again = checks.load_generic(folder)
        moved = alone and checks.tokens_after_transfer(runner, again) == expected
        split = checks.tokens_of_two_ranks(folder)
        architecture = checks.architecture(folder)
    cells = [
        f"{difference:.0e}" if difference <= checks.TOLERANCE else f"{difference:.0e}: differ",
        "equal" if moved else "differ",
        "no plan" if split is None else "equal" if split == [expected] * 2 else "differ",
    ]
    print(kind, *cells, flush=True)
    return f"| {architecture} | {kind} | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
