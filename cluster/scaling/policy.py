"""Defines the autoscaling policy of the application: sizes the pools by their reported load.

Serve's policies count requests that pass through Serve, and none do here. This policy belongs to
the whole application because routers report the demand on the prefill pool. Serve calls it in its
controller several times a second. An exception would stop all of the controller's work, so missing
reports change nothing.

A pool counts replicas, whatever their roles. Needs are counted by role and do not depend on the
split, so the sum of both pools is right while workers have the other pool's role (`roles`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from pydantic import ValidationError

from .config import ScalingConfig
from .needs import Reports, Sample, prompt_need, sequence_need
from .sizing import bounded, settle

ROUTER: Final = "Router"
PREFILL_POOL: Final = "PrefillPool"
DECODE_POOL: Final = "DecodePool"
"""The names of the deployments."""

_NEEDS: Final = "needs"


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
        has_prefill = any(
            each.deployment_name == PREFILL_POOL and each.target_num_replicas
            for each in pools.values()
        )
        decisions = {
            key: _decide(context, reports, has_prefill=has_prefill)
            for key, context in pools.items()
        }
        numbers = {key: number for key, (number, _) in decisions.items()}
        states = {key: state for key, (_, state) in decisions.items()}
        return numbers, states


def _decide(
    context: PoolContext, reports: Mapping[str, Reports], *, has_prefill: bool
) -> tuple[int, dict[str, Any]]:
    current = context.target_num_replicas
    state = context.policy_state
    now = context.current_time
    try:
        config = ScalingConfig.model_validate(context.config.policy.policy_kwargs)
    except ValidationError:  # Serve's configuration has replaced the autoscaling_config
        return current, state
    if now is None:
        return current, state
    fewest, most = config.bounds_at(now, context.config.min_replicas, context.config.max_replicas)
    workers = _workers(context.deployment_name, config, reports, has_prefill=has_prefill)
    if workers is None:
        if fewest <= current <= most:
            return current, state
        workers = current
    needed = bounded(workers, current, fewest, most)
    number, needs = settle(
        now,
        needed,
        state.get(_NEEDS, ()),
        current,
        up_delay=config.up_delay_seconds,
        down_delay=config.down_delay_seconds,
    )
    return number, {_NEEDS: needs}


def _workers(
    pool: str, config: ScalingConfig, reports: Mapping[str, Reports], *, has_prefill: bool
) -> float | None:
    """Returns the number of workers that a pool needs, or None if too few values were reported.

    Without prefill workers, decode workers compute the prompts as well.
    """
    routers = reports.get(ROUTER, {})
    workers = 0.0
    if pool == DECODE_POOL:
        found = sequence_need(routers, _of_pools(reports), config)
        if found is None or has_prefill:
            return found
        workers = found
    prompts = prompt_need(routers, config)
    return None if prompts is None else workers + prompts


def _of_pools(reports: Mapping[str, Reports]) -> Reports:
    """Returns the reports of the replicas of both pools."""
    merged: dict[str, dict[Any, Sequence[Sample]]] = {}
    for pool in (PREFILL_POOL, DECODE_POOL):
        for figure, found in reports.get(pool, {}).items():
            named = {(pool, replica): series for replica, series in found.items()}
            merged.setdefault(figure, {}).update(named)
    return merged
