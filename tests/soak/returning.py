"""Compares conversations whose answers are fetched from the decode worker with conversations that
compute them again.

    python -m tandem.tests.soak.returning

Two services in this process, each with a prefill and a decode worker of the demo model in bfloat16,
get every turn of some conversations, one after the other. In one of them routers do not say where
more of a prompt is cached. Both must give the same tokens. A returning turn is one that has some
before it.
"""

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from tandem.router.scheduling.prefix_index import Prefix
from tandem.tests import demo_model
from tandem.tests.fleet import Fleet, split_fleet
from tandem.tests.token_request import token_request


@dataclass
class Measured:
    """A service, and of its returning turns the seconds to the first token and the cached
    tokens.
    """

    name: str
    running: Fleet
    seconds: list[float] = field(default_factory=list)
    num_cached: int = 0

    async def answer(self, history: Sequence[int], num_tokens: int, *, returns: bool) -> list[int]:
        """Returns the answer, once the router has heard that the decode worker has its KV cache."""
        request = token_request(history, num_tokens, ignore_eos=True)
        tokens, timeline = await self.running.generate(request)
        if returns:
            self.seconds.append(timeline.ttft_seconds)
            self.num_cached += timeline.cached_tokens
        prefix, decode = Prefix([*request.submit.token_ids, *tokens[:-1]]), self.running.workers[-1]
        held = (
            (len(request.submit.token_ids) + len(tokens) - 1)
            // decode._rank.block_size
            * decode._rank.block_size
        )
        async with asyncio.timeout(10):
            while self.running.registry._prefixes.match(prefix).num_tokens(decode.worker_id) < held:
                await asyncio.sleep(0.01)
        return tokens


async def compare(options: argparse.Namespace, both: Sequence[Measured]) -> int:
    """Lets both answer every turn; returns how many tokens returned."""
    rng, num_returning = random.Random(0), 0
    for number in range(options.conversations):
        history: list[int] = []
        for turn in range(options.turns):
            num_returning += len(history)
            history += rng.choices(range(1_000, 40_000), k=options.question)
            answers = [
                await each.answer(history, options.answer, returns=turn > 0) for each in both
            ]
            if answers[0] != answers[1]:
                raise SystemExit(
                    f"conversation {number}, turn {turn}: the answers differ: {answers}"
                )
            history += answers[0]
    return num_returning


async def measure(options: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        both = []
        for name in ("fetched", "computed"):
            workers = split_fleet(
                demo_model.folder(),
                {"prefill": [1], "decode": [1]},
                dtype="bfloat16",
                kv_cache_bytes=2**28,
            )
            both.append(Measured(name, await stack.enter_async_context(workers)))
        both[1].running.registry.find_holder = lambda request, prefill: None  # type: ignore[method-assign]
        num_returning = await compare(options, both)
        fetched, computed = (statistics.median(each.seconds) for each in both)
        for each in both:
            share, seconds = each.num_cached / num_returning, statistics.median(each.seconds)
            print(
                f"{each.name}: {share:.1%} of {num_returning} returning tokens cached, TTFT "
                f"{seconds * 1e3:.1f} ms"
            )
        print(f"median of {len(both[0].seconds)} returning turns, ratio {fetched / computed:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--question", type=int, default=32, help="tokens")
    parser.add_argument("--answer", type=int, default=160, help="tokens")
    asyncio.run(measure(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
