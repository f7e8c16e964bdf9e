"""Measures cases on a service that runs in processes of its own."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from tandem.cluster.bench.load import send_load
from tandem.cluster.bench.metrics import REFUSALS, summarize
from tandem.cluster.bench.options import LoadOptions, ServerAddress
from tandem.cluster.bench.target import StreamCompletion, open_target
from tandem.cluster.bench.workload import BenchPrompt
from tandem.cluster.planner.profile import Profile
from tandem.cluster.planner.site import Split
from tandem.cluster.traces.prompts import prompt_ids
from tandem.tests.bench.learn.local import checked, random_prompts
from tandem.tests.bench.learn.service import running_service
from tandem.tests.bench.prediction.cases import FIGURES, Case

_WARM_UP: Final = (200,) * 8  # output tokens of the first requests, which are not measured
_WARM_UP_TOKENS: Final = 64  # of their prompts
_VOCAB_SIZE: Final = 8_192  # as in `tandem bench`: every served vocabulary has these tokens
_START_SECONDS: Final = 120.0
_DRAIN_SECONDS: Final = 120.0  # at most, after the last arrival of a case

Report = Callable[[Case, Mapping[str, float]], None]
"""Receives a case and the figures of one round of it."""


def measure(
    profile: Profile,
    cases: Sequence[Case],
    rounds: int,
    limits: Mapping[str, float],
    report: Report,
    model: str = "",
) -> None:
    """Starts a service for the split of the cases, which is the same for all.

    `model`: as for `tandem serve`; by default the name in the profile. Reports the figures of each
    round of each case when it ends. Rounds differ in the tokens of their prompts alone. Raises
    RuntimeError if a request fails.
    """
    (split,) = {case.split for case in cases}
    seconds = rounds * sum(each.workload.requests[-1].time + _DRAIN_SECONDS for each in cases)
    with running_service(_config(profile, split, model), _START_SECONDS + seconds) as url:
        asyncio.run(_measure(url, cases, rounds, limits, report))


def _config(profile: Profile, split: Split, model: str) -> dict[str, object]:
    return {
        "model": model or profile.model,
        "device": profile.device,
        "dtype": profile.dtype,
        "quantization": profile.quantization,
        "kv_cache_dtype": profile.kv_cache_dtype,
        "prefill": {"replicas": split.prefill, "tp": split.tp},
        "decode": {"replicas": split.decode, "tp": split.tp},
    }


async def _measure(
    url: str, cases: Sequence[Case], rounds: int, limits: Mapping[str, float], report: Report
) -> None:
    async with open_target(ServerAddress(url=url), ignore_eos=True) as target:
        warm_up = random_prompts(_VOCAB_SIZE, _WARM_UP_TOKENS, _WARM_UP, seed="warm-up")
        checked(await send_load(target, warm_up, LoadOptions(concurrency=len(_WARM_UP))))
        for number in range(rounds):
            for index, case in enumerate(cases):
                seed = 1 + number * len(cases) + index
                report(case, await send_case(target, case, seed, limits))


async def send_case(
    target: StreamCompletion, case: Case, seed: int, limits: Mapping[str, float]
) -> Mapping[str, float]:
    """Returns the figures of one round. Raises RuntimeError if a request fails.

    A request that the service refuses counts as one that missed the objective, as in the simulator.
    """
    requests = case.workload.requests
    load = LoadOptions(num_prompts=len(requests), timeout=_DRAIN_SECONDS)
    arrivals = (each.time for each in requests)
    records = await send_load(target, _prompts(case, seed), load, arrivals)
    checked([each for each in records if not each.failure or each.failure.kind not in REFUSALS])
    figures = summarize(records, limits).figures
    return {name: figures[name] for name in (*FIGURES, "late_ms")}


def _prompts(case: Case, seed: int) -> Iterator[BenchPrompt]:
    """Yields the prompts of a case. Each one is made before its time, and only then."""
    for number, request in enumerate(case.workload.requests):
        own = () if request.block_hashes else (number,)
        ids = prompt_ids(request, _VOCAB_SIZE, (seed, *own))
        yield BenchPrompt(prompt=ids, max_tokens=request.output_length)
