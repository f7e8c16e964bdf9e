"""Compares conversations that return to host memory, or to the disk, with conversations that are
computed again.

    python -m tandem.tests.soak.tiers

8 conversations of 6 turns, one turn of each after the other, on a KV cache that holds one or two of
them. Each turn
goes to three LLMs in this process: one with host memory and disk for what leaves its KV cache, one
with the disk alone, and one without; all must give the same tokens. A returning token is one of an
earlier turn, a returning turn is one that has some. At last one file is damaged, and another LLM
answers the last turns again from the same folder.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem import LLM, SamplingParams

Turn = tuple[list[int], list[int]]
"""The tokens of a prompt and those of its answer."""


@dataclass
class Measured:
    """An LLM, and the seconds to the first token of its returning turns."""

    name: str
    llm: LLM
    seconds: list[float] = field(default_factory=list)

    def answer(self, tokens: Sequence[int], max_tokens: int, *, returns: bool) -> list[int]:
        """Returns what follows `tokens`."""
        began, made = time.perf_counter(), list[int]()
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
        with self.llm.stream(tokens, params) as stream:
            for delta in stream:
                if not made and returns:
                    self.seconds.append(time.perf_counter() - began)
                made += delta.token_ids
        return made

    def num_restored(self) -> int:
        return self.llm._loop.run(self.llm._engine.status()).num_restored_tokens


def compare(options: argparse.Namespace, measured: Sequence[Measured]) -> tuple[int, list[Turn]]:
    """Lets all LLMs answer every turn; returns how many tokens returned, and the last turns."""
    last: list[Turn] = []
    rng, num_returning = random.Random(0), 0
    histories: list[list[int]] = [[] for _ in range(options.conversations)]
    for turn in range(options.turns):
        for number, history in enumerate(histories):
            num_returning += len(history)
            history += rng.choices(range(1_000, 40_000), k=options.question)
            answers = [each.answer(history, options.answer, returns=turn > 0) for each in measured]
            if any(answer != answers[0] for answer in answers):
                raise SystemExit(
                    f"conversation {number}, turn {turn}: the answers differ: {answers}"
                )
            if turn == options.turns - 1:
                last.append((history.copy(), answers[0]))
            history += answers[0]
    return num_returning, last


def report(measured: Sequence[Measured], num_returning: int) -> None:
    """Prints what came from the tiers, and the seconds of each LLM against those of the last."""
    again = statistics.median(measured[-1].seconds)
    num_turns = len(measured[-1].seconds)
    print(
        f"returning tokens {num_returning}; TTFT of {num_turns} returning turns, computed again: "
        f"{again * 1e3:.1f} ms"
    )
    for each in measured[:-1]:
        seconds, share = statistics.median(each.seconds), each.num_restored() / num_returning
        print(
            f"{each.name}: {share:.1%} of the tokens, TTFT {seconds * 1e3:.1f} ms, ratio "
            f"{seconds / again:.2f}"
        )


def restart(options: argparse.Namespace, given: dict[str, Any], last: Sequence[Turn]) -> None:
    """Damages a file, and has another LLM answer the last turns again."""
    files = sorted(Path(given["kv_disk"]).rglob("*.kv"))
    with files[0].open("r+b") as file:
        file.seek(files[0].stat().st_size // 2)
        file.write(bytes(64))
    with LLM(options.model, **given) as llm:
        again = Measured("disk", llm)
        for tokens, answer in last:
            if again.answer(tokens, options.answer, returns=True) != answer:
                raise SystemExit("after a restart the answers differ")
        share = again.num_restored() / sum(len(tokens) for tokens, _ in last)
    print(
        f"after a restart, with one of {len(files)} files damaged: {share:.1%} of the tokens from "
        "disk"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--tp", type=int, default=1, help="processes of each LLM, with --kv-cache-gb each"
    )
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--question", type=int, default=96, help="tokens")
    parser.add_argument("--answer", type=int, default=24, help="tokens")
    parser.add_argument("--kv-cache-gb", type=float, default=0.03)
    parser.add_argument("--kv-host-gb", type=float, default=0.25)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--kv-disk-gb", type=float, default=0.25)
    options = parser.parse_args()
    given = {"kv_cache_gb": options.kv_cache_gb, "kv_cache_dtype": options.kv_cache_dtype}
    given["tensor_parallel_size"] = options.tp
    with tempfile.TemporaryDirectory() as folder:
        both, disk = (
            {"kv_disk": f"{folder}/{name}", "kv_disk_gb": options.kv_disk_gb}
            for name in ("both", "disk")
        )
        with (
            LLM(options.model, kv_host_gb=options.kv_host_gb, **given, **both) as tiered,
            LLM(options.model, **given, **disk) as from_disk,
            LLM(options.model, **given) as plain,
        ):
            measured = [
                Measured("host memory and disk", tiered),
                Measured("disk", from_disk),
                Measured("none", plain),
            ]
            num_returning, last = compare(options, measured)
            report(measured, num_returning)
        restart(options, given | disk, last)
    return 0


if __name__ == "__main__":
    sys.exit(main())
