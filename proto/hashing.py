"""Computes the hashes that routers and workers must compute alike.

They identify prefixes of prompts, draw noise for tokens, and choose a watermark's green tokens.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, Self, TypeVar

DIGEST_BYTES: Final = 16
"""Bytes of a hash."""

WATERMARK_KEY_BYTES: Final = 16

_SIPHASH_KEYS: Final = struct.Struct("<2Q")
# "somepseudorandomlygeneratedbytes", as SipHash defines it.
_SIPHASH_STATE: Final = (
    0x736F6D6570736575,
    0x646F72616E646F6D,
    0x6C7967656E657261,
    0x7465646279746573,
)
_SIPHASH_ROUNDS: Final = 2
_SIPHASH_LAST_ROUNDS: Final = 4
_WORD_BYTES: Final = 8
_NUM_GREEN_HASHES: Final = 2**31


class Integers(Protocol):
    """Describes arrays of numpy and tensors of torch, of signed integers that wrap around."""

    def __add__(self, other: Self | int, /) -> Self: ...
    def __mul__(self, other: int, /) -> Self: ...
    def __xor__(self, other: Self | int, /) -> Self: ...
    def __or__(self, other: Self, /) -> Self: ...
    def __and__(self, other: int, /) -> Self: ...
    def __lshift__(self, other: int, /) -> Self: ...
    def __rshift__(self, other: int, /) -> Self: ...


_I = TypeVar("_I", bound=Integers)


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
    if not replaced:  # a router does this for each prompt; three times as fast as block by block
        data = array("I", tokens).tobytes()
        num_bytes = block_size * array("I").itemsize
        for end in range(num_bytes, len(data) + 1, num_bytes):
            block = parent + data[end - num_bytes : end]
            parent = hashlib.blake2b(block, digest_size=16).digest()
            chain.append(parent)
        return chain
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


def hash_token_ids(ids: _I, first: _I, second: _I) -> _I:
    """Returns 32-bit hashes of int32 token ids under two 32-bit keys each; shapes broadcast.

    These are two rounds of multiply and xor-shift with the constants of lowbias32, and a key before
    each round.
    """
    x = ids * _signed(0x9E3779B1, 32) + first
    x ^= _shifted(x, 16, 32)
    x *= 0x7FEB352D
    x ^= _shifted(x, 15, 32)
    x += second
    x *= _signed(0x846CA68B, 32)
    x ^= _shifted(x, 16, 32)
    return x


def hash_context(key: bytes, words: Sequence[_I]) -> _I:
    """Returns SipHash-2-4 (Aumasson and Bernstein, 2012) of rows of 64-bit words, int64 [num_rows].

    `key` has 16 bytes. `words` has the rows' first word, their second word and so on, each int64
    [num_rows], at least one. Without the key nobody can compute the hash of a further row.
    """
    keys = _SIPHASH_KEYS.unpack(key) * 2
    zero = words[0] ^ words[0]
    v = [zero ^ _signed(start ^ own, 64) for start, own in zip(_SIPHASH_STATE, keys, strict=True)]
    num_bytes = _WORD_BYTES * len(words) % 256
    for word in (*words, zero ^ _signed(num_bytes << 56, 64)):
        v[3] = v[3] ^ word
        _sip_rounds(v, _SIPHASH_ROUNDS)
        v[0] = v[0] ^ word
    v[2] = v[2] ^ 0xFF
    _sip_rounds(v, _SIPHASH_LAST_ROUNDS)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def green_threshold(gamma: float) -> int:
    """Returns the bound of `green_bits`: a token is green if they are below it.

    `gamma` is the share of green tokens, above 0 and below 1. All processes have it in float32.
    """
    return round(gamma * _NUM_GREEN_HASHES)


def green_bits(hashes: _I) -> _I:
    """Returns the bits of hashes of token ids that decide whether a token is green."""
    return hashes & (_NUM_GREEN_HASHES - 1)


def _sip_rounds(v: list[_I], count: int) -> None:
    for _ in range(count):
        v[0] = v[0] + v[1]
        v[2] = v[2] + v[3]
        v[1] = _rotate(v[1], 13) ^ v[0]
        v[3] = _rotate(v[3], 16) ^ v[2]
        v[0] = _rotate(v[0], 32) + v[3]
        v[2] = v[2] + v[1]
        v[3] = _rotate(v[3], 21) ^ v[0]
        v[1] = _rotate(v[1], 17) ^ v[2]
        v[2] = _rotate(v[2], 32)


def _rotate(x: _I, count: int) -> _I:
    """Rotates 64-bit integers to the left."""
    return (x << count) | _shifted(x, 64 - count, 64)


def _shifted(x: _I, count: int, num_bits: int) -> _I:
    """Shifts integers of `num_bits` to the right, without the copies of the sign."""
    shifted = x >> count
    shifted &= (1 << (num_bits - count)) - 1
    return shifted


def _signed(number: int, num_bits: int) -> int:
    """Returns the signed integer that has the bits of an unsigned one."""
    return number - (1 << num_bits) if number >> (num_bits - 1) else number
