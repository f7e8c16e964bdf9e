"""Compares placement among a bounded number of workers with a full scan, in simulated time.

The routers' registries are real; the workers only count (router/scheduling/simulation.py).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import quantiles
from typing import Final

from tandem.cluster.traces.prompts import prompt_ids
from tandem.cluster.traces.read import TracedRequest
from tandem.router.garbage import collections_paused
from tandem.router.request import TokenRequest
from tandem.router.scheduling import pool
from tandem.router.scheduling.policy import Placement
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.tests.router.scheduling.simulation import Figures, Pools, Simulation, Traffic

_NO_BOUND: Final = 1_000_000
_VOCAB_SIZE: Final = 50_000


@dataclass(frozen=True, kw_only=True)
class PlacementFigures:
    """The results of one way to place."""

    simulated: Figures
    milliseconds: list[float]  # CPU time of each call of `place`

    def percentile(self, percent: int) -> float:
        """Returns a percentile of the milliseconds."""
        return quantiles(self.milliseconds, n=100)[percent - 1]


def run(
    num_workers: int,
    conversations: int,
    trace: Sequence[TracedRequest],
    *,
    full_scan: bool = False,
    routers: int = 1,
    idle_report_seconds: float = 0.0,
) -> PlacementFigures:
    """Simulates a trace, or else conversations, on two pools of equal size.

    `idle_report_seconds`: from one report of a worker to the next while a router has no requests
    there.
    """
    milliseconds: list[float] = []

    def place(registry: WorkerRegistry, asked: TokenRequest) -> Placement | None:
        # The objects of the simulation make garbage collections frequent and long.
        with collections_paused():
            began = time.thread_time()
            placement = registry.place(asked)
            milliseconds.append(1e3 * (time.thread_time() - began))
        return placement

    half = num_workers // 2
    pools = Pools(prefill=half, decode=half)
    # Each prefill worker computes for about half of the time.
    traffic = Traffic(conversations=conversations, per_second=0.3 * half)
    simulation = Simulation(
        place,
        traffic=traffic,
        pools=pools,
        routers=routers,
        idle_report_seconds=idle_report_seconds,
    )
    for registry in simulation.registries:
        registry.capacity.subscribe(lambda: None)  # as admission does: reports are counted at once
    with _bound(_NO_BOUND if full_scan else pool.MAX_CANDIDATES):
        for number, traced in enumerate(trace):
            simulation.after(traced.time, partial(_ask, simulation, number, traced))
        simulated = simulation.finish() if trace else simulation.run()
    return PlacementFigures(simulated=simulated, milliseconds=milliseconds)


@contextmanager
def _bound(num_candidates: int) -> Iterator[None]:
    before = pool.MAX_CANDIDATES
    pool.MAX_CANDIDATES = num_candidates  # type: ignore[misc]
    try:
        yield
    finally:
        pool.MAX_CANDIDATES = before  # type: ignore[misc]


def _ask(simulation: Simulation, number: int, traced: TracedRequest) -> None:
    seed = (0,) if traced.block_hashes else (number,)
    prompt = tuple(prompt_ids(traced, _VOCAB_SIZE, seed))
    simulation.ask(prompt, (0,) * traced.output_length, lambda: None)
