"""Computes the hashes by which routers, workers and caches identify prefixes of prompts."""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

DIGEST_BYTES: Final = 16
"""Bytes of a hash."""


class ReplacedSpan(NamedTuple):
    """Describes adjacent tokens whose embeddings other data replaced, such as an image."""

    first: int  # the index of the span's first token
    num_tokens: int
    digest: bytes  # of the data, 16 bytes


def hash_root(salt: bytes) -> bytes:
    """Returns the parent hash of a chain's first block.

    It has a hash domain of its own, so no salt can continue another tenant's chain.
    """
    return hashlib.blake2b(salt, digest_size=16, person=b"salt").digest()


def adapter_salt(salt: bytes, fingerprint: bytes) -> bytes:
    """Returns the salt of an adapter's prefixes; the salt itself without a fingerprint."""
    return (
        hashlib.blake2b(salt, key=fingerprint, person=b"adapter").digest() if fingerprint else salt
    )


def hash_tenant(tenant: str) -> bytes:
    """Returns 16 bytes that identify a tenant to workers, or nothing without a tenant.

    Workers need no tenant names.
    """
    return (
        hashlib.blake2b(tenant.encode(), digest_size=16, person=b"tenant").digest()
        if tenant
        else b""
    )


def hash_block(
    parent: bytes, tokens: Sequence[int], first: int = 0, replaced: Sequence[ReplacedSpan] = ()
) -> bytes:
    """Returns the hash of a block in its chain.

    Its 16 bytes identify every token from the sequence's start, and the data that replaced tokens.
    `first` is the index of the block's first token in the sequence. `replaced` may have spans
    outside the block.
    """
    data = parent + array("I", tokens).tobytes()
    spans = b"".join([_span_in_block(span, first, len(tokens)) for span in replaced])
    if not spans:
        return hashlib.blake2b(data, digest_size=16).digest()
    # A hash domain of its own: no tokens give the hash of a block with replaced tokens.
    key = hashlib.blake2b(spans, digest_size=16).digest()
    return hashlib.blake2b(data, digest_size=16, key=key, person=b"replaced").digest()


def _span_in_block(span: ReplacedSpan, first: int, num_tokens: int) -> bytes:
    """Returns bytes that identify the part of a span that lies in a block; b"" for none."""
    begin = max(span.first, first)
    end = min(span.first + span.num_tokens, first + num_tokens)
    if begin >= end:
        return b""
    return array("I", (begin - first, end - first, begin - span.first)).tobytes() + span.digest


def hash_chain(
    tokens: Sequence[int],
    block_size: int,
    salt: bytes = b"",
    replaced: Sequence[ReplacedSpan] = (),
) -> list[bytes]:
    """Returns the hashes of all full blocks of `tokens`."""
    chain: list[bytes] = []
    parent = hash_root(salt)
    for end in range(block_size, len(tokens) + 1, block_size):
        first = end - block_size
        parent = hash_block(parent, tokens[first:end], first, replaced)
        chain.append(parent)
    return chain


def hash_prompt(
    tokens: Sequence[int], salt: bytes = b"", replaced: Sequence[ReplacedSpan] = ()
) -> bytes:
    """Returns the hash of a whole prompt, which does not depend on a block size."""
    return hash_block(hash_root(salt), tokens, 0, replaced)
