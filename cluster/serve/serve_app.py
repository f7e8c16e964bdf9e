"""Builds the Ray Serve application: the deployments `Router`, `PrefillPool` and `DecodePool`.

`build` is for launchers that start Serve from a configuration file of Serve, such as KubeRay:

    import_path: tandem.cluster.serve.serve_app:build
    args: the keys of a configuration file

`tandem serve` generates the secrets that the processes of a service share. `build` must not: Serve
calls it again on any node whenever the arguments change, also while replicas of the last build run.
So it reads the identity from a file, and derives thread counts from the configuration alone, since
not all nodes have joined yet.
"""

import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, cast

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from ...proto.errors import InvalidArgument
from ...proto.identity import PeerIdentity
from ..config import (
    STOP_MARGIN_SECONDS,
    PoolConfig,
    PoolRole,
    RouterConfig,
    TandemConfig,
    load_config,
)
from ..local.environment import ROUTER_ENVIRONMENT, compute_environment
from ..nodes import NodeOffer, ranks_per_node
from ..scaling.config import ScalingConfig
from ..scaling.policy import DECODE_POOL, PREFILL_POOL, ROUTER, keep
from ..scaling.roles import REPORTS_PER_WINDOW
from ..store.checked import checked_folder, with_draft_folder
from .app import Router, WorkerPool
from .members import Continuity
from .redeploy import first_continuity
from .telemetry.otlp import check_otlp

_LEAST_CPUS: Final = 0.001  # Ray accepts no empty bundle
_POOLS: Final[dict[PoolRole, str]] = {"prefill": PREFILL_POOL, "decode": DECODE_POOL}


def build(args: Mapping[str, Any]) -> serve.Application:
    """Returns the application that `args` configure.

    `num_replicas` of the deployments Router, PrefillPool and DecodePool in Serve's configuration
    overrides the number of replicas. A change of it starts or stops replicas; a change of `args`
    replaces all of them. The application's `autoscaling_policy`, which Serve's configuration must
    name, sizes pools with `autoscaling`; then Ray ignores `num_replicas`, and `args` must have the
    numbers of the other deployments. Raises InvalidArgument, NotFound or CheckpointError; Serve
    shows their text as the application's status.
    """
    config = load_config(None, args)
    _check_numbers_are_given(config)
    check_otlp(config.tracing.endpoint)
    if config.identity_file is None:
        raise InvalidArgument("missing; make one with `tandem key identity`", "identity_file")
    config = with_draft_folder(config)
    folder = str(checked_folder(config))
    return build_app(
        config,
        folder,
        _nodes(config),
        config.router.replicas or 1,
        first_continuity(config, folder),
    )


def _check_numbers_are_given(config: TandemConfig) -> None:
    """Raises InvalidArgument if a deployment beside an autoscaled pool has no `replicas`.

    Ray ignores `num_replicas` then, so the default number could stop replicas that run.
    """
    if _reports_to(config) is None:
        return
    is_given = {"router": config.router.replicas is not None} | {
        role: pool.autoscaling is not None or "replicas" in pool.model_fields_set
        for role, pool in config.pools.items()
    }
    for section, given in is_given.items():
        if not given:
            raise InvalidArgument(
                "missing; with autoscaling of a pool Ray ignores num_replicas of all deployments",
                f"{section}.replicas",
            )


def _nodes(config: TandemConfig) -> list[NodeOffer]:
    """Returns the nodes of a cluster with one node for each replica."""
    return [
        NodeOffer(resources=section.resources, labels=section.labels)
        for section, replicas in (
            (config.router, config.router.replicas or 1),
            (config.prefill, config.prefill.max_replicas),
            (config.decode, config.decode.max_replicas),
        )
        for _ in range(replicas)
    ]


