"""Makes the prompts of a trace, which records only lengths and which blocks are equal."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from .read import TracedRequest

_WITHOUT_HASHES: Final = 1
"""Ends the seed of a prompt without hashes, so that it is not the seed of a block."""


def prompt_ids(request: TracedRequest, vocab_size: int, seed: Sequence[int]) -> list[int]:
    """Returns exactly `input_length` random token ids below `vocab_size`.

    The ids of a block depend on `seed` and the block's hash alone, so prompts with equal first
    hashes have equal prefixes. A partial block has the first ids of its block. Without hashes, the
    prompt depends on `seed` alone: give each request another one. A seed is a sequence of integers
    from 0 on.
    """
    if not request.block_hashes:
        return _ids([*seed, _WITHOUT_HASHES], request.input_length, vocab_size)
    ids: list[int] = []
    for block_hash in request.block_hashes:
        num_tokens = min(request.block_tokens, request.input_length - len(ids))
        ids += _ids([*seed, block_hash], num_tokens, vocab_size)
    return ids


def describe_trace(requests: Sequence[TracedRequest]) -> str:
    """Returns one line about a trace: its size, its lengths, and what its prompts share."""
    num_requests = len(requests)
    mean_input = sum(request.input_length for request in requests) / num_requests
    mean_output = sum(request.output_length for request in requests) / num_requests
    blocks = [block_hash for request in requests for block_hash in request.block_hashes]
    shared = "without hashes of blocks, so no two prompts share a prefix"
    if blocks:
        repeated = 1 - len(set(blocks)) / len(blocks)
        shared = f"{repeated:.0%} of the blocks repeat an earlier one"
    return (
        f"{num_requests} requests in {requests[-1].time:.0f} s, mean {mean_input:.0f} tokens in "
        f"and {mean_output:.0f} out, {shared}"
    )


def _ids(seed: Sequence[int], count: int, vocab_size: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(vocab_size, size=count).tolist()
    return ids
