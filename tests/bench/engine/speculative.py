"""Measures speculative decoding: `python -m tandem.tests.bench.engine.speculative`.

Two engines on one model generate the same texts in turns, one sequence at a time. One decodes
plainly, the other drafts with n-grams or a draft model. Other load on the machine affects both. One
text is an edit of code that is mostly in the prompt. The other is free text that is not in the
prompt.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer

from tandem.tests.bench.engine.steps import BLOCK_SIZE
from tandem.workers.engine.config import Budgets, EngineConfig, SpeculativeConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import NewTokens
from tandem.workers.engine.plan import Executor, SamplingParams
from tandem.workers.engine.sequence import SequenceSpec, Task
from tandem.workers.host.malloc import keep_freed_memory
from tandem.workers.model.checkpoint import Checkpoint
from tandem.workers.model.config import CheckpointError
from tandem.workers.model.footprint import check_draft
from tandem.workers.model.loader import open_checkpoint
from tandem.workers.model.runner import ModelRunner
from tandem.workers.tp.draft_model import DraftingExecutor

_CODE: Final = '''class Account:
    """Holds the money of one customer."""

    def __init__(self, owner, amount=0):
        self.owner = owner
        self.amount = amount
        self.history = []

    def deposit(self, value):
        if value <= 0:
            raise ValueError("the value must be positive")
        self.amount += value
        self.history.append(("deposit", value))
        return self.amount

    def withdraw(self, value):
        if value > self.amount:
            raise ValueError("the amount is too small")
        self.amount -= value
        self.history.append(("withdraw", value))
        return self.amount
'''
_EDIT: Final = (
    f"A file:\n\n```python\n{_CODE}```\n\n"
    "The same file with comments:\n\n```python\nclass Account:\n"
)
_FREE: Final = (
    "A letter from a small town by the sea, about the people that the writer met there and what "
    "they did."
)

TEXTS: Final = {
    "an edit of code": (_EDIT, SamplingParams(temperature=0.0)),
    "free text": (_FREE, SamplingParams(temperature=1.0, seed=1)),
}


class TimedEngine:
    """Generates texts on a runner that it shares with another engine, and measures the rates."""

    def __init__(
        self,
        executor: Executor,
        num_blocks: int,
        speculative: SpeculativeConfig | None,
        *,
        overlap: bool,
    ) -> None:
        budgets = Budgets(prefix_caching=False, speculative=speculative)
        config = EngineConfig(
            num_blocks=num_blocks, block_size=BLOCK_SIZE, overlap=overlap, budgets=budgets
        )
        self._engine = Engine(executor, config)
        self.tokens: list[int] = []  # of the last text
        self.rates: list[float] = []  # tokens/s of each text, without the first token

    def generate(self, prompt: Sequence[int], sampling: SamplingParams, num_tokens: int) -> None:
        spec = SequenceSpec(
            id=0,
            task=Task.COLOCATED,
            tokens=tuple(prompt),
            max_tokens=num_tokens,
            sampling=sampling,
        )
        self._engine.submit(spec)
        self.tokens = []
        began = 0.0
        while self._engine.has_work:
            events = self._engine.step()
            began = began if self.tokens else time.perf_counter()
            self.tokens += [
                token
                for event in events
                if isinstance(event, NewTokens)
                for token in event.token_ids
            ]
        self.rates.append((num_tokens - 1) / (time.perf_counter() - began))

    def take_counts(self) -> tuple[int, int]:
        """Returns the numbers of draft tokens and accepted tokens since the last call."""
        requests = self._engine.requests
        counts = (requests.num_draft_tokens, requests.num_accepted_tokens)
        requests.num_draft_tokens = 0
        requests.num_accepted_tokens = 0
        return counts


def measure(options: argparse.Namespace) -> str:
    """Measures and returns the lines to print.

    Raises CheckpointError or ValueError if the model cannot be used.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    keep_freed_memory()
    checkpoint = open_checkpoint(options.model, quantization=options.quantization)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    prompts = {name: tokenizer.encode(text).ids for name, (text, _) in TEXTS.items()}
    num_blocks = -(-(max(map(len, prompts.values())) + options.tokens + BLOCK_SIZE) // BLOCK_SIZE)
    runner = _load(checkpoint, options, num_blocks)
    guesser: Executor = runner
    if options.draft is not None:
        draft = open_checkpoint(options.draft, quantization=options.draft_quantization)
        check_draft(draft.config, checkpoint.config)
        guesser = DraftingExecutor(runner, _load(draft, options, num_blocks))
    speculative = SpeculativeConfig(
        method="draft_model" if options.draft else "ngram",
        model=str(options.draft) if options.draft else None,
        num_speculative_tokens=options.num_speculative_tokens,
    )
    overlap = runner.launches_ahead
    lines = [f"one sequence, {options.tokens} tokens, {options.rounds} rounds in turns, medians"]
    for name, (_, sampling) in TEXTS.items():
        plain = TimedEngine(runner, num_blocks, None, overlap=overlap)
        guessing = TimedEngine(guesser, num_blocks, speculative, overlap=overlap)
        for number in range(1 + options.rounds):
            for engine in (plain, guessing) if number % 2 else (guessing, plain):
                engine.generate(prompts[name], sampling, options.tokens)
        drafted, accepted = guessing.take_counts()
        rates = [statistics.median(engine.rates[1:]) for engine in (plain, guessing)]
        share = (
            f"{accepted / max(drafted, 1):.0%} of {drafted // (1 + options.rounds)} drafted "
            "tokens accepted"
        )
        same = "same tokens" if plain.tokens == guessing.tokens else "DIFFERENT TOKENS"
        ratio = rates[1] / rates[0]
        lines.append(
            f"{name:<16} {rates[0]:7.1f} {rates[1]:7.1f} tokens/s, ratio {ratio:.2f}, {share}, "
            f"{same}"
        )
    return "\n".join(lines)


def _load(checkpoint: Checkpoint, options: argparse.Namespace, num_blocks: int) -> ModelRunner:
    runner = ModelRunner.load(
        checkpoint,
        dtype=options.dtype,
        device=options.device,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
    )
    runner.warmup()
    return runner


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints; returns 0, or 2 after one line on stderr if the model is unusable."""
    parser = argparse.ArgumentParser(
        prog="python -m tandem.tests.bench.engine.speculative", description=__doc__
    )
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--quantization", help="format to round plain weights to on load")
    parser.add_argument(
        "--draft", type=Path, metavar="FOLDER", help="draft model to use in place of n-grams"
    )
    parser.add_argument(
        "--draft-quantization", help="format to round the draft model's weights to on load"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--threads", type=int, default=0, help="threads of torch on a CPU; 0: torch's default"
    )
    try:
        print(measure(parser.parse_args(arguments)))
    except (CheckpointError, ValueError) as error:
        print(f"bench_speculative: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
