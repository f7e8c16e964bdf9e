"""What an engine is told once."""

from dataclasses import dataclass


def default_chunk_tokens(device: str) -> int:
    """For a kind of device, as torch names them."""
    return 512 if device == "cpu" else 2048


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """What an engine may take on, in tokens and sequences."""

    chunk_tokens: int = 512  # of prompts, computed in one step
    mixed_chunk_tokens: int = 512  # the same beside sequences that decode: all of them wait for it
    max_sequences: int = 64  # sequences that hold blocks at once
    max_waiting: int = 1024  # sequences in the queue
    growth_tokens: int = 256  # room for generated tokens that admission reserves; beyond it blocks come one by one
    prefix_caching: bool = True


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Budgets):
    """Budgets, the blocks there are, and how the executor likes its steps."""

    num_blocks: int
    block_size: int = 16
    overlap: bool = False  # schedule a step while the one before still runs; for executors that launch without waiting

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that could ever fit."""
        return self.num_blocks * self.block_size
