"""Derives a worker's configuration from the configuration of the service. Imports no Ray."""

from typing import Final

from ...proto.identity import PeerIdentity
from ...workers.engine.block_table import NUM_STATES, PREFILL_STATES
from ...workers.engine.config import Budgets, SpeculativeConfig, has_burst_chunks
from ...workers.engine.plan import CpuShare
from ...workers.host.threads import available_cores
from ...workers.serve.worker import RoleConfig, WorkerConfig
from ...workers.tp.rank import RankConfig
from ..config import PoolRole, TandemConfig

# Niceness on CPUs. A prefill step may wait for other processes on its cores; a decode step and
# the threads that communicate may not.
_PREFILL_NICE: Final = 10
_GIB: Final = 1024**3


def rank_threads(num_threads: int | None, ranks_per_node: int, num_cpus: float) -> int:
    """Returns the number of threads of a rank in this process.

    This is `num_threads` if it is given. Otherwise it is the rank's share of the cores that this
    process may use, at most the `num_cpus` that it has reserved in Ray (below 1: no bound). More
    threads than cores would spin against each other, which slows OpenMP down by a factor of 5 to
    50.
    """
    if num_threads:
        return num_threads
    share = max(1, available_cores() // ranks_per_node)
    return min(share, int(num_cpus)) if num_cpus >= 1 else share


def worker_config(
    config: TandemConfig,
    role: PoolRole,
    folder: str,
    num_threads: int,
    identity: PeerIdentity,
    *,
    host: str,
    ranks_per_node: int,
) -> WorkerConfig:
    """Returns the configuration of a worker of the pool `role`, which binds `host`.

    `folder` holds the model. The ranks of a node share its memory. If the worker takes the other
    role, it takes the other pool's budgets, niceness and threads, within the memory of its own
    pool.
    """
    pool = config.pools[role]
    speculative = config.speculative
    if role == "prefill" and speculative is not None and speculative.model is not None:
        # It does not load the draft model, and streams must not wait for its drafts.
        speculative = None
    roles: dict[str, RoleConfig] = {
        name: _role_config(config, name, each.num_threads or num_threads, speculative)
        for name, each in config.pools.items()
    }
    budgets = roles[role].budgets
    share, utilization = config.memory_share(pool, ranks_per_node)
    rank = RankConfig(
        model=folder,
        identity=identity,
        dtype=config.dtype,
        quantization=config.quantization,
        draft_model=None if speculative is None else speculative.model,
        kv_cache_dtype=config.kv_cache_dtype,
        device=config.device,
        batch_invariant=config.numerics == "exact",
        model_impl=config.model_impl,
        block_size=pool.block_size,
        kv_cache_bytes=None if pool.kv_cache_gb is None else int(pool.kv_cache_gb * _GIB),
        memory_share=share,
        memory_utilization=utilization,
        max_step_tokens=budgets.max_step_tokens,
        max_step_rows=budgets.max_step_rows,
        kv_host_bytes=int(pool.kv_host_gb * _GIB),
        state_slots=pool.state_slots,
        max_sequences=budgets.max_sequences,
        sequence_states=PREFILL_STATES if role == "prefill" else NUM_STATES,
        context_tokens=config.context_tokens,
        num_threads=num_threads,
        transports=config.transports,
        nice=roles[role].share.nice,
        host=host,
        start_seconds=config.start_seconds,
        silence_seconds=config.silence_seconds,
        adapter_folders=config.adapter_folders,
        max_loras=config.lora.max_loras,
        max_lora_rank=config.lora.max_lora_rank,
    )
    return WorkerConfig(
        rank=rank,
        budgets=budgets,
        roles=roles,
        kv_disk=pool.kv_disk,
        kv_disk_bytes=int(pool.kv_disk_gb * _GIB),
        lease_seconds=config.lease_seconds,
        hang_seconds=config.hang_seconds,
    )


def _role_config(
    config: TandemConfig, role: PoolRole, num_threads: int, speculative: SpeculativeConfig | None
) -> RoleConfig:
    """Returns the settings that a worker takes from the pool `role` with this role."""
    pool = config.pools[role]
    budgets = Budgets(
        chunk_tokens=config.chunk_tokens(pool, num_threads),
        mixed_chunk_tokens=config.mixed_chunk_tokens(pool),
        mixed_step_factor=pool.mixed_step_factor,
        burst_chunks=has_burst_chunks(config.prefill.max_replicas),
        max_sequences=config.max_sequences(pool),
        prefix_caching=config.prefix_caching,
        speculative=speculative,
    )
    nice = _PREFILL_NICE if role == "prefill" else 0
    return RoleConfig(budgets=budgets, share=CpuShare(nice=nice, num_threads=pool.num_threads or 0))
