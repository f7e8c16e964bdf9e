"""Plans KV transfers between prefill and decode ranks for any two degrees of tensor parallelism.

Pure arithmetic on KV slots (see `sharding`). A piece covers all tokens of all layers of one group.
In the canonical form of the cache, [layer, plane, token, KV head, row], it is one slice
of the KV head axis on both sides. Block sizes and storage layouts do not matter.
"""

from dataclasses import dataclass, replace

from .layout import KvLayout
from .sharding import check_split, kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Describes adjacent KV slots of a source rank and the slots of a target rank they fill.

    Both ranges have the same length and order.
    """

    source_rank: int
    source_slots: range
    target_slots: range
    group: int = 0  # index into KvLayout.groups


def plan_layout(
    layout: KvLayout, source_tp: int, target_tp: int, target_rank: int
) -> tuple[Piece, ...]:
    """Returns the pieces that fill a target rank, for each group of the layout.

    Raises ValueError as `check_split` does.
    """
    pieces: list[Piece] = []
    for number, group in enumerate(layout.groups):
        part = group.part
        planned = plan(part.num_heads, part.num_kv_heads, source_tp, target_tp, target_rank)
        pieces += (replace(piece, group=number) for piece in planned)
    return tuple(pieces)


def plan(
    num_heads: int, num_kv_heads: int, source_tp: int, target_tp: int, target_rank: int
) -> tuple[Piece, ...]:
    """Returns the pieces that fill every KV slot of a target (decode) rank once, in slot order.

    8 query heads over 2 KV heads, from tp 4 to tp 1: source ranks hold the KV heads (0) (0) (1)
    (1), the target holds (0, 1). It reads its slot 0 from rank 0 and its slot 1 from rank 2. Back,
    from tp 1 to tp 4, each target rank reads its one slot from slot 0 or 1 of source rank 0.

    Returns the fewest possible pieces. Among source ranks with equally long runs, a target prefers
    one that it reads from already. Otherwise it prefers the one nearest to the source rank that
    computes the same query heads. So target ranks spread over replicas, and between equal degrees
    each rank reads from its counterpart. Raises ValueError as `check_split` does.
    """
    check_split(num_heads, num_kv_heads, source_tp)
    sources = [kv_heads(num_heads, num_kv_heads, source_tp, rank) for rank in range(source_tp)]
    wanted = kv_heads(num_heads, num_kv_heads, target_tp, target_rank)
    pieces: list[Piece] = []
    used: set[int] = set()
    start = 0
    while start < len(wanted):
        # Any part of a run is a run: taking the longest each time gives the fewest.
        runs = [_longest_run(slots, wanted[start:]) for slots in sources]
        length = max(map(len, runs))
        same_heads = (target_rank * len(wanted) + start) * source_tp // (target_tp * len(wanted))
        rank = min(
            (rank for rank, run in enumerate(runs) if len(run) == length),
            key=lambda rank: (rank not in used, abs(rank - same_heads)),
        )
        target_slots = range(start, start + length)
        pieces.append(Piece(source_rank=rank, source_slots=runs[rank], target_slots=target_slots))
        used.add(rank)
        start += length
    return tuple(pieces)


def _longest_run(slots: tuple[int, ...], wanted: tuple[int, ...]) -> range:
    """Returns the range of `slots` with the longest prefix of `wanted`; empty without a match.

    Among equally long ranges, returns the first.
    """
    best = range(0)
    for first in range(len(slots)):
        stop = first
        while stop < len(slots) and slots[first : stop + 1] == wanted[: stop + 1 - first]:
            stop += 1
        best = max(best, range(first, stop), key=len)
    return best
