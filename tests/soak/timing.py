"""Measures what times and counts tell a caller about keys and about other tenants, on a service
with keys that runs.

    tandem key create keys.json ada > ada.key && tandem key create keys.json bob > bob.key
    tandem serve smollm2-135m-instruct --api-keys keys.json
    python -m tandem.tests.soak.timing --key ada.key --other-key bob.key

First, calls with a key that differs from the right one in its last characters, with a key of the
same length that differs everywhere, and with the right one. Then prompts of one tenant that another
one has sent, and as many that
nobody has: TTFT and `cached_tokens`; and, to show that a hit would be seen, prompts that the tenant
itself has sent. All kinds take turns at random. Prints the distributions and z of the
Wilcoxon-Mann-Whitney test, which of samples of one distribution is beyond 3.3 once in a thousand
times. Exits with 1 if a difference is beyond that or a cached token is seen, or if the tenant's own
hits are not seen.
"""

import argparse
import asyncio
import random
import secrets
import string
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tandem.proto.errors import Unauthenticated
from tandem.router.auth.authenticator import Authenticator
from tandem.router.auth.keys import ApiKey, hash_key
from tandem.router.client.client import AsyncClient
from tandem.tests.soak.samples import HEAD, line, rank_sum

MOST: Final = 3.3
_SECONDS: Final = 120.0
_VOCAB: Final = 400  # ids below are in every model's vocabulary

Samples = dict[str, list[float]]


def wrong_keys(key: str) -> dict[str, str]:
    """Returns keys of the right one's length: the same but for the end, another, and the right
    one.
    """
    last = "".join(
        random.choice([letter for letter in string.ascii_letters if letter != old])
        for old in key[-3:]
    )
    prefix, _, rest = key.partition("-")
    return {
        "wrong in the last characters": key[:-3] + last,
        "wrong everywhere": f"{prefix}-{secrets.token_urlsafe(len(rest))[: len(rest)]}",
        "right": key,
    }


def call(url: str, key: str) -> float:
    """Returns the seconds of one call over a connection of its own."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    began = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        error.read()
    return time.perf_counter() - began


def time_calls(url: str, key: str, trials: int) -> Samples:
    """Times calls with each kind of key, in a random order."""
    keys = wrong_keys(key)
    found: Samples = {name: [] for name in keys}
    order = [name for name in keys for _ in range(trials)]
    random.shuffle(order)
    for name in order:
        found[name].append(call(url, keys[name]))
    return found


def time_checks(key: str, trials: int) -> Samples:
    """Times the check itself, in this process: what the network hides."""
    authenticator = Authenticator([ApiKey(name="a", tenant="a", sha256=hash_key(key).hex())])
    found: Samples = {name: [] for name in wrong_keys(key)}
    order = [name for name in found for _ in range(trials)]
    random.shuffle(order)
    for name in order:
        # Another one each time: a look into a table takes longer for some digests than for others.
        given = f"Bearer {wrong_keys(key)[name]}"
        began = time.perf_counter()
        with suppress(Unauthenticated):  # whose time is measured with it
            authenticator.caller(given, "")
        found[name].append(time.perf_counter() - began)
    return found


async def time_prompts(
    grpc: str, key: str, other_key: str, trials: int, length: int
) -> tuple[Samples, dict[str, int]]:
    """Returns TTFTs of the tenant with `other_key`, and the largest `cached_tokens`, by who has
    sent the prompt before.
    """
    kinds = ("another tenant", "nobody", "the tenant itself")
    found: Samples = {name: [] for name in kinds}
    cached = dict.fromkeys(kinds, 0)
    async with AsyncClient(grpc, api_key=key) as ada, AsyncClient(grpc, api_key=other_key) as bob:

        async def ask(client: AsyncClient, prompt: list[int]) -> tuple[float, int]:
            began = time.perf_counter()
            async with client.stream(
                prompt, max_tokens=2, ignore_eos=True, timeout=_SECONDS
            ) as stream:
                await anext(stream)
                seconds = time.perf_counter() - began
                usage = (await stream.completion()).usage
            return seconds, usage.cached_tokens

        order = [name for name in kinds for _ in range(trials)]
        random.shuffle(order)
        await ask(bob, _prompt(length))
        for name in order:
            prompt = _prompt(length)
            # Each trial sends two prompts, so that the workers do the same before each that is
            # timed.
            before = {"another tenant": ada, "nobody": ada, "the tenant itself": bob}[name]
            await ask(before, prompt if name != "nobody" else _prompt(length))
            seconds, tokens = await ask(bob, prompt)
            found[name].append(seconds)
            cached[name] = max(cached[name], tokens)
    return found, cached


def _prompt(length: int) -> list[int]:
    return [random.randrange(3, _VOCAB) for _ in range(length)]


def compare(title: str, found: Samples, one: str, other: str, unit: float = 1e3) -> float:
    """Prints the distributions; returns z between two of them."""
    print(f"\n{title}")
    print(HEAD)
    for name, seconds in found.items():
        print(line(name, seconds, unit))
    z = rank_sum(found[one], found[other])
    print(f"{one} against {other}: z = {z:+.2f}")
    return z


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tandem.tests.soak.timing", description=__doc__)
    parser.add_argument("--http", default="http://127.0.0.1:8080")
    parser.add_argument("--grpc", default="grpc://127.0.0.1:50051")
    parser.add_argument(
        "--key", type=Path, required=True, help="a file with the API key of one tenant"
    )
    parser.add_argument("--other-key", type=Path, required=True, help="of another tenant")
    parser.add_argument("--calls", type=int, default=1_000, help="with each kind of key")
    parser.add_argument("--trials", type=int, default=200, help="prompts of each kind")
    parser.add_argument("--length", type=int, default=256, help="of the prompts, in tokens")
    options = parser.parse_args(arguments)
    key, other_key = (path.read_text().strip() for path in (options.key, options.other_key))
    wrong = "wrong in the last characters", "wrong everywhere"
    zs = [compare("the check of a key, us", time_checks(key, 20 * options.calls), *wrong, unit=1e6)]
    calls = time_calls(f"{options.http}/v1/models", key, options.calls)
    zs.append(compare("calls of GET /v1/models, ms", calls, *wrong))
    print("A right key lists the models besides: its time is no refusal's.")
    prompts, cached = asyncio.run(
        time_prompts(options.grpc, key, other_key, options.trials, options.length)
    )
    zs.append(
        compare("TTFT by who has sent the prompt before, ms", prompts, "another tenant", "nobody")
    )
    control = rank_sum(prompts["the tenant itself"], prompts["nobody"])
    print(
        f"the tenant itself against nobody: z = {control:+.2f}; the largest cached_tokens: {cached}"
    )
    hidden = max(map(abs, zs)) <= MOST and not cached["another tenant"] and not cached["nobody"]
    seen = control < -MOST and cached["the tenant itself"] > 0
    print("passed" if hidden and seen else "NOT PASSED")
    return 0 if hidden and seen else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
