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
from tandem.tests.tiny_multimodal import MISTRAL_TEXTS, MULTIMODAL
from tandem.tests.workers.model import decoder_checks as checks
from tandem.tests.workers.model.helpers import reference
from tandem.workers.model.generic.config import PUBLISHED_NAMES
from tandem.workers.model.registry import TEXT_MODELS

PAGE: Final = ROOT / "docs" / "transformers.md"

_HEAD: Final = """# Decoders of transformers

This page is for models without a file in Tandem; [models.md](models.md) lists those with one. \
`tandem check MODEL` prints if and how a model would run. `python -m tandem.tests.decoders_page` \
writes this page.

A decoder of transformers without a file in Tandem (tested with {version}) runs through \
transformers' modelling code. Tandem replaces its attention, so paged KV cache, chunked prefill, \
prefix cache, KV transfer and tensor parallelism work in the same way. A checkpoint with one of \
these names runs as the class of transformers in parentheses: {published}.

`model_impl` chooses the code, as in vLLM:

- `auto` (default): Tandem's code if it has the architecture, otherwise transformers' code
- `tandem`: Tandem's code; other architectures are refused
- `transformers`: transformers' code

These rules apply to models that run through transformers' code:

- Code in a model's folder is never run.
- Weights are converted as in transformers.
- Tensor parallelism needs a plan in transformers (`base_model_tp_plan`), and `tp` must divide the \
number of KV heads, or of query heads with latent attention.
- Latent attention (DeepSeek V2 and later) caches the latent vector and the shared part of the \
key: one row per token for all heads, on every rank. `kv_cache_dtype` must be `auto`.
- Layers that read the keys and values of an earlier layer (Gemma 3n, Gemma 4) keep no KV cache. \
Layers of Mistral Large 4 that read the latents of an earlier layer keep a copy of them.
- Sparse attention (DeepSeek V3.2, GLM-5, Mistral Large 4) runs as dense attention up to \
`index_topk` tokens. Set `context_tokens` to at most this number; longer contexts are refused.
- Layers that keep a state for each sequence (Mamba, Mamba 2, gated delta nets, short \
convolutions) compute it with Tandem's kernels. Every rank holds the whole state. Such models run \
on CPUs only.
- Nemotron-H through transformers' code raises the time steps of Mamba 2 to `time_step_min`. \
Tandem's code has the limits that the checkpoint states (`time_step_limit`), as other engines have.
- On GPUs, sums of transformers' code depend on the batch, so `numerics: exact` is refused.
- A decoder without positions (Mamba, Mamba 2, Falcon-Mamba) states no context length. So its \
context is {most:,} tokens, the longest prompt that a service accepts; vLLM assumes 2,048. Set \
`context_tokens` to limit the length of answers.
- Refused, with the reason in one line: states that a layer keeps in another way (RWKV, xLSTM, \
RecurrentGemma), encoders, attention with a mask of the model (ALiBi, Doge), attention that is \
called twice (DiffLlama, HRM-Text), queries of experts (JetMoE), the sparse attention of \
MiniMax-M3, and decoders whose code in transformers attends by itself instead of through \
`AttentionInterface` (Falcon, GPT-J, GPT-Neo, CodeGen, BLOOM, MPT).
- [Quantised weights](quantization.md) of linear layers keep their form, and `--quantization` \
rounds plain ones. Stacked experts, the latent projection `kv_b_proj`, and weights that \
transformers' code multiplies outside linear layers must be plain in the checkpoint; otherwise it \
is refused, and the error names the weight. `--quantization` leaves the last two of these plain, \
and refuses models with stacked experts.
- LongRoPE uses its long factors for every prompt, if the model's context exceeds the original \
context, as in vLLM. `context_tokens` does not change this.
- YaRN does not raise the context: set `max_position_embeddings` to the longer one.

Each decoder is tested with a tiny random model of its architecture:

- Logits in float32 are within 1e-4 of transformers' for prompts of 1 to 300 tokens: whole, in \
chunks, and in a batch.
- Greedy tokens are equal: alone, after a KV transfer from one worker to another, and over two \
ranks if there is a plan.

`make test` tests all decoders, and some of them over two ranks. `make matrix` tests all over two \
ranks.

## Multimodal checkpoints

A model for images, video or sound (`*ForConditionalGeneration`) is served as its text model: the \
weights of its encoders are not read, and messages with images or sound are refused. If the text \
model has a file in Tandem, it runs through this file ({native}); the others run through \
transformers' code. Fields that `text_config` leaves out have transformers' defaults. The chat \
template may come from the processor. `make test` tests these types in the same way:

{multimodal}

`mistral3` is also tested with the text models {mistral}.

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
        mistral=" and ".join(f"`{kind}`" for kind in MISTRAL_TEXTS),
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
