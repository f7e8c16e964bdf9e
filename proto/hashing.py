"""Computes the hashes by which routers, workers and caches identify prefixes of prompts."""

import hashlib
from array import array
from collections.abc import Sequence


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


def hash_block(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Returns the hash of a block in its chain.

    Its 16 bytes identify every token from the sequence's start.
    """
    return hashlib.blake2b(parent + array("I", tokens).tobytes(), digest_size=16).digest()


def hash_chain(tokens: Sequence[int], block_size: int, salt: bytes = b"") -> list[bytes]:
    """Returns the hashes of all full blocks of `tokens`."""
    chain: list[bytes] = []
    parent = hash_root(salt)
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = hash_block(parent, tokens[end - block_size : end])
        chain.append(parent)
    return chain


def hash_prompt(tokens: Sequence[int], salt: bytes = b"") -> bytes:
    """Returns the hash of a whole prompt, which does not depend on a block size."""
    return hash_block(hash_root(salt), tokens)
