"""Makes profiles of known costs, as if `tandem plan measure` had measured them."""

from tandem.cluster.planner.profile import (
    Profile,
    ProfiledBudgets,
    RouterProfile,
    TransferProfile,
    WorkerProfile,
)
from tandem.cluster.sim.cost import StepCosts, StepSample, StepWork
from tandem.proto.costs import TableCost

PROFILED = StepCosts(
    fixed=0.010,
    each_sequence=3e-4,
    each_context_token=2e-7,
    each_prompt_token=4e-4,
    each_prompt_context=1e-8,
)
"""The costs that are fitted to the grid of every profile."""

_GRID = [
    StepWork(sequences=batch, context_tokens=batch * context)
    for batch in (1, 16, 64)
    for context in (32, 4096)
] + [
    StepWork(sequences=1) + StepWork.of_prompt(start, tokens)
    for tokens in (16, 128)
    for start in (0, 4096)
]


def make_profile(*workers: int, model: str = "smollm2-135m-instruct") -> Profile:
    """Returns a profile of CPUs for some numbers of workers, which all have the same costs."""
    grid = tuple(StepSample(work, PROFILED.seconds(work)).as_row() for work in _GRID)
    return Profile(
        model=model,
        dtype="bfloat16",
        quantization=None,
        kv_cache_dtype="auto",
        device="cpu",
        device_name="a processor",
        cores=2,
        tp=1,
        commit="abcdef0",
        date="2026-11-27T00:00:00+00:00",
        token_bytes=23_040,
        tables=(TableCost(16, 23_040),),
        workers=tuple(
            WorkerProfile(
                workers=number,
                threads=1,
                num_blocks=2048,
                block_size=16,
                context_tokens=8192,
                overlap=False,
                budgets=ProfiledBudgets(
                    chunk_tokens=128,
                    mixed_chunk_tokens=40,
                    mixed_step_factor=2.0,
                    max_sequences=64,
                ),
                grid=grid,
            )
            for number in workers
        ),
        router=RouterProfile(seconds_per_request=1e-3, seconds_per_token=5e-5),
        transfer=TransferProfile(seconds=0.005, bytes_per_second=1e9, transport="shared"),
    )