def build_app(
    config: TandemConfig,
    folder: str,
    nodes: Sequence[NodeOffer],
    num_routers: int,
    continuity: Continuity,
    inherited: Mapping[str, str] = MappingProxyType({}),
) -> serve.Application:
    """Returns the application that serves the model in `folder`, a path that every node must have.

    `nodes`: the nodes of the cluster. Workers without a configured thread count share the cores of
    their nodes. `inherited`: the environment that all processes of this Ray have.
    """
    pools = [
        _bind_pool(role, config, folder, nodes, continuity.identity, inherited)
        for role, pool in config.pools.items()
        if pool.max_replicas
    ]
    environment = dict(ROUTER_ENVIRONMENT.items() - inherited.items())
    options = _options(config, config.router, environment)
    options |= _number_options(num_routers, num_routers, _reports_to(config))
    if config.router.replicas is None and num_routers > 1:
        options["max_replicas_per_node"] = 1
    router: Any = serve.deployment(Router, name=ROUTER, **options)
    return cast(serve.Application, router.bind(config, folder, num_routers, continuity, *pools))


def count_routers(config: TandemConfig, nodes: Sequence[NodeOffer]) -> int:
    """Returns the configured number of routers, or one for each node that fits a router."""
    return config.router.replicas or max(1, sum(node.takes(config.router) for node in nodes))


def _bind_pool(
    role: PoolRole,
    config: TandemConfig,
    folder: str,
    nodes: Sequence[NodeOffer],
    identity: PeerIdentity,
    inherited: Mapping[str, str],
) -> serve.Application:
    pool = config.pools[role]
    environment = dict(compute_environment(pool).items() - inherited.items())
    options = _options(config, pool, environment)
    options |= _number_options(
        pool.replicas, pool.max_replicas, pool.autoscaling or _reports_to(config)
    )
    gpus = {"GPU": pool.num_gpus} if config.device == "cuda" else {}
    if gpus:
        options["ray_actor_options"]["num_gpus"] = pool.num_gpus
    if pool.tp > 1:
        bundle = {"CPU": max(pool.num_cpus, _LEAST_CPUS), **pool.resources, **gpus}
        options["placement_group_bundles"] = [bundle] * pool.tp
        options["placement_group_strategy"] = pool.placement
        # The labels select the nodes of the group instead of the actor's node.
        if labels := options["ray_actor_options"].pop("label_selector", None):
            options["placement_group_bundle_label_selector"] = [labels] * pool.tp
    deployment: Any = serve.deployment(WorkerPool, name=_POOLS[role], **options)
    return cast(
        serve.Application,
        deployment.bind(
            config, folder, role, ranks_per_node(config, pool, nodes), identity, environment
        ),
    )


def _reports_to(config: TandemConfig) -> ScalingConfig | None:
    """Returns the ScalingConfig for deployments that are not autoscaled; None if no pool is.

    They report their load to the application's policy.
    """
    found = [pool.autoscaling for pool in config.pools.values() if pool.autoscaling is not None]
    return min(found, key=lambda each: each.window_seconds, default=None)


def _number_options(fewest: int, most: int, scaling: ScalingConfig | None) -> dict[str, Any]:
    """Returns the options that set the number of replicas.

    With `scaling`, the replicas report to the application's policy, which applies its own delays.
    """
    if scaling is None:
        return {"num_replicas": fewest}
    with warnings.catch_warnings():
        # Ray warns that metrics_interval_s is not the default, but has no other way to set it.
        warnings.simplefilter("ignore")
        config = AutoscalingConfig(
            min_replicas=fewest,
            max_replicas=most,
            upscale_delay_s=0,
            downscale_delay_s=0,
            look_back_period_s=scaling.window_seconds,
            metrics_interval_s=scaling.window_seconds / REPORTS_PER_WINDOW,
            policy=AutoscalingPolicy.model_validate(
                {
                    "policy_function": f"{keep.__module__}:{keep.__name__}",
                    "policy_kwargs": scaling.model_dump(),
                }
            ),
        )
    return {"autoscaling_config": config}


def _options(
    config: TandemConfig, section: RouterConfig | PoolConfig, environment: dict[str, str]
) -> dict[str, Any]:
    actor: dict[str, Any] = {"num_cpus": section.num_cpus, "resources": section.resources}
    if environment:
        actor["runtime_env"] = {"env_vars": environment}
    if section.labels:
        actor["label_selector"] = section.labels
    return {
        "ray_actor_options": actor,
        "max_ongoing_requests": 1000,
        "max_constructor_retry_count": 3,
        "health_check_period_s": 2,
        "health_check_timeout_s": 10,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": config.grace_seconds + STOP_MARGIN_SECONDS,
    }
