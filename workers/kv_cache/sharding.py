"""Splits a model by tensor parallelism: which heads, rows and columns each rank keeps. Pure
arithmetic.

A KV slot is a place for one KV head in a rank's cache. Ranks may hold the same KV head, and where
the query heads of a rank straddle groups unevenly, one rank may hold a KV head in several slots.
"""

from math import gcd


def check_split(num_heads: int, num_kv_heads: int, tp: int, rank: int = 0) -> None:
    """Raises ValueError, with one line for the user, if the heads cannot be split so or there is no
    such rank.
    """
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads: {num_kv_heads} does not divide the model's {num_heads} query heads"
        )
    if tp < 1:
        raise ValueError(f"tp: {tp} is less than 1")
    if num_heads % tp:
        raise ValueError(f"tp: {tp} does not divide the model's {num_heads} query heads")
    if not 0 <= rank < tp:
        raise ValueError(f"rank: {rank} is not in 0 to {tp - 1}")


def query_heads(num_heads: int, tp: int, rank: int) -> range:
    """Returns the query heads of a rank. Raises ValueError if tp does not divide them."""
    check_split(num_heads, num_heads, tp, rank)
    return part(num_heads, tp, rank)


def kv_heads(num_heads: int, num_kv_heads: int, tp: int, rank: int) -> tuple[int, ...]:
    """Returns the KV head of each KV slot of a rank, ascending; as many slots on every rank, and as
    few as can be.

    The attention kernels need uniform groups: query head i of the rank uses slot i // (query heads
    // slots). A run of query heads that shares a slot starts at a multiple of its length, so it
    lies within one KV head's group on every rank if its length divides both the rank's query heads
    and the group:

        query heads / KV heads   tp   slots of rank 0, 1, ...
        8 / 4                     2   (0, 1) (2, 3)              sharded
        8 / 2                     4   (0) (0) (1) (1)            replicated
        12 / 4                    6   (0, 0) (0, 1) (1, 1) ...   rank 1 has query heads 2 and 3, of
        KV heads 0 and 1

    Raises ValueError as `check_split` does.
    """
    check_split(num_heads, num_kv_heads, tp, rank)
    group = num_heads // num_kv_heads
    heads = query_heads(num_heads, tp, rank)
    return tuple(head // group for head in heads[:: gcd(len(heads), group)])


def part(size: int, tp: int, rank: int) -> range:
    """Returns a rank's part of a dimension that tp need not divide, such as the vocabulary or
    intermediate size.

    The parts follow one another and differ by at most one in size; some are empty if size < tp.
    """
    return range(size * rank // tp, size * (rank + 1) // tp)
