"""Is the autoscaling policy of the application: sizes the pools by what routers and workers report.

Serve's own policies see requests that pass through Serve, of which there are none here. This one is
of the whole application because routers know what is asked of the prefill pool. Serve calls it in
its controller, some times a second; an exception would stop all of the controller's work, so what
is missing changes nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from pydantic import ValidationError

from .config import ScalingConfig
from .reports import (
    KV_TOKENS,
    MAX_KV_TOKENS,
    MAX_SEQUENCES,
    PREFILL_SECONDS,
    PREFILL_TOKENS,
    SEQUENCES,
    STEP_SECONDS,
    WAITING_KV_TOKENS,
    WAITING_PREFILL_TOKENS,
    WAITING_SEQUENCES,
)
from .sizing import DecodeDemand, PrefillDemand, bounded, sequences_within, settle

ROUTER: Final = "Router"
PREFILL_POOL: Final = "PrefillPool"
DECODE_POOL: Final = "DecodePool"
"""Names of the deployments."""

_NEEDS: Final = "needs"
_LEAST_SECONDS: Final = 1e-3


class Sample(Protocol):
    """A value that a replica has reported, as Serve hands it on."""

    timestamp: float
    value: float


Reports = Mapping[str, Mapping[Any, Sequence[Sample]]]
"""By figure and replica, the values of the last window, the oldest first."""


class PoolContext(Protocol):
    """What Serve tells of a deployment: the parts of its AutoscalingContext that are used here."""

    deployment_name: str
    target_num_replicas: int
    current_time: float | None
    policy_state: dict[str, Any]
    config: Any  # Serve's AutoscalingConfig

    @property
    def raw_metrics(self) -> Reports | None: ...


def keep(context: PoolContext) -> tuple[int, dict[str, Any]]:
    """Is the policy of a deployment alone: leaves the number of its replicas as it is. It carries
    the pool's ScalingConfig to the policy of the application.
    """
    return context.target_num_replicas, {}


class ScalingPolicy:
    """Sizes the pools, within the bounds of their deployments; a pool of a fixed size has two that
    are equal. Serve keeps the state.
    """

    def __call__(
        self, contexts: Mapping[Any, PoolContext]
    ) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
        """Returns how many workers each pool shall have, and what to remember, by the keys of
        `contexts`.
        """
        reports = {
            context.deployment_name: context.raw_metrics or {} for context in contexts.values()
        }
        pools = {
            key: each
            for key, each in contexts.items()
            if each.deployment_name in (PREFILL_POOL, DECODE_POOL)
        }
        decisions = {key: _decide(context, reports) for key, context in pools.items()}
        return {key: number for key, (number, _) in decisions.items()}, {
            key: state for key, (_, state) in decisions.items()
        }


def _decide(context: PoolContext, reports: Mapping[str, Reports]) -> tuple[int, dict[str, Any]]:
    current, state, now = context.target_num_replicas, context.policy_state, context.current_time
    try:
        config = ScalingConfig.model_validate(context.config.policy.policy_kwargs)
    except (
        ValidationError
    ):  # Serve's configuration has given the deployment another autoscaling_config
        return current, state
    workers = _workers(context.deployment_name, config, reports)
    if workers is None or now is None:
        return current, state
    needed = bounded(workers, current, context.config.min_replicas, context.config.max_replicas)
    number, needs = settle(now, needed, state.get(_NEEDS, ()), current, config)
    return number, {_NEEDS: needs}


def _workers(pool: str, config: ScalingConfig, reports: Mapping[str, Reports]) -> float | None:
    """Returns how many workers a pool needs; None if too little was reported. Without prefill
    workers those that decode compute the prompts, too.
    """
    routers = reports.get(ROUTER, {})
    sequences = (
        decode_demand(routers, reports[DECODE_POOL], config) if pool == DECODE_POOL else None
    )
    if pool == DECODE_POOL and (sequences is None or PREFILL_POOL in reports):
        return None if sequences is None else sequences.workers(config)
    prompts = prefill_demand(routers)
    if prompts is None:
        return None
    return prompts.workers(config) + (0.0 if sequences is None else sequences.workers(config))


def prefill_demand(routers: Reports) -> PrefillDemand | None:
    """Returns what all routers ask for. None before any has reported twice, and while prompts wait
    and none was sent: then nothing tells how fast a worker is.
    """
    tokens = [each for each in _series(routers, PREFILL_TOKENS) if len(each) > 1]
    seconds = sum(_growth(each) for each in _series(routers, PREFILL_SECONDS))
    waiting = _last(routers, WAITING_PREFILL_TOKENS)
    if not tokens or (waiting > 0 and seconds <= 0):
        return None
    return PrefillDemand(
        arriving=sum(
            _growth(each) / max(each[-1].timestamp - each[0].timestamp, _LEAST_SECONDS)
            for each in tokens
        ),
        waiting=waiting,
        worker_rate=sum(map(_growth, tokens)) / seconds if seconds > 0 else 0.0,
    )


def decode_demand(routers: Reports, workers: Reports, config: ScalingConfig) -> DecodeDemand | None:
    """Returns what all routers ask for and all workers have; None before any worker has reported."""
    number = len([each for each in _series(workers, MAX_SEQUENCES) if each])
    if not number:
        return None
    most = max(round(_last(workers, MAX_SEQUENCES) / number), 1)
    return DecodeDemand(
        sequences=_last(workers, SEQUENCES) + _last(routers, WAITING_SEQUENCES),
        kv_tokens=_last(workers, KV_TOKENS) + _last(routers, WAITING_KV_TOKENS),
        worker_sequences=sequences_within(config.tpot_seconds, most, list(_steps(workers))),
        worker_kv_tokens=_last(workers, MAX_KV_TOKENS) / number,
    )


def _series(reports: Reports, figure: str) -> Iterable[Sequence[Sample]]:
    return reports.get(figure, {}).values()


def _growth(series: Sequence[Sample]) -> float:
    return series[-1].value - series[0].value if series else 0.0


def _last(reports: Reports, figure: str) -> float:
    """Returns the sum of what each replica has reported last."""
    return sum(each[-1].value for each in _series(reports, figure) if each)


def _steps(workers: Reports) -> Iterable[tuple[float, float]]:
    """Yields the numbers of sequences of the window, with the seconds of a step at that time."""
    for replica, numbers in workers.get(SEQUENCES, {}).items():
        seconds = {
            each.timestamp: each.value for each in workers.get(STEP_SECONDS, {}).get(replica, ())
        }
        for each in numbers:
            if each.value >= 1 and seconds.get(each.timestamp, 0.0) > 0:
                yield each.value, seconds[each.timestamp]
