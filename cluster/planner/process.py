"""Runs the processes of a measurement: workers as they would serve.

`python -m tandem.cluster.planner.process` reads a line of JSON from standard input, a ProcessSpec,
and then the arguments of one measurement in each line (`_measure`); it answers each with a line of
JSON. It ends with its input.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from ...proto.errors import Unavailable
from ...proto.identity import PeerIdentity
from ...workers.host.malloc import keep_freed_memory
from ...workers.host.threads import in_thread
from ...workers.kv_cache.memory import table_costs
from ...workers.model.device import enter_device
from ...workers.model.kv.store import PagedKv
from ...workers.serve.worker import WorkerConfig
from ...workers.tp.coordinator import TpCoordinator
from ...workers.tp.rank import Rank, enter_engine_thread
from ..config import PoolRole, TandemConfig
from ..local.environment import compute_environment
from ..local.ranks import end_process, local_ranks
from ..local.worker import rank_threads, worker_config
from ..sim.cost import LEAST_SAMPLES, StepSample
from .grid import list_scenarios, measure_grid
from .profile import ProfiledBudgets

_HOST: Final = "127.0.0.1"

_END_SECONDS: Final = 10.0

Answer = dict[str, Any]


class ProcessSpec(BaseModel):
    """Describes a process of the measurement."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: TandemConfig
    folder: str
    identity: str
    role: PoolRole = "decode"
    workers: int = 1  # that share this machine


class MeasuredProcess:
    """Tells a process which steps to measure."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def measure(self, **arguments: Any) -> Answer:
        """Returns the answer of `_measure`. Raises Unavailable if the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
        return await self.answer()

    async def answer(self) -> Answer:
        """Returns the next answer; the first one follows the start."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise Unavailable("a process of the measurement has ended; see its message above")
        found: Answer = json.loads(line)
        return found


@asynccontextmanager
async def run_process(spec: ProcessSpec) -> AsyncIterator[tuple[MeasuredProcess, Answer]]:
    """Runs a process while the context lasts. Yields it with its first answer."""
    pool = spec.config.pools[spec.role]
    environment = compute_environment(pool)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", __name__),
        stdin=PIPE,
        stdout=PIPE,
        env=os.environ | environment,
        start_new_session=True,
        limit=1 << 24,
    )
    child = MeasuredProcess(process)
    try:
        assert process.stdin is not None
        process.stdin.write(spec.model_dump_json().encode() + b"\n")
        yield child, await child.answer()
    finally:
        await end_process(process, _END_SECONDS)


async def _run_worker(spec: ProcessSpec) -> None:
    config = spec.config
    pool = config.pools[spec.role]
    num_ranks = spec.workers * pool.tp
    num_threads = rank_threads(pool.num_threads, num_ranks, pool.num_cpus)
    own = worker_config(
        config,
        spec.role,
        spec.folder,
        num_threads,
        PeerIdentity.from_text(spec.identity),
        host=_HOST,
        ranks_per_node=num_ranks,
    )
    async with AsyncExitStack() as scope:
        ranks = await scope.enter_async_context(
            local_ranks(own.rank, pool.tp - 1, compute_environment(pool))
        )
        keep_freed_memory()
        enter_device(config.device)
        coordinator, rank = await TpCoordinator.load(own.rank, ranks)
        scope.push_async_callback(coordinator.close)
        _touch(rank)
        engine = rank.engine_config(own.budgets)
        first = {
            "threads": num_threads,
            "num_blocks": rank.num_blocks,
            "block_size": rank.block_size,
            "context_tokens": min(rank.context_tokens, engine.capacity_tokens),
            "vocab_size": rank.vocab_size,
            "token_bytes": rank.kv.layout.bytes_per_token,
            "tables": table_costs(rank.kv.layout, rank.kv.tables),
            "overlap": engine.overlap,
            "budgets": {
                name: getattr(engine.budgets, name) for name in ProfiledBudgets.model_fields
            },
        }
        _write(first)
        while line := await asyncio.to_thread(sys.stdin.readline):
            _write(await _measure(own, rank, **json.loads(line)))


def _touch(rank: Rank) -> None:
    """Writes to all KV memory: pages that nobody has written are not read from memory."""
    assert isinstance(rank.kv, PagedKv)
    for parts in rank.kv.layers:
        for part in parts:
            part.fill_(1)


async def _measure(
    own: WorkerConfig, rank: Rank, *, seconds: float, context_tokens: int, every: int = 1
) -> Answer:
    """Measures the grid, or each `every`-th scenario of it, in a thread like the engine's."""
    engine = rank.engine_config(own.budgets)
    scenarios = list_scenarios(
        engine.budgets,
        context_tokens=context_tokens,
        capacity_tokens=engine.capacity_tokens,
    )
    # The costs are fitted to the whole grid. Of a part of it, one step tells the contention.
    least = LEAST_SAMPLES if every == 1 else 1

    def measure() -> Sequence[StepSample]:
        enter_engine_thread(own.rank)
        return measure_grid(
            rank.executor, engine, scenarios[::every], rank.vocab_size, seconds, least
        )

    samples = await in_thread(measure, "tandem-engine")
    return {"samples": [each.as_row() for each in samples]}


def _write(answer: Answer) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _main() -> None:
    asyncio.run(_run_worker(ProcessSpec.model_validate_json(sys.stdin.readline())))


if __name__ == "__main__":
    _main()
