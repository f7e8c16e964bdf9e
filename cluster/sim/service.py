"""Describes a service to simulate, and what happens to it besides requests."""

from dataclasses import dataclass, field
from functools import cached_property

from ...proto.costs import KvCost, TableCost
from ...workers.engine.config import Budgets, EngineConfig
from ...workers.kv_cache.tables import TableSpec
from ..config import PoolRole, RouterConfig
from ..scaling.config import ScalingConfig


@dataclass(frozen=True, kw_only=True)
class SimulatedPool:
    """Describes the workers of one role."""

    workers: int
    num_blocks: int  # of KV cache, on each worker
    budgets: Budgets = field(default_factory=Budgets)
    overlap: bool = False  # schedule a step while the last one runs, as on GPUs
    # None: the number of workers is fixed. Otherwise `workers` is the minimum.
    scaling: ScalingConfig | None = None
    start_seconds: float = 30.0  # until a new worker is ready


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Kills a worker at a time; it comes back after `restart_seconds`, or never for None."""

    time: float
    role: PoolRole
    number: int = 0  # of the worker among those of its role that run at that time
    restart_seconds: float | None = 30.0


@dataclass(frozen=True, kw_only=True)
class Resize:
    """Sets the number of workers of a role at a time, as an operator does."""

    time: float
    role: PoolRole
    workers: int


@dataclass(frozen=True, kw_only=True)
class SimulatedService:
    """Describes a service: its pools, its model's KV cache, and the bounds of its routers."""

    decode: SimulatedPool
    prefill: SimulatedPool | None = None  # None: decode workers compute prompts as well
    token_bytes: int  # of KV cache
    # The block tables of the model, as of `table_costs`; empty stands for one full table.
    tables: tuple[TableCost, ...] = ()
    context_tokens: int
    block_size: int = 16
    routers: int = 1
    router: RouterConfig = field(default_factory=RouterConfig)  # its bounds and times, no server
    lease_seconds: float = 30.0
    faults: tuple[Fault, ...] = ()
    resizes: tuple[Resize, ...] = ()
    # False: engines compute consecutive decode steps at once (coarse.py); for hundreds of workers.
    exact: bool = True

    @property
    def pools(self) -> dict[PoolRole, SimulatedPool]:
        """Returns the pools that exist, by role."""
        pools: dict[PoolRole, SimulatedPool] = {"decode": self.decode}
        if self.prefill is not None and (self.prefill.workers or self.prefill.scaling):
            pools["prefill"] = self.prefill
        return pools

    @cached_property
    def kv(self) -> KvCost:
        """Returns the costs of the model's KV cache."""
        tables = self.tables or (TableCost(self.block_size, self.token_bytes),)
        has_sparse_points = tables[0].window is not None
        return KvCost(self.block_size, tables, has_sparse_points=has_sparse_points)

    def engine_config(self, pool: SimulatedPool) -> EngineConfig:
        """Returns the configuration of the engines of a pool's workers."""
        return EngineConfig(
            num_blocks=pool.num_blocks,
            block_size=self.block_size,
            tables=tuple(
                TableSpec(block_size=each.block_size, window=each.window) for each in self.tables
            ),
            # A coarse engine cannot overlap steps.
            overlap=pool.overlap and self.exact,
            budgets=pool.budgets,
        )
