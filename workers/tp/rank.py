"""One tensor-parallel rank: the model, the memory for its KV cache, and what the worker must know of both."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ..engine.plan import Executor
from ..kv_cache.store import KvStore
from ..model.device import enter_device
from ..model.kernels import cpu
from ..model.loader import open_checkpoint
from ..model.parallel import Group
from ..model.runner import ModelRunner, kv_bytes_per_block
from ..transfer.transports import Means


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """What one rank loads, where it computes and how it is reached."""

    model: str  # folder
    dtype: str = "bfloat16"
    device: str = "cpu"
    block_size: int = 16
    kv_cache_bytes: int = 1 << 30  # of this rank
    context_tokens: int | None = None  # None takes the model's
    num_threads: int = 1  # of torch, on CPU
    transports: tuple[str, ...] = ("shared",)  # of KV cache, beside gRPC: shared, gloo, nccl or nixl
    priority: int = 0  # nice value of the thread that computes on a CPU
    host: str = "127.0.0.1"  # the one interface to bind
    port: int = 0  # 0 takes a free one
    stall_seconds: float = 30.0  # a KV transfer without progress for so long has failed
    collective_seconds: float = 30.0  # how long ranks of a group wait for each other within a step
    start_seconds: float = 300.0  # how long ranks of a group wait for each other to load

    @property
    def means(self) -> Means:
        """Of moving KV cache to other workers and from them."""
        return Means(transports=self.transports, host=self.host, device=self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A loaded rank, ready to carry out plans."""

    executor: Executor
    kv: KvStore
    num_blocks: int
    block_size: int
    vocab_size: int
    context_tokens: int
    eos_ids: frozenset[int]
    launches_ahead: bool = False  # the executor starts a step before the one before it has ended
    # Holds a grammar ready as long as somebody holds the result; raises ValueError, whose text a user may see.
    load_grammar: Callable[[str], object] | None = None


class MeetingGroup(Group, Protocol):
    """A group whose ranks have to find each other first."""

    def meet(self) -> None:
        """Waits for all ranks."""
        ...


def load_rank(config: RankConfig, group: MeetingGroup | None = None) -> Rank:
    """Checks the folder, loads its weights, of a group's model the own part, and takes the KV memory; then meets the
    group and warms up together with it. Raises CheckpointError if the folder is not good, ValueError if the KV memory
    holds not even one block or the model cannot be split so, RuntimeError if the group does not meet. Blocks for
    seconds."""
    torch.set_num_threads(config.num_threads)
    checkpoint = open_checkpoint(Path(config.model))
    model = checkpoint.config
    tp = group.size if group else 1
    num_blocks = config.kv_cache_bytes // kv_bytes_per_block(model, config.block_size, config.dtype, tp)
    if num_blocks < 1:
        raise ValueError(f"kv_cache_bytes: {config.kv_cache_bytes} holds not one block of {config.block_size} tokens")
    runner = ModelRunner.load(
        checkpoint,
        dtype=config.dtype,
        device=config.device,
        num_blocks=num_blocks,
        block_size=config.block_size,
        shared=not {"shared", "nixl"}.isdisjoint(config.transports),
        group=group,
    )
    if group:
        group.meet()
    runner.warmup()
    context = min(config.context_tokens or model.max_position_embeddings, model.max_position_embeddings)
    return Rank(
        executor=runner,
        kv=runner.kv,
        num_blocks=num_blocks,
        block_size=config.block_size,
        vocab_size=model.vocab_size,
        context_tokens=context,
        launches_ahead=runner.launches_ahead,
        eos_ids=frozenset(model.eos_token_ids),
        load_grammar=runner.load_grammar,
    )


def enter_engine_thread(config: RankConfig) -> None:
    """Call once in the thread that is to run the executor of this process's only rank."""
    enter_device(config.device)
    if config.device == "cpu" and config.priority:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), config.priority)
    cpu.bind_threads()
