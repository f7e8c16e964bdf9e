"""The names of prefixes: what routers, workers and caches mean when they say that two prompts begin
alike.
"""

import hashlib
from array import array
from collections.abc import Sequence


def hash_root(salt: bytes) -> bytes:
    """The parent of a chain's first block: a domain of its own, so that no salt continues another
    tenant's chain.
    """
    return hashlib.blake2b(salt, digest_size=16, person=b"salt").digest()


def adapter_salt(salt: bytes, fingerprint: bytes) -> bytes:
    """The salt of prefixes that an adapter has computed, by its fingerprint; without one the salt
    itself.
    """
    return (
        hashlib.blake2b(salt, key=fingerprint, person=b"adapter").digest() if fingerprint else salt
    )


def hash_tenant(tenant: str) -> bytes:
    """What stands for a tenant at workers, which need no names: 16 bytes, or nothing without one."""
    return (
        hashlib.blake2b(tenant.encode(), digest_size=16, person=b"tenant").digest()
        if tenant
        else b""
    )


def hash_block(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a block in its chain: 16 bytes that stand for every token from the sequence's
    start.
    """
    return hashlib.blake2b(parent + array("I", tokens).tobytes(), digest_size=16).digest()


def hash_chain(tokens: Sequence[int], block_size: int, salt: bytes = b"") -> list[bytes]:
    """The hashes of all full blocks of `tokens`."""
    chain: list[bytes] = []
    parent = hash_root(salt)
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = hash_block(parent, tokens[end - block_size : end])
        chain.append(parent)
    return chain


def hash_prompt(tokens: Sequence[int], salt: bytes = b"") -> bytes:
    """The hash of a whole prompt, whatever block sizes its readers use."""
    return hash_block(hash_root(salt), tokens)
