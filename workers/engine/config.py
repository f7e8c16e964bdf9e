"""Holds the configuration of an engine."""

from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ...proto.limits import mixed_chunk


def default_chunk_tokens(device: str, num_threads: int = 0) -> int:
    """Returns the prefill chunk size, in tokens, for a kind of device as torch names them, and the
    threads of a CPU, 0 for several. One thread computes chunks of 128 as fast as longer ones, for
    whose end what is urgent waits longer; two take a sixth longer for them than for 512.
    """
    if device != "cpu":
        return 2048
    return 128 if num_threads == 1 else 512


class SpeculativeConfig(BaseModel):
    """Configures speculative decoding, with the names of vLLM: what follows the last n-gram
    elsewhere in a sequence, or what a small draft model proposes, is guessed to follow now, and
    verified in one step. Changes no token. With a `model` and no `method` it is draft_model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    method: Literal["ngram", "draft_model"] = "ngram"
    # that drafts, named as the service's own
    model: str | None = Field(default=None, min_length=1, max_length=4096)
    # of a sequence in one step, at most
    num_speculative_tokens: int = Field(default=5, ge=1, le=64)
    prompt_lookup_min: int = Field(default=3, ge=1, le=64)  # tokens of an n-gram
    prompt_lookup_max: int = Field(default=5, ge=1, le=64)
    # Decodes and guesses of one step; more would be bound by computing, and a guess cost what a
    # token costs.
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
                "speculative.model: goes with method draft_model, and that with it, got "
                f"{self.method}"
            )
        return self

    @model_validator(mode="after")
    def _has_lengths(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            most = f"at most prompt_lookup_max, {self.prompt_lookup_max}"
            raise ValueError(
                f"speculative.prompt_lookup_min: must be {most}, got {self.prompt_lookup_min}"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Holds the limits of an engine's batch and queue, in tokens and sequences."""

    chunk_tokens: int = 512  # prompt tokens computed in one step
    # the same at most beside decodes, which all wait for it, see chunk_beside
    mixed_chunk_tokens: int = 512
    max_sequences: int = 64  # sequences that hold blocks at once
    max_waiting: int = 1024  # sequences in the queue
    # generated tokens whose blocks admission reserves; later blocks come one by one
    growth_tokens: int = 256
    prefix_caching: bool = True
    speculative: SpeculativeConfig | None = None

    def chunk_beside(self, num_decodes: int, num_prompts: int) -> int:
        """Returns the prompt tokens that a step may compute if so many prompts are under way or
        wait.
        """
        return (
            mixed_chunk(self.mixed_chunk_tokens, num_decodes + num_prompts)
            if num_decodes
            else self.chunk_tokens
        )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Holds an engine's budgets, its number of KV blocks, and whether it overlaps scheduling with
    execution.
    """

    num_blocks: int
    num_host_blocks: int = 0  # in host memory, of what leaves the others
    block_size: int = 16  # tokens
    # schedule a step while the last one runs; for executors whose launch does not wait
    overlap: bool = False
    budgets: Budgets = Budgets()

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that fits into all blocks."""
        return self.num_blocks * self.block_size
