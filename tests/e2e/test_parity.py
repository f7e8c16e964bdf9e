"""Compares the tokens of the demo model in float32 with transformers', whatever the path through
the workers.
"""

import asyncio
import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.proto import inference_pb2
from tandem.tests import demo_model
from tandem.tests.fleet import Fleet, fleet, split_fleet
from tandem.tests.token_request import token_request

NUM_TOKENS = 16
LENGTHS = (
    1,
    2,
    3,
    5,
    8,
    15,
    16,
    17,
    31,
    32,
    33,
    48,
    64,
    65,
    127,
    128,
    256,
    333,
    512,
    1100,
)

SHORT = (1, 2, 15, 16, 17, 33, 65)

Likeliest = Callable[[tuple[int, ...], tuple[int, ...]], list[int]]


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    return demo_model.prompts(LENGTHS)


@pytest.fixture(scope="module")
def likeliest() -> Likeliest:
    """What transformers chooses after a prompt and tokens, see `demo_model.likeliest`; computed
    once for each.
    """
    return functools.cache(functools.partial(demo_model.likeliest, demo_model.transformers_model()))


async def generate_all(running: Fleet, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """All prompts at the same time."""
    requests = [
        token_request(p, NUM_TOKENS, name=f"p{i}", ignore_eos=True) for i, p in enumerate(prompts)
    ]
    return [
        tokens
        for tokens, _ in await asyncio.gather(*(running.generate(request) for request in requests))
    ]


async def assert_greedy_equals_transformers(
    prefill: int,
    decode: int,
    chunk: int,
    transports: tuple[str, ...],
    prompts: list[tuple[int, ...]],
    likeliest: Likeliest,
) -> None:
    ranks = lambda role: demo_model.rank(num_threads=1, transports=transports)  # noqa: E731
    async with fleet(
        prefill,
        decode,
        rank=ranks,
        chunk_tokens=chunk,
        mixed_chunk_tokens=chunk,
        transports=transports,
    ) as running:
        found = await generate_all(running, prompts)
        if transports and chunk > 16:  # again, from warm prefix caches
            assert await generate_all(running, prompts) == found
    assert {len(tokens) for tokens in found} == {NUM_TOKENS}
    assert found == [
        likeliest(prompt, tuple(tokens)) for prompt, tokens in zip(prompts, found, strict=True)
    ]


@pytest.mark.parametrize(
    ("prefill", "decode", "chunk", "transports", "lengths"),
    [
        (2, 2, 128, ("shared",), (*SHORT, 128, 333)),
        (0, 1, 512, (), (*SHORT, 333)),
        (1, 1, 16, (), SHORT),
        (0, 1, 16, (), SHORT),
    ],
    ids=["2-2-128-shared", "0-1-512", "1-1-16", "0-1-16"],
)
async def test_greedy_equals_transformers(
    prefill: int,
    decode: int,
    chunk: int,
    transports: tuple[str, ...],
    lengths: tuple[int, ...],
    prompts: list[tuple[int, ...]],
    likeliest: Likeliest,
) -> None:
    """The longest prompts have three chunks, the last of them short."""
    chosen = [prompt for prompt in prompts if len(prompt) in lengths]
    await assert_greedy_equals_transformers(prefill, decode, chunk, transports, chosen, likeliest)


@pytest.mark.soak
@pytest.mark.parametrize("transports", [(), ("shared",), ("gloo",)], ids=str)
@pytest.mark.parametrize("chunk", [16, 48, 128, 512])
@pytest.mark.parametrize(("prefill", "decode"), [(0, 1), (1, 1), (2, 2)])
async def test_greedy_equals_transformers_in_every_combination(
    prefill: int,
    decode: int,
    chunk: int,
    transports: tuple[str, ...],
    prompts: list[tuple[int, ...]],
    likeliest: Likeliest,
) -> None:
    await assert_greedy_equals_transformers(prefill, decode, chunk, transports, prompts, likeliest)


async def test_same_seed_same_tokens(tiny_model: Path) -> None:
    """Sampled tokens depend on prompt, parameters and seed alone: not on the batch, not on the
    path. A tiny model is enough: the sampler does not know the size of the model.
    """
    sampling = [
        inference_pb2.SamplingParams(
            temperature=0.5 + n / 16, top_k=10 * n, top_p=1 - n / 64, min_p=n / 640, seed=2**60 + n
        )
        for n in range(16)
    ]
    made = []
    numbers = random.Random(3)
    short = [
        [numbers.randrange(3, 400) for _ in range(length)]
        for length in (*LENGTHS[:8], *LENGTHS[6:14])  # of up to 65 tokens
    ]
    for prefill in (1, 0):
        pools = {"prefill": [1] * prefill, "decode": [1]}
        async with split_fleet(tiny_model, pools) as running:

            async def sample(n: int, name: str) -> list[int]:
                request = token_request(
                    short[n], 16, name=f"{name}-{n}", sampling=sampling[n], ignore_eos=True
                )
                return (await running.generate(request))[0]

            made.append(await asyncio.gather(*(sample(n, "batch") for n in range(16))))
            for n in (0, 5, 15):
                assert await sample(n, "alone") == made[-1][n]
    assert made[0] == made[1]
    assert len({tuple(tokens) for tokens in made[0]}) == 16
