"""Computes the heads, rows and columns of each tensor parallel rank by pure arithmetic.

A KV slot is the place of one KV head in a rank's cache. Several ranks may hold the same KV head. If
the query heads of a rank straddle groups unevenly, a rank may hold a KV head in several slots.
"""

from math import gcd


def check_split(num_heads: int, num_kv_heads: int, tp: int, rank: int = 0) -> None:
    """Raises ValueError if `tp` ranks cannot split the heads or `rank` is out of range.

    The error has one line for the user.
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
    """Returns the KV head of each KV slot of a rank, in ascending order.

    Every rank has the same number of slots, the fewest possible. The attention kernels need uniform
    groups: query head i of the rank uses slot i // (query heads // slots). A run of query heads
    that shares a slot starts at a multiple of its length. So it lies within one KV head's group on
    every rank if its length divides both the rank's query heads and the group:

        query heads / KV heads   tp   slots of rank 0, 1, ...
        8 / 4                     2   (0, 1) (2, 3)              sharded
        8 / 2                     4   (0) (0) (1) (1)            replicated
        12 / 4                    6   (0, 0) (0, 1) (1, 1) ...   uneven

    In the last example rank 1 has query heads 2 and 3, which belong to KV heads 0 and 1.
    Raises ValueError as `check_split` does.
    """
    check_split(num_heads, num_kv_heads, tp, rank)
    group = num_heads // num_kv_heads
    heads = query_heads(num_heads, tp, rank)
    return tuple(head // group for head in heads[:: gcd(len(heads), group)])


def part(size: int, tp: int, rank: int) -> range:
    """Returns a rank's part of a dimension of any size, such as the vocabulary.

    tp need not divide the size. The parts are consecutive and differ in size by at most one; some
    are empty if size < tp.
    """
    return range(size * rank // tp, size * (rank + 1) // tp)
