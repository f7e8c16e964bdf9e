"""Holds the configuration of an engine."""

from dataclasses import dataclass


def default_chunk_tokens(device: str, num_threads: int = 0) -> int:
    """Returns the prefill chunk size, in tokens, for a kind of device as torch names them, and the threads of a CPU, 0
    for several. One thread computes chunks of 128 as fast as longer ones, for whose end what is urgent waits longer;
    two take a sixth longer for them than for 512."""
    if device != "cpu":
        return 2048
    return 128 if num_threads == 1 else 512


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Holds the limits of an engine's batch and queue, in tokens and sequences."""

    chunk_tokens: int = 512  # prompt tokens computed in one step
    mixed_chunk_tokens: int = 512  # prompt tokens of a step that also has decodes, which all wait for them
    max_sequences: int = 64  # sequences that hold blocks at once
    max_waiting: int = 1024  # sequences in the queue
    growth_tokens: int = 256  # generated tokens whose blocks admission reserves; later blocks come one by one
    prefix_caching: bool = True


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Holds an engine's budgets, its number of KV blocks, and whether it overlaps scheduling with execution."""

    num_blocks: int
    block_size: int = 16  # tokens
    overlap: bool = False  # schedule a step while the last one runs; for executors whose launch does not wait
    budgets: Budgets = Budgets()

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that fits into all blocks."""
        return self.num_blocks * self.block_size
