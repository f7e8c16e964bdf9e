"""Builds the application for whoever starts Ray Serve by a configuration of its own, as KubeRay does:

    import_path: tandem.cluster.serve_app:build
    args: the keys of a configuration file

Where `tandem serve` makes what the processes of a service share and hands it on, here nothing may be made: Serve builds
anew whenever the arguments change, also while replicas of the last build run, and on any node. So the identity comes
from a file, and what depends on nodes from the configuration alone: at this time not all of them have joined.
"""

from collections.abc import Mapping
from typing import Any

from ray import serve

from ..proto.errors import InvalidArgument
from .app import build_app
from .config import NodeOffer, TandemConfig, load_config
from .redeploy import first_continuity
from .store.checked import checked_folder


def build(args: Mapping[str, Any]) -> serve.Application:
    """Returns the application that `args` configure. Raises InvalidArgument, NotFound or CheckpointError; Serve shows
    their text as the status of the application.

    How many replicas there are may also be said by `num_replicas` of the deployments Router, PrefillPool and DecodePool
    in Serve's configuration: that starts and stops replicas, where other arguments replace all of them."""
    config = load_config(None, args)
    if config.identity_file is None:
        raise InvalidArgument("missing; make one with `tandem key identity`", "identity_file")
    folder = str(checked_folder(config.model, {role: pool.tp for role, pool in config.pools.items()}))
    return build_app(config, folder, _nodes(config), config.router.replicas or 1, first_continuity(config, folder))


def _nodes(config: TandemConfig) -> list[NodeOffer]:
    """Returns the nodes of a cluster that has one for each replica."""
    return [
        NodeOffer(resources=section.resources, labels=section.labels)
        for section, replicas in (
            (config.router, config.router.replicas or 1),
            (config.prefill, config.prefill.replicas),
            (config.decode, config.decode.replicas),
        )
        for _ in range(replicas)
    ]
