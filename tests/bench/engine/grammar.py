"""Measures decode steps under a JSON schema: `python -m tandem.tests.bench.engine.grammar`.

Two batches of one model take steps in turns, one under the schema and one without. So other load on
the machine affects both.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch

from tandem.tests.bench.engine.steps import BLOCK_SIZE, WARMUP_STEPS
from tandem.workers.engine.plan import SamplingParams, SequenceStep, StepPlan
from tandem.workers.host.malloc import keep_freed_memory
from tandem.workers.kv_cache.tables import TableBlocks
from tandem.workers.model.config import CheckpointError
from tandem.workers.model.costs.measure import synchronize
from tandem.workers.model.loader import open_checkpoint
from tandem.workers.model.runner import ModelRunner

_PERSON: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "city": {"enum": ["Paris", "Berlin", "Roma"]},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "city", "zip", "tags", "active"],
    "additionalProperties": False,
}
SCHEMA: Final[dict[str, Any]] = {"type": "array", "items": _PERSON, "minItems": 100}
"""The schema of a document that does not end within a run."""


class Batch:
    """Holds sequences that decode together, on a runner that it shares with other batches."""

    def __init__(
        self, runner: ModelRunner, *, size: int, first_block: int, num_blocks: int, grammar: str
    ) -> None:
        """Makes `size` sequences with `num_blocks` blocks each."""
        self._runner = runner
        self._ids = [first_block + row for row in range(size)]
        rng = random.Random(0)
        steps = []
        for row, sequence_id in enumerate(self._ids):
            prompt = tuple(rng.choices(range(runner.config.vocab_size), k=BLOCK_SIZE))
            begin = first_block + row * num_blocks
            step = SequenceStep(
                sequence_id=sequence_id,
                token_ids=prompt,
                start=0,
                new_blocks=(TableBlocks(tuple(range(begin, begin + num_blocks))),),
                sampling=SamplingParams(temperature=0.8, seed=row, grammar=grammar),
                num_samples=1,
                history=prompt,
                num_prompt=BLOCK_SIZE,
            )
            steps.append(step)
        self._length = BLOCK_SIZE
        # The sampled tokens of each step.
        self.tokens = [runner.execute(StepPlan(sequences=tuple(steps), dropped=()))]

    def step(self) -> float:
        """Decodes one token of each sequence and returns the seconds that it took."""
        fields: dict[str, Any] = {
            "start": self._length,
            "new_blocks": (),
            "sampling": None,
            "num_samples": 1,
        }
        steps = tuple(
            SequenceStep(sequence_id=sequence_id, token_ids=(token,), **fields)
            for sequence_id, token in zip(self._ids, self.tokens[-1], strict=True)
        )
        begin = time.perf_counter()
        self.tokens.append(self._runner.execute(StepPlan(sequences=steps, dropped=())))
        self._length += 1
        return time.perf_counter() - begin


def measure(options: argparse.Namespace) -> str:
    """Measures and returns the lines to print.

    Raises CheckpointError or ValueError if the model cannot be used.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    keep_freed_memory()
    per_sequence = -(-(BLOCK_SIZE + WARMUP_STEPS + options.steps) // BLOCK_SIZE)
    half = options.batch * per_sequence
    runner = ModelRunner.load(
        open_checkpoint(options.model),
        dtype=options.dtype,
        device=options.device,
        num_blocks=2 * half,
        block_size=BLOCK_SIZE,
    )
    runner.warmup()
    grammar = json.dumps({"grammars": [{"json_schema": SCHEMA}]})
    began = time.perf_counter()
    runner.load_grammar(grammar)
    compiled = time.perf_counter() - began
    bound, free = (
        Batch(
            runner,
            size=options.batch,
            first_block=index * half,
            num_blocks=per_sequence,
            grammar=text,
        )
        for index, text in enumerate((grammar, ""))
    )
    times: dict[Batch, list[float]] = {bound: [], free: []}
    for number in range(WARMUP_STEPS + options.steps):
        for batch in (bound, free) if number % 2 else (free, bound):
            synchronize(torch.device(options.device))
            times[batch].append(batch.step())
    constrained, plain = (statistics.median(times[batch][WARMUP_STEPS:]) for batch in (bound, free))
    return (
        f"batch {options.batch}, {options.steps} steps in turns, {torch.get_num_threads()} "
        "threads, medians\n"
        f"free text            {1000 * plain:8.3f} ms/step\n"
        f"under a JSON schema  {1000 * constrained:8.3f} ms/step\n"
        f"ratio                {constrained / plain:8.3f}\n"
        f"to load the tokenizer and compile the schema: {compiled:.2f} s"
    )


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints; returns 0, or 2 after one line on stderr if the model is unusable."""
    parser = argparse.ArgumentParser(
        prog="python -m tandem.tests.bench.engine.grammar", description=__doc__
    )
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--threads", type=int, default=0, help="threads of torch on a CPU; 0: torch's default"
    )
    try:
        print(measure(parser.parse_args(arguments)))
    except (CheckpointError, ValueError) as error:
        print(f"bench_grammar: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
