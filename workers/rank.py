"""One tensor-parallel rank: the model, the memory for its KV cache, and what the worker must know of both."""

import os
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from .engine.plan import Executor, KvStore
from .model.checkpoint import check_checkpoint
from .model.kernels import cpu
from .model.runner import ModelRunner, kv_bytes_per_block


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """What one rank loads and where it computes."""

    model: str  # folder
    dtype: str = "bfloat16"
    device: str = "cpu"
    block_size: int = 16
    kv_cache_bytes: int = 1 << 30
    context_tokens: int | None = None  # None takes the model's
    num_threads: int = 1  # of torch, on CPU
    shared_memory: bool = True  # other workers of the host may map the KV cache, to read
    priority: int = 0  # nice value of the thread that computes on a CPU


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


def load_rank(config: RankConfig) -> Rank:
    """Checks the folder, loads its weights and takes the KV memory. Raises CheckpointError if the folder is not good,
    ValueError if the KV memory holds not even one block. Blocks for seconds."""
    torch.set_num_threads(config.num_threads)
    folder = Path(config.model)
    model = check_checkpoint(folder)
    num_blocks = config.kv_cache_bytes // kv_bytes_per_block(model, config.block_size, config.dtype)
    if num_blocks < 1:
        raise ValueError(f"kv_cache_bytes: {config.kv_cache_bytes} holds not one block of {config.block_size} tokens")
    runner = ModelRunner.load(
        folder,
        dtype=config.dtype,
        device=config.device,
        num_blocks=num_blocks,
        block_size=config.block_size,
        shared=config.shared_memory,
    )
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
    )


def enter_engine_thread(config: RankConfig) -> None:
    """Call once in the thread that is to run the executor of this process's only rank."""
    if config.device == "cpu" and config.priority:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), config.priority)
    cpu.bind_threads()
