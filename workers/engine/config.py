"""Holds the configuration of an engine."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ...proto.costs import GROWTH_TOKENS, mixed_chunk
from ..kv_cache.tables import TableSpec, alignment
from ..step_cost import StepCost
from .block_table import TableLimits, least_blocks

_LEAST_BURST: Final = 2
"""Prompts of a burst. Beside one stream, one prompt is not a burst: it may be long."""


def default_chunk_tokens(device: str, num_threads: int = 0) -> int:
    """Returns the default prefill chunk size, in tokens, for a device type of torch.

    `num_threads` is the number of CPU threads; 0 means several. One thread computes chunks of 128
    as fast as longer chunks, and urgent requests wait less for the end of a short chunk. Two
    threads need a sixth more time with chunks of 128 than with chunks of 512.
    """
    if device != "cpu":
        return 2048
    return 128 if num_threads == 1 else 512


def has_burst_chunks(num_prefill_workers: int) -> bool:
    """Returns True if a service with this number of prefill workers has `Budgets.burst_chunks`.

    With a prefill pool, the decode pool is for short gaps between tokens.
    """
    return num_prefill_workers == 0


class SpeculativeConfig(BaseModel):
    """Configures speculative decoding with vLLM's names.

    `ngram` drafts the tokens that followed the last n-gram earlier in the sequence. `draft_model`
    drafts with a small model. One step verifies a draft, so no output token changes. A `model`
    without a `method` means draft_model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    method: Literal["ngram", "draft_model"] = "ngram"
    # The draft model, named in the same way as the service's model.
    model: str | None = Field(default=None, min_length=1, max_length=4096)
    # The maximum for one sequence in one step.
    num_speculative_tokens: int = Field(default=5, ge=1, le=64)
    prompt_lookup_min: int = Field(default=3, ge=1, le=64)  # tokens of an n-gram
    prompt_lookup_max: int = Field(default=5, ge=1, le=64)
    # Decodes and draft tokens of one step. A larger step would be bound by compute, and a draft
    # token would then cost as much as a decoded token.
    max_step_tokens: int = Field(default=32, ge=2, le=65_536)

    @model_validator(mode="before")
    @classmethod
    def _infer_method(cls, given: Any) -> Any:
        return (
            {"method": "draft_model"} | given
            if isinstance(given, dict) and given.get("model")
            else given
        )

    @model_validator(mode="after")
    def _has_a_model(self) -> Self:
        if (self.method == "draft_model") != bool(self.model):
            raise ValueError(
                "speculative.model: must be set if and only if method is draft_model, got method "
                f"{self.method}"
            )
        return self

    @model_validator(mode="after")
    def _has_lengths(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                "speculative.prompt_lookup_min: must be at most prompt_lookup_max, "
                f"{self.prompt_lookup_max}, got {self.prompt_lookup_min}"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Holds the limits of an engine's batch and queue, in tokens and sequences."""

    chunk_tokens: int = 512  # prompt tokens computed in one step
    # The maximum in a step with decodes, which all wait for the chunk; see chunk_beside.
    mixed_chunk_tokens: int = 512
    # The maximum time of a mixed step, divided by the time of a step without prompts; see
    # `StepCost` and `prompt_tokens`. None: only the limits in tokens count.
    mixed_step_factor: float | None = None
    # A mixed step of a burst has the size of a step without decodes; see `prompt_tokens`.
    burst_chunks: bool = False
    max_sequences: int = 64  # sequences that hold blocks at once
    max_waiting: int = 1024  # sequences in the queue
    # Admission reserves blocks for this number of generated tokens; later blocks come one by one.
    growth_tokens: int = GROWTH_TOKENS
    prefix_caching: bool = True
    speculative: SpeculativeConfig | None = None

    def within(self, loaded: "Budgets") -> "Budgets":
        """Returns these budgets, reduced to the sizes for which a worker was loaded."""
        return replace(
            self,
            chunk_tokens=min(self.chunk_tokens, loaded.chunk_tokens),
            mixed_chunk_tokens=min(self.mixed_chunk_tokens, loaded.mixed_chunk_tokens),
            max_sequences=min(self.max_sequences, loaded.max_sequences),
        )

    @property
    def max_step_rows(self) -> int:
        """Returns the maximum of samples in a step: of sequences and after their draft tokens.

        One request whose choices have more samples than that still runs.
        """
        return max(self.max_sequences, self.speculative.max_step_tokens if self.speculative else 0)

    @property
    def max_step_tokens(self) -> int:
        """Returns the maximum of tokens in a step: a chunk, alone or beside all decodes."""
        return max(self.chunk_tokens, self.mixed_chunk_tokens + self.max_step_rows)

    def chunk_beside(self, num_decodes: int, num_prompts: int) -> int:
        """Returns the number of prompt tokens that a step with these decodes may compute.

        `num_prompts` is the number of prompts that are running or waiting.
        """
        return (
            mixed_chunk(self.mixed_chunk_tokens, num_decodes + num_prompts)
            if num_decodes
            else self.chunk_tokens
        )

    def prompt_tokens(
        self,
        cost: StepCost,
        *,
        num_decodes: int,
        num_rows: int,
        num_prompts: int,
        num_starting: int,
    ) -> int:
        """Returns the number of prompt tokens that a step may compute, by its predicted time too.

        The decodes have `num_rows` tokens, with their drafts. For `num_prompts` see `chunk_beside`;
        `num_starting` of these run or have room to run. With `burst_chunks` a step of a burst has
        the size of a step without decodes: while at least as many such prompts wait for their first
        token as streams for their next one, long steps take less of their time in total. Prompts
        that wait for the end of a stream do not count, because long steps delay that end.
        """
        most = self.chunk_beside(num_decodes, num_prompts)
        if self.mixed_step_factor is None or not num_decodes:
            return most
        if cost.is_decode_due:
            return 0
        # After a change of the role there may be more decodes than the new role has sequences.
        num_joining = min(num_prompts, max(self.max_sequences - num_decodes, 0))
        count = int(min(most, cost.tokens_beside(self.mixed_step_factor, num_rows, num_joining)))
        if self.burst_chunks and num_starting >= max(num_decodes, _LEAST_BURST):
            return max(count, self.chunk_tokens - num_rows)
        return count

    def more_prompt_tokens(self, cost: StepCost, num_tokens: int, most: int) -> int:
        """Returns how many of `most` more prompt tokens a step without decodes may compute.

        Its first prompt has `num_tokens` tokens in the step. The first prompt of a burst should not
        wait for the rest of the burst.
        """
        if self.mixed_step_factor is None:
            return most
        return int(min(most, cost.tokens_after(self.mixed_step_factor, num_tokens)))


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Holds an engine's budgets, numbers of KV blocks, and the switch for overlapped scheduling."""

    num_blocks: int
    num_host_blocks: int = 0  # in host memory, for evicted blocks
    block_size: int = 16  # tokens of a base block, which the hashes of the prefix cache name
    # The block tables of each sequence, as of `plan_tables`; empty stands for one full table.
    tables: tuple[TableSpec, ...] = ()
    num_states: int = 0  # in device memory; 0: the model keeps no state
    num_host_states: int = 0  # in host memory, for evicted states
    state_tokens: int = 0  # tokens of KV cache that have as many bytes as a state
    # The longest sequence that the draft model computes; None: as long as the model's.
    draft_context_tokens: int | None = None
    # Schedule a step while the last one runs; for executors whose launch does not wait.
    overlap: bool = False
    budgets: Budgets = Budgets()

    def __post_init__(self) -> None:
        if not self.tables:  # the dataclass is frozen
            object.__setattr__(self, "tables", (TableSpec(block_size=self.block_size),))

    @property
    def capacity_tokens(self) -> int:
        """Returns the length of the longest sequence that fits into all blocks."""
        if len(self.tables) == 1 and self.tables[0].window is None:
            return self.num_blocks * self.block_size
        longest = range(self.num_blocks * max(table.block_size for table in self.tables) + 1)
        return max(bisect_right(longest, self.num_blocks, key=self._least_blocks) - 1, 0)

    @property
    def table_limits(self) -> TableLimits:
        """Returns the limits that decide the number of blocks of a table."""
        budgets = self.budgets
        # With overlap a step is in flight whose blocks cannot leave the window yet.
        num_chunks = 2 if self.overlap else 1
        return TableLimits(
            alignment=alignment(self.tables),
            ahead_tokens=num_chunks * max(budgets.chunk_tokens, budgets.mixed_chunk_tokens),
            growth_tokens=budgets.growth_tokens,
        )

    def _least_blocks(self, num_tokens: int) -> int:
        """Returns the number of blocks that a sequence of `num_tokens` needs at least."""
        return sum(
            least_blocks(
                table,
                self.table_limits,
                num_tokens=num_tokens,
                max_length=num_tokens,
                is_computed=True,
                num_branches=1,
                is_search=False,
            )
            for table in self.tables
        )
