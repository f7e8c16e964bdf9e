"""Describes simulated services, their costs and their requests, for tests."""

import random
from collections.abc import Sequence
from typing import Any

from tandem.cluster.sim.cost import ServiceCosts, StepCosts
from tandem.cluster.sim.service import SimulatedPool, SimulatedService
from tandem.cluster.traces.read import TracedRequest
from tandem.workers.engine.config import Budgets

STEP = StepCosts(
    fixed=0.02,
    each_sequence=0.001,
    each_context_token=1e-6,
    each_prompt_token=2e-4,
    each_prompt_context=1e-8,
)
COSTS = ServiceCosts(
    prefill=STEP, decode=STEP, transfer_seconds=0.004, transfer_bytes_per_second=1e9
)
TOKEN_BYTES = 32_768


def pool(workers: int = 1, num_blocks: int = 2048, **fields: Any) -> SimulatedPool:
    budgets = Budgets(**fields.pop("budgets", {}))
    return SimulatedPool(workers=workers, num_blocks=num_blocks, budgets=budgets, **fields)


def service(prefill: int = 1, decode: int = 1, **fields: Any) -> SimulatedService:
    return SimulatedService(
        prefill=pool(prefill) if prefill else None,
        decode=pool(decode),
        **({"token_bytes": TOKEN_BYTES, "context_tokens": 8192} | fields),
    )


def traced(
    time: float, input_length: int, output_length: int, hashes: Sequence[int] = ()
) -> TracedRequest:
    return TracedRequest(
        time=time,
        input_length=input_length,
        output_length=output_length,
        block_hashes=tuple(hashes),
        block_tokens=64,
    )


def traffic(
    rate: float,
    seconds: float,
    *,
    inputs: tuple[int, int] = (100, 900),
    outputs: tuple[int, int] = (20, 120),
    start: float = 0.0,
    seed: int = 0,
) -> list[TracedRequest]:
    """Requests that arrive at random."""
    chance = random.Random(seed)
    found = []
    at = start
    while (at := at + chance.expovariate(rate)) < start + seconds:
        found.append(traced(at, chance.randint(*inputs), chance.randint(*outputs)))
    return found
