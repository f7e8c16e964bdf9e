"""Defines the autoscaling policy of the application: sizes the pools by their reported load.

Serve's policies count requests that pass through Serve, and none do here. This policy belongs to
the whole application because routers report the demand on the prefill pool. Serve calls it in its
controller several times a second. An exception would stop all of the controller's work, so missing
reports change nothing.
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
from .sizing import bounded, decode_workers, prefill_workers, sequences_within, settle

ROUTER: Final = "Router"
PREFILL_POOL: Final = "PrefillPool"
DECODE_POOL: Final = "DecodePool"
"""The names of the deployments."""

_NEEDS: Final = "needs"
_LEAST_SECONDS: Final = 1e-3


class Sample(Protocol):
    """A value that a replica has reported, in Serve's form."""

    timestamp: float
    value: float


Reports = Mapping[str, Mapping[Any, Sequence[Sample]]]
"""By metric and replica, the values of the last window, the oldest first."""


class PoolContext(Protocol):
    """The parts of Serve's AutoscalingContext, which describes a deployment, that are used here."""

    deployment_name: str
    target_num_replicas: int
    current_time: float | None
    policy_state: dict[str, Any]
    config: Any  # Serve's AutoscalingConfig

    @property
    def raw_metrics(self) -> Reports | None: ...


def keep(context: PoolContext) -> tuple[int, dict[str, Any]]:
    """Leaves the number of a deployment's replicas unchanged.

    As the deployment's policy, it carries the pool's ScalingConfig to the application's policy.
    """
    return context.target_num_replicas, {}


class ScalingPolicy:
    """Sizes the pools within the bounds of their deployments. Serve keeps its state.

    The bounds of a pool with a fixed size are equal.
    """

    def __call__(
        self, contexts: Mapping[Any, PoolContext]
    ) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
        """Returns each pool's number of workers and the state to keep, by key of `contexts`."""
        reports = {
            context.deployment_name: context.raw_metrics or {} for context in contexts.values()
        }
        pools = {
            key: each
            for key, each in contexts.items()
            if each.deployment_name in (PREFILL_POOL, DECODE_POOL)
        }
        decisions = {key: _decide(context, reports) for key, context in pools.items()}
        numbers = {key: number for key, (number, _) in decisions.items()}
        states = {key: state for key, (_, state) in decisions.items()}
        return numbers, states


def _decide(context: PoolContext, reports: Mapping[str, Reports]) -> tuple[int, dict[str, Any]]:
    current = context.target_num_replicas
    state = context.policy_state
    now = context.current_time
    try:
        config = ScalingConfig.model_validate(context.config.policy.policy_kwargs)
    except ValidationError:  # Serve's configuration has replaced the autoscaling_config
        return current, state
    workers = _workers(context.deployment_name, config, reports)
    if workers is None or now is None:
        return current, state
    needed = bounded(workers, current, context.config.min_replicas, context.config.max_replicas)
    number, needs = settle(now, needed, state.get(_NEEDS, ()), current, config)
    return number, {_NEEDS: needs}


def _workers(pool: str, config: ScalingConfig, reports: Mapping[str, Reports]) -> float | None:
    """Returns the number of workers that a pool needs, or None if too few values were reported.

    Without prefill workers, decode workers compute the prompts as well.
    """
    routers = reports.get(ROUTER, {})
    workers = 0.0
    if pool == DECODE_POOL:
        found = _for_sequences(routers, reports[DECODE_POOL], config)
        if found is None or PREFILL_POOL in reports:
            return found
        workers = found
    prompts = _for_prompts(routers, config)
    return None if prompts is None else workers + prompts


def _for_prompts(routers: Reports, config: ScalingConfig) -> float | None:
    """Returns the number of workers for the prompts of all routers.

    Returns None until a router has reported twice, and while prompts wait but none was sent: then
    the speed of a worker is unknown.
    """
    tokens = [each for each in _series(routers, PREFILL_TOKENS) if len(each) > 1]
    seconds = sum(_growth(each) for each in _series(routers, PREFILL_SECONDS))
    waiting = _last(routers, WAITING_PREFILL_TOKENS)
    if not tokens or (waiting > 0 and seconds <= 0):
        return None
    return prefill_workers(
        config,
        arriving=sum(
            _growth(each) / max(each[-1].timestamp - each[0].timestamp, _LEAST_SECONDS)
            for each in tokens
        ),
        waiting=waiting,
        worker_rate=sum(map(_growth, tokens)) / seconds if seconds > 0 else 0.0,
    )


def _for_sequences(routers: Reports, workers: Reports, config: ScalingConfig) -> float | None:
    """Returns the number of workers for the sequences of all routers; None without reports."""
    num_workers = len([each for each in _series(workers, MAX_SEQUENCES) if each])
    if not num_workers:
        return None
    most = max(round(_last(workers, MAX_SEQUENCES) / num_workers), 1)
    return decode_workers(
        config,
        sequences=_last(workers, SEQUENCES) + _last(routers, WAITING_SEQUENCES),
        kv_tokens=_last(workers, KV_TOKENS) + _last(routers, WAITING_KV_TOKENS),
        worker_sequences=sequences_within(config.tpot_seconds, most, list(_steps(workers))),
        worker_kv_tokens=_last(workers, MAX_KV_TOKENS) / num_workers,
    )


def _series(reports: Reports, figure: str) -> Iterable[Sequence[Sample]]:
    return reports.get(figure, {}).values()


def _growth(series: Sequence[Sample]) -> float:
    return series[-1].value - series[0].value if series else 0.0


def _last(reports: Reports, figure: str) -> float:
    """Returns the sum of the last values of all replicas."""
    return sum(each[-1].value for each in _series(reports, figure) if each)


def _steps(workers: Reports) -> Iterable[tuple[float, float]]:
    """Yields the numbers of sequences in the window, each with the seconds of a step then."""
    for replica, numbers in workers.get(SEQUENCES, {}).items():
        seconds = {
            each.timestamp: each.value for each in workers.get(STEP_SECONDS, {}).get(replica, ())
        }
        for each in numbers:
            if each.value >= 1 and seconds.get(each.timestamp, 0.0) > 0:
                yield each.value, seconds[each.timestamp]
