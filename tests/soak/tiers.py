"""Compares conversations that return to host memory with conversations that are computed again, in one process.

    python -m tandem.tests.soak.tiers

8 conversations of 6 turns, one turn of each after the other, on a KV cache that holds one or two of them. Each turn
goes to an LLM with host memory for what leaves its KV cache and to one without; both must give the same tokens. A
returning token is one of an earlier turn, a returning turn is one that has some.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem import LLM, SamplingParams


@dataclass
class Measured:
    """An LLM, and the seconds to the first token of its returning turns."""

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


def compare(options: argparse.Namespace, measured: Sequence[Measured]) -> int:
    """Lets all LLMs answer every turn; returns how many tokens returned."""
    rng, num_returning = random.Random(0), 0
    histories: list[list[int]] = [[] for _ in range(options.conversations)]
    for turn in range(options.turns):
        for number, history in enumerate(histories):
            num_returning += len(history)
            history += rng.choices(range(1_000, 40_000), k=options.question)
            answers = [each.answer(history, options.answer, returns=turn > 0) for each in measured]
            if any(answer != answers[0] for answer in answers):
                raise SystemExit(f"conversation {number}, turn {turn}: the answers differ: {answers}")
            history += answers[0]
    return num_returning


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--question", type=int, default=96, help="tokens")
    parser.add_argument("--answer", type=int, default=24, help="tokens")
    parser.add_argument("--kv-cache-gb", type=float, default=0.03)
    parser.add_argument("--kv-host-gb", type=float, default=0.25)
    parser.add_argument("--kv-cache-dtype", default="auto")
    options = parser.parse_args()
    given = {"kv_cache_gb": options.kv_cache_gb, "kv_cache_dtype": options.kv_cache_dtype}
    with (
        LLM(options.model, kv_host_gb=options.kv_host_gb, **given) as tiered,
        LLM(options.model, **given) as plain,
    ):
        with_tier, without = Measured(tiered), Measured(plain)
        num_returning = compare(options, [with_tier, without])
        share = with_tier.num_restored() / num_returning
    tier, again = (statistics.median(each.seconds) for each in (with_tier, without))
    print(f"returning tokens {num_returning}, from host memory {share:.1%}")
    print(f"TTFT of {len(with_tier.seconds)} returning turns: {tier * 1e3:.1f} ms, computed again {again * 1e3:.1f} ms")
    print(f"ratio {tier / again:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
