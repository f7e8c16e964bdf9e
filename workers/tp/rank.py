"""Loads one tensor-parallel rank: its part of the model and the memory for its KV cache."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ...proto.identity import PeerIdentity
from ...proto.metrics import NULL_METRICS, Metrics
from ..engine.block_table import NUM_STATES
from ..engine.config import Budgets, EngineConfig
from ..engine.plan import Executor
from ..host.threads import available_cores, let_others_first
from ..kv_cache.store import KvStore
from ..model.checkpoint import Checkpoint
from ..model.config import ModelConfig
from ..model.device import check_gpu, enter_device
from ..model.footprint import (
    CacheBytes,
    CacheCounts,
    check_device,
    check_draft,
    kv_bytes_per_token,
    kv_layout,
    state_tokens,
)
from ..model.kernels.c import cpu
from ..model.loader import LoadedModel, load_model, open_checkpoint
from ..model.runner import ModelRunner
from ..model.warmup import StepLimits
from ..transfer.connector import TransferContext
from .adapter_loader import adapter_loader
from .adapters import LoadOnRank
from .draft_model import DraftingExecutor
from .memory import CacheSize, CudaMemory, explain_out_of_memory, gpu_blocks, host_counts
from .nice_executor import NiceExecutor, usual_niceness
from .process_group import TpGroup


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """Describes the model that one rank loads, where it computes and how it is reached."""

    model: str  # folder
    identity: PeerIdentity  # of the service
    dtype: str = "bfloat16"
    quantization: str | None = None  # see `open_checkpoint`
    draft_model: str | None = None  # folder of a second model that proposes tokens
    kv_cache_dtype: str = "auto"  # see `KvLayout`
    device: str = "cpu"
    batch_invariant: bool = False  # see `ModelRunner.load`
    model_impl: str = "auto"  # see `registry.find_model`
    block_size: int = 16
    kv_cache_bytes: int | None = 1 << 30  # of this rank; None: as much as its memory holds
    # The rank's share of its GPU or host, and the part of the share to use: see `memory`.
    memory_share: float = 1.0
    memory_utilization: float = 0.9
    # The maximum of tokens and of sequences in a step, for which memory is kept on GPUs.
    max_step_tokens: int = 2048
    max_step_rows: int = 256
    kv_host_bytes: int = 0  # of this rank's host memory, for blocks that leave the KV cache
    # Of a model that keeps states; see `CacheBytes.split`.
    state_slots: int | None = None
    max_sequences: int = 64
    sequence_states: int = NUM_STATES  # states that one sequence takes
    context_tokens: int | None = None  # None takes the model's
    num_threads: int = 1  # of torch, on CPU; 0 takes every core that this process may use
    transports: tuple[str, ...] = ("shared",)  # of KV cache, preferred to gRPC in this order
    nice: int = 0  # added to the niceness of the thread that computes on a CPU, see `NiceExecutor`
    host: str = "127.0.0.1"  # the one interface to bind
    port: int = 0  # 0: any free port
    stall_seconds: float = 30.0  # timeout of a KV transfer without progress
    collective_seconds: float = 30.0  # timeout of a group's collectives
    silence_seconds: float = 5.0  # timeout of the heartbeats between a group's ranks
    start_seconds: float = 300.0  # timeout of the ranks' waits for each other while they load
    adapter_folders: tuple[str, ...] = ()  # adapters come from these folders and those below them
    max_loras: int = 8  # maximum of adapters in memory
    max_lora_rank: int = 64

    def cache_size(self, num_bytes: CacheBytes) -> CacheSize:
        """Returns the size of this rank's KV cache."""
        return CacheSize(
            bytes=num_bytes,
            block_size=self.block_size,
            cache_bytes=self.kv_cache_bytes,
            share=self.memory_share,
            utilization=self.memory_utilization,
            limits=StepLimits(num_tokens=self.max_step_tokens, num_rows=self.max_step_rows),
            state_slots=self.state_slots,
            max_sequences=self.max_sequences,
            sequence_states=self.sequence_states,
        )

    def transfer_context(self, kv: KvStore, metrics: Metrics = NULL_METRICS) -> TransferContext:
        """Returns the context for transfers of this rank's KV cache."""
        return TransferContext(
            kv=kv, transports=self.transports, host=self.host, device=self.device, metrics=metrics
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Holds a loaded rank, ready to execute plans."""

    executor: Executor
    kv: KvStore
    num_blocks: int
    block_size: int
    vocab_size: int
    context_tokens: int
    eos_ids: frozenset[int]
    launches_ahead: bool = False  # the executor starts a step before the last one has ended
    # Compiles a grammar for an owner and a tenant, see `GrammarCache.load`. Thread-safe. Raises
    # ValueError if the grammar is wrong, with a text that may be shown to users. queue.Full and
    # OSError have other causes than the grammar.
    load_grammar: Callable[[str, bytes, bytes], object] = lambda text, owner, tenant: None
    num_graph_replays: Callable[[], int] = lambda: 0  # steps that ran as a CUDA graph
    num_host_blocks: int = 0  # in host memory, for blocks that leave the KV cache
    # As of `EngineConfig`.
    num_states: int = 0
    num_host_states: int = 0
    state_tokens: int = 0
    draft_context_tokens: int | None = None
    load_adapter: LoadOnRank = lambda number, adapter: "this worker takes no adapters"

    def engine_config(self, budgets: Budgets) -> EngineConfig:
        """Returns the configuration of the engine that runs on this rank.

        The states of a model may allow fewer sequences at once than `budgets`.
        """
        if self.num_states:
            most = max(self.num_states // NUM_STATES, 1)
            budgets = replace(budgets, max_sequences=min(budgets.max_sequences, most))
        return EngineConfig(
            num_blocks=self.num_blocks,
            num_host_blocks=self.num_host_blocks,
            num_states=self.num_states,
            num_host_states=self.num_host_states,
            state_tokens=self.state_tokens,
            draft_context_tokens=self.draft_context_tokens,
            block_size=self.block_size,
            tables=self.kv.tables,
            overlap=self.launches_ahead,
            budgets=budgets,
        )


def load_rank(config: RankConfig, group: TpGroup | None = None) -> Rank:
    """Loads this rank: weights, KV memory and the group's connections. Blocks for seconds.

    Checks the device and the model folder, loads this rank's part of the weights, allocates the KV
    memory, connects the group, and warms up together with it.

    Raises CheckpointError for a bad folder. Raises ValueError if there is no GPU for `device`, if
    kv_cache_bytes or kv_host_bytes is smaller than a block or does not fit into memory, or if the
    model cannot be split into group.size parts. Raises RuntimeError if the group's other ranks do
    not come.
    """
    check_gpu(config.device)
    torch.set_num_threads(config.num_threads or available_cores())
    checkpoint = open_checkpoint(
        Path(config.model),
        config.model_impl,
        quantization=config.quantization,
        context_tokens=config.context_tokens,
    )
    model = checkpoint.config
    tp = group.size if group else 1
    check_device(model, config.device, batch_invariant=config.batch_invariant)
    layout = kv_layout(model, config.dtype, config.kv_cache_dtype)
    draft, draft_bytes = _open_draft(config, model)
    cache = CacheBytes.of(layout, tp, block_size=config.block_size, draft_bytes=draft_bytes)
    host = CacheBytes.of(layout, tp, block_size=config.block_size)
    _check_holds_block(config, "kv_cache_bytes", cache.block)
    _check_holds_block(config, "kv_host_bytes", host.block)
    memory = CudaMemory(config.device, config.memory_share) if config.device != "cpu" else None
    if memory:
        # torch keeps the cache of an engine that has ended, and would split it for the weights.
        memory.release()
    models = _load_models(config, checkpoint, None if group and group.rank else draft, group)
    if group:
        group.connect()
    size = config.cache_size(cache)
    build = partial(_build_runners, config, models)
    if memory is None:
        counts = host_counts(size, group)
    else:
        counts = CacheCounts(num_blocks=gpu_blocks(size, build, memory, config.device, group))
    host_size = host.split_host(config.kv_host_bytes, counts)
    with explain_out_of_memory("the KV cache does not fit as measured; lower it"):
        runner, *proposers = build(counts.num_blocks, counts.num_states, host_size)
        if group:
            group.meet("allocated")  # a rank may have pinned much more slowly than another one
        for each in (runner, *proposers):
            each.warmup(size.limits)
        if group:
            group.meet("warm")  # only rank 0 warms up a draft model
    return Rank(
        executor=_make_executor(config, runner, proposers),
        kv=runner.kv,
        num_blocks=counts.num_blocks,
        num_host_blocks=host_size.num_blocks,
        num_states=counts.num_states,
        num_host_states=host_size.num_states,
        state_tokens=state_tokens(layout, tp),
        draft_context_tokens=draft.config.context_tokens if draft else None,
        block_size=config.block_size,
        vocab_size=model.vocab_size,
        context_tokens=model.context_tokens,
        launches_ahead=runner.launches_ahead,
        eos_ids=frozenset(model.eos_token_ids),
        load_grammar=runner.load_grammar,
        num_graph_replays=runner.num_graph_replays,
        load_adapter=adapter_loader(runner, config.adapter_folders, config.max_lora_rank),
    )


def _load_models(
    config: RankConfig, checkpoint: Checkpoint, draft: Checkpoint | None, group: TpGroup | None
) -> list[LoadedModel]:
    """Loads this rank's part of the model, and the draft model, if there is one."""
    with explain_out_of_memory("the weights do not fit; raise num_gpus"):
        loaded = load_model(
            checkpoint,
            dtype=config.dtype,
            device=config.device,
            group=group,
            batch_invariant=config.batch_invariant,
        )
        if draft is None:
            return [loaded]
        return [loaded, load_model(draft, dtype=config.dtype, device=config.device)]


def _build_runners(
    config: RankConfig,
    models: Sequence[LoadedModel],
    num_blocks: int,
    num_states: int = 0,
    host: CacheCounts = CacheCounts(num_blocks=0),
) -> list[ModelRunner]:
    """Returns the runner of the model, and of the draft model, if there is one."""
    model, *drafts = models
    runner = ModelRunner.over(
        model,
        cache_dtype=config.kv_cache_dtype,
        num_blocks=num_blocks,
        num_host_blocks=host.num_blocks,
        num_states=num_states,
        num_host_states=host.num_states,
        block_size=config.block_size,
        shared=not {"shared", "nixl"}.isdisjoint(config.transports),
    )
    block_size = runner.kv.tables[0].block_size
    proposers = [
        ModelRunner.over(draft, num_blocks=num_blocks, block_size=block_size) for draft in drafts
    ]
    return [runner, *proposers]


def _make_executor(
    config: RankConfig, runner: ModelRunner, proposers: Sequence[ModelRunner]
) -> Executor:
    executor: Executor = NiceExecutor(runner, config.nice) if config.device == "cpu" else runner
    return DraftingExecutor(executor, proposers[0]) if proposers else executor


def _open_draft(config: RankConfig, model: ModelConfig) -> tuple[Checkpoint | None, int]:
    """Opens the checkpoint of the draft model, if there is one.

    Returns it and its KV bytes per token. Raises ValueError for a bad folder and for a model with
    another vocabulary.
    """
    if config.draft_model is None:
        return None, 0
    try:
        draft = open_checkpoint(Path(config.draft_model))
        check_draft(draft.config, model)
    except ValueError as error:
        raise ValueError(f"draft_model: {error}") from None
    return draft, kv_bytes_per_token(draft.config, 1, config.dtype)


def _check_holds_block(config: RankConfig, setting: str, block_bytes: int) -> None:
    """Raises ValueError if a setting has bytes, but fewer than a block."""
    size: int | None = getattr(config, setting)
    if size and size < block_bytes:
        raise ValueError(
            f"{setting}: {size} is below {block_bytes}, the size of a block of {config.block_size} "
            "tokens; raise it"
        )


def enter_engine_thread(config: RankConfig) -> None:
    """Prepares the calling thread to run the executor of this process's only rank.

    Sets device, time slice, niceness and CPU binding.
    """
    enter_device(config.device)
    if config.device == "cpu":
        let_others_first()
        if config.nice:
            os.setpriority(
                os.PRIO_PROCESS, threading.get_native_id(), usual_niceness() + config.nice
            )
        cpu.bind_threads()
