"""Replays public traces in simulated time through pools that the autoscaling policy sizes, and
through fixed ones.

    python -m tandem.tests.soak.autoscale ../shared/traces/azure_2023_conversation.csv.gz ...
    python -m tandem.tests.soak.autoscale --roles ../shared/traces/azure_2023_code.csv.gz

Workers are made as fast as it takes for the mean load of a trace to need `--mean` of them in each
pool, which is also how many there are at first. In time is a request that waits for at most so
long, and whose tokens come as fast as the target asks. What is late although all workers that there
may be are asked for at the beginning, no policy serves in time. Passes if of the rest all but a
small part is in time, with fewer worker seconds. Traces: AzureLLMInferenceTrace 2023
(Azure/AzurePublicDataset) and Mooncake (kvcache-ai/Mooncake).

With `--roles` the number of workers is fixed: four times `--mean`, twice what the mean load needs.
Compares all fixed splits with one that the choice of roles changes. It passes if it serves as many
requests in time as the even split, with which it begins.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any, Final

from tandem.cluster.scaling.config import RoleScalingConfig, ScalingConfig
from tandem.cluster.scaling.policy import DECODE_POOL, PREFILL_POOL
from tandem.cluster.traces.read import read_trace
from tandem.tests.cluster.scaling.simulation import Arrival, Hardware, Outcome, Simulation

TPOT_SECONDS: Final = 0.05
LATE_TPOT_SECONDS: Final = 0.06  # of a request, which is a mean over steps
WAIT_SECONDS: Final = 5.0
LEAST_SEQUENCES: Final = 16  # that a worker decodes at a time
LOST_SHARE: Final = 0.05
MOST: Final = 12


def read_arrivals(path: Path) -> list[Arrival]:
    """Returns the requests of a trace, the earliest first. Earlier blocks count as cached."""
    known: set[int] = set()
    found: list[Arrival] = []
    for request in read_trace(path):
        num_cached = sum(each in known for each in request.block_hashes)
        known.update(request.block_hashes)
        found.append(
            Arrival(
                time=request.time,
                prompt=request.input_length,
                output=request.output_length,
                cached=min(num_cached * request.block_tokens, request.input_length - 1),
            )
        )
    return found


def hardware_for(arrivals: list[Arrival], mean: float, start_seconds: float) -> Hardware:
    """Returns workers of which the mean load needs so many in each pool."""
    seconds = arrivals[-1].time - arrivals[0].time
    uncached = sum(each.prompt - each.cached for each in arrivals) / seconds
    decoding = sum(each.output for each in arrivals) / seconds * TPOT_SECONDS  # sequences at a time
    length = sum((each.prompt + each.output / 2) * each.output for each in arrivals) / sum(
        e.output for e in arrivals
    )
    sequences = max(decoding / mean, LEAST_SEQUENCES)  # of one worker, with steps of TPOT_SECONDS
    return Hardware(
        prefill_rate=uncached / mean,
        step_fixed=TPOT_SECONDS / 2,
        step_each=TPOT_SECONDS / 2 / sequences,
        kv_tokens=max(
            int(2 * sequences * length), *(2 * (each.prompt + each.output) for each in arrivals)
        ),
        max_sequences=max(int(4 * sequences), 1),
        start_seconds=start_seconds,
    )


def compare(
    arrivals: list[Arrival], hardware: Hardware, first: int, scaling: dict[str, Any]
) -> bool:
    """Prints how all pools did, from `first` workers on; returns whether those of the policy
    passed.
    """
    prefill = ScalingConfig(max_replicas=MOST, **scaling)
    decode = ScalingConfig(max_replicas=MOST, tpot_seconds=TPOT_SECONDS, **scaling)
    scaled = Simulation(hardware, prefill, decode, first=first).run(arrivals)
    best = Simulation(hardware, MOST, MOST, first=first).run(
        arrivals
    )  # no policy ever has more workers
    small = Simulation(
        hardware, *(round(_mean(scaled, pool)) for pool in (PREFILL_POOL, DECODE_POOL))
    ).run(arrivals)
    for name, outcome in (
        ("by the policy", scaled),
        (f"{MOST}, from the beginning", best),
        ("the mean of the policy", small),
    ):
        print(_line(name, outcome))
    turns = {pool: scaled.reversals(pool, prefill.down_delay_seconds) for pool in scaled.targets}
    possible, found = (each.in_time(WAIT_SECONDS, LATE_TPOT_SECONDS) for each in (best, scaled))
    lost = len(possible - found) / len(possible)
    saves = all(scaled.worker_seconds[pool] < best.worker_seconds[pool] for pool in scaled.targets)
    print(
        f"  late whatever the policy: {1 - len(possible) / len(arrivals):.1%}; of the rest, by "
        f"this one: {lost:.1%}"
    )
    print(f"  turns within the down delay: {turns}")
    return lost <= LOST_SHARE and saves


def compare_splits(arrivals: list[Arrival], hardware: Hardware, half: int) -> bool:
    """Prints how each fixed split did, and one that follows the load; returns whether it passed."""
    roles = RoleScalingConfig(tpot_seconds=TPOT_SECONDS)
    switching = Simulation(hardware, half, half, roles=roles).run(arrivals)
    shares = []
    for number in range(1, 2 * half):
        fixed = Simulation(hardware, number, 2 * half - number).run(arrivals)
        print(_line(f"{number} + {2 * half - number}, fixed", fixed))
        shares.append(len(fixed.in_time(WAIT_SECONDS, LATE_TPOT_SECONDS)))
    print(_line("switching", switching))
    return len(switching.in_time(WAIT_SECONDS, LATE_TPOT_SECONDS)) >= shares[half - 1]


def _mean(outcome: Outcome, pool: str) -> float:
    return outcome.worker_seconds[pool] / outcome.seconds


def _line(name: str, outcome: Outcome) -> str:
    waits, tpots = sorted(outcome.waits), sorted(outcome.tpots)
    place = int(0.99 * (len(waits) - 1))
    pools = ", ".join(
        f"{pool} {_mean(outcome, pool):.1f} (of {min(numbers)} to {max(numbers)}, "
        f"{len(numbers) - 1} changes)"
        for pool, numbers in (
            (pool, [number for _, number in each]) for pool, each in outcome.targets.items()
        )
    )
    in_time, late_wait, late_tpot = (
        len(each) / len(waits)
        for each in (
            outcome.in_time(WAIT_SECONDS, LATE_TPOT_SECONDS),
            set(outcome.numbers) - outcome.in_time(WAIT_SECONDS, math.inf),
            set(outcome.numbers) - outcome.in_time(math.inf, LATE_TPOT_SECONDS),
        )
    )
    return (
        f"  {name:26} in time {in_time:6.1%} (late: wait {late_wait:.1%}, TPOT {late_tpot:.1%}),"
        f" p99 wait {waits[place]:6.2f} s, p99 TPOT {1e3 * tpots[place]:5.1f} ms; {pools}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument(
        "--mean", type=float, default=3.0, help="workers of each pool that the mean load needs"
    )
    parser.add_argument(
        "--start-seconds", type=float, default=30.0, help="that a worker takes to start"
    )
    parser.add_argument(
        "--up-delay-seconds", type=float, help="of the configuration; so are the following"
    )
    parser.add_argument("--down-delay-seconds", type=float)
    parser.add_argument(
        "--roles", action="store_true", help="change the workers' roles instead of their number"
    )
    parser.add_argument("--window-seconds", type=float)
    args = parser.parse_args()
    names = ("up_delay_seconds", "down_delay_seconds", "window_seconds")
    scaling = {name: value for name in names if (value := getattr(args, name)) is not None}
    passed = True
    for path in args.traces:
        arrivals = read_arrivals(path)
        print(f"{path.name}: {len(arrivals)} requests in {arrivals[-1].time / 60:.0f} minutes")
        hardware = hardware_for(arrivals, args.mean, args.start_seconds)
        first = math.ceil(args.mean)
        passed &= (
            compare_splits(arrivals, hardware, round(2 * args.mean))
            if args.roles
            else compare(arrivals, hardware, first, scaling)
        )
    print("passed" if passed else "NOT PASSED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
