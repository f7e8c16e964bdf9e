"""Computes the memory of ranks for `tandem plan memory` and `tandem check`, and shows it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.table import Table

from ...proto.errors import InvalidArgument
from ...workers.engine.block_table import NUM_STATES, PREFILL_STATES
from ...workers.kv_cache.layout import KvLayout
from ...workers.model.config import ModelConfig
from ...workers.model.footprint import (
    CacheBytes,
    CacheCounts,
    SequenceMemory,
    check_cache_dtype,
    check_config_split,
    check_device,
    kv_bytes_per_token,
    kv_layout,
    sequence_memory,
)
from ..tables import make_table

GIB: Final = 1024**3


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Describes the memory that a rank may use, and the cache that it should have there."""

    num_bytes: int
    has_weights: bool = True  # False: the bytes are those of the KV cache alone
    block_size: int
    context_tokens: int  # of each sequence
    # As of `CacheBytes.split`.
    state_slots: int | None = None
    max_sequences: int = 64


@dataclass(frozen=True, kw_only=True)
class CacheFit:
    """Holds what fits into the KV cache of a rank."""

    num_bytes: int  # of the cache; negative if the weights do not fit
    counts: CacheCounts
    # In whole blocks; of a model with windows or states in whole sequences. Every rank holds its
    # heads of each token.
    num_tokens: int
    block_sequences: int  # the number of sequences that the blocks allow
    state_sequences: int | None = None  # that the states allow; None: the model keeps no state
    problem: str = ""  # the reason why nothing fits

    @property
    def num_sequences(self) -> int:
        if self.state_sequences is None:
            return self.block_sequences
        return min(self.block_sequences, self.state_sequences)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Holds the bytes that each of `tp` ranks keeps.

    With a draft model, which rank 0 alone holds, they are the bytes of rank 0.
    """

    tp: int
    weights: int
    kv_per_token: int
    kv_on_all_ranks: int  # of a token
    num_copies: int  # of a KV head's cache, on all ranks together, without the draft model
    layout: KvLayout
    draft_kv_per_token: int = 0  # part of kv_per_token

    @property
    def state_bytes(self) -> int:
        """Returns the bytes of a state; 0: the model keeps no state."""
        return self._cache_bytes(1).state

    def fit(self, budget: Budget) -> CacheFit:
        """Returns the blocks, states and sequences that fit into a budget."""
        rest = budget.num_bytes - (self.weights if budget.has_weights else 0)
        counts, problem = CacheCounts(num_blocks=0), ""
        if rest > 0:
            try:
                counts = self._cache_bytes(budget.block_size).split(
                    rest,
                    state_slots=budget.state_slots,
                    max_sequences=budget.max_sequences,
                    least=NUM_STATES,
                )
            except ValueError as error:
                problem = str(error)
        sequence = self.sequence(budget.block_size, budget.context_tokens)
        by_blocks = counts.num_blocks // sum(sequence.num_blocks)
        by_states = counts.num_states // sequence.num_states if sequence.num_states else None
        fit = CacheFit(
            num_bytes=rest,
            counts=counts,
            num_tokens=counts.num_blocks * budget.block_size,
            block_sequences=by_blocks,
            state_sequences=by_states,
            problem=problem,
        )
        is_dense = by_states is None and all(table.window is None for table in sequence.tables)
        if is_dense:
            return fit
        return replace(fit, num_tokens=fit.num_sequences * budget.context_tokens)

    def sequence(self, block_size: int, num_tokens: int) -> SequenceMemory:
        """Returns the KV cache of one sequence on a rank, without the draft model."""
        return sequence_memory(self.layout, self.tp, block_size=block_size, num_tokens=num_tokens)

    def _cache_bytes(self, block_size: int) -> CacheBytes:
        return CacheBytes.of(
            self.layout, self.tp, block_size=block_size, draft_bytes=self.draft_kv_per_token
        )


def rank_memory(
    config: ModelConfig,
    tp: int,
    dtype: str,
    kv_cache_dtype: str = "auto",
    draft: ModelConfig | None = None,
    *,
    device: str = "cpu",
    numerics: str = "fast",
) -> RankMemory:
    """Computes the memory of a rank.

    With `numerics` exact, a GPU converts the quantized weights whose products depend on the batch.
    Raises InvalidArgument if `tp` does not split the heads, the cache cannot have the dtype, or the
    device cannot run the model with `numerics`.
    """
    from ...workers.model.loader import weight_bytes  # with torch, which takes a second

    is_exact = numerics == "exact"
    try:
        check_device(config, device, batch_invariant=is_exact)
        check_config_split(config, tp)
        check_cache_dtype(config, kv_cache_dtype, device)
    except ValueError as error:
        field, reason = str(error).split(": ", 1)
        raise InvalidArgument(reason, f"--{field.replace('_', '-')}") from None
    per_rank, whole = (
        kv_bytes_per_token(config, ranks, dtype, kv_cache_dtype) for ranks in (tp, 1)
    )
    draft_kv = kv_bytes_per_token(draft, 1, dtype) if draft else 0
    # The draft model always has fast numerics: a wrong guess changes no token.
    draft_weights = weight_bytes(draft, 1, dtype, device) if draft else 0
    weights = weight_bytes(config, tp, dtype, device, batch_invariant=is_exact)
    return RankMemory(
        tp=tp,
        weights=weights + draft_weights,
        kv_per_token=per_rank + draft_kv,
        kv_on_all_ranks=per_rank * tp + draft_kv,
        num_copies=per_rank * tp // whole if whole else 0,
        layout=kv_layout(config, dtype, kv_cache_dtype),
        draft_kv_per_token=draft_kv,
    )


def memory_table(rows: Sequence[RankMemory], budget: Budget | None) -> Table:
    """Returns a table with a line for each number of ranks.

    `budget` adds columns for the tokens and sequences that fit.
    """
    has_states = any(row.state_bytes for row in rows)
    columns = ["tp", "weights", "KV a token", "on all ranks", "copies of KV"]
    if has_states:
        columns.append("a state")
    if budget:
        columns += ["for KV cache", "tokens", f"sequences of {budget.context_tokens:,}"]
    table = make_table(numbers=columns)
    for row in rows:
        kv_cells = [f"{row.kv_per_token:,} B", f"{row.kv_on_all_ranks:,} B"]
        cells = [str(row.tp), size_text(row.weights), *kv_cells, str(row.num_copies or "-")]
        if has_states:
            cells.append(f"{row.state_bytes:,} B")
        if budget:
            fit = row.fit(budget)
            rest = size_text(fit.num_bytes) if fit.num_bytes >= 0 else "-"
            cells += [rest, f"{fit.num_tokens:,}", f"{fit.num_sequences:,}"]
        table.add_row(*cells)
    return table


def describe_fit(row: RankMemory, budget: Budget) -> str:
    """Returns the states and blocks of a cache, and the sequences that each allows, as text.

    The text is empty if the table shows all of it: the model keeps no states, and its weights fit.
    """
    fit = row.fit(budget)
    if fit.num_bytes < 0:
        weights, most = size_text(row.weights), size_text(budget.num_bytes)
        return f"the weights alone, {weights}, do not fit {most}"
    if fit.problem or fit.state_sequences is None:
        return fit.problem
    num_states, num_blocks = fit.counts.num_states, fit.counts.num_blocks
    return (
        f"{size_text(fit.num_bytes)} of KV cache are {num_states:,} states, for "
        f"{fit.state_sequences:,} sequences or {num_states // PREFILL_STATES:,} of a prefill "
        f"worker, and {num_blocks:,} blocks, for {fit.block_sequences:,} sequences of "
        f"{budget.context_tokens:,} tokens"
    )


def describe_sequence(sequence: SequenceMemory) -> str:
    """Returns the blocks and states of a sequence, and its bytes held and moved, as text."""
    parts = [
        f"{count:,} blocks of {table.block_size} tokens"
        + ("" if table.window is None else f" (window {table.window:,})")
        for table, count in zip(sequence.tables, sequence.num_blocks, strict=True)
    ]
    if sequence.num_states:
        parts.append(f"{sequence.num_states} states")
    held, moved = size_text(sequence.held_bytes), size_text(sequence.moved_bytes)
    text = f"{' and '.join(parts)}, {held}; moves {moved}"
    if any(table.window is not None for table in sequence.tables):
        text += f"; without windows {size_text(sequence.unwindowed_bytes)}"
    return text


def size_text(num_bytes: int) -> str:
    """Returns a number of bytes as text in GiB or MiB."""
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB else f"{num_bytes / 1024**2:,.1f} MiB"
