"""Describes the nodes of a cluster, and counts the ranks and GPUs that a service has there."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..proto.errors import Unavailable
from .config import PoolConfig, RouterConfig, TandemConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOffer:
    """Describes the resources and labels of a node of the cluster."""

    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    def takes(self, section: RouterConfig | PoolConfig) -> bool:
        """Returns True if replicas of this section may run here."""
        has_resources = all(
            self.resources.get(name, 0) >= amount for name, amount in section.resources.items()
        )
        return has_resources and section.labels.items() <= self.labels.items()


def ranks_per_node(config: TandemConfig, pool: PoolConfig, nodes: Sequence[NodeOffer]) -> int:
    """Returns the greatest number of ranks of both pools on a node that runs ranks of `pool`.

    A rank may use the node's cores divided by this number. Workers are expected to spread evenly
    over the nodes of their pool; the ranks of a worker stay together unless its placement spreads
    them.
    """
    num_ranks = [0] * len(nodes)
    for each in (config.prefill, config.decode):
        together = 1 if "SPREAD" in each.placement else each.tp
        if eligible := [index for index, node in enumerate(nodes) if node.takes(each)]:
            for index in eligible:
                num_ranks[index] += -(-each.num_ranks // together // len(eligible)) * together
    return max(
        (num_ranks[index] for index, node in enumerate(nodes) if node.takes(pool)), default=1
    )


def check_gpus(config: TandemConfig, nodes: Sequence[NodeOffer]) -> None:
    """Raises Unavailable if the nodes have fewer GPUs than the workers need; Ray would wait.

    Does not find every case: different fractions that add up may still not fit, such as 0.6, 0.6,
    0.6 and 0.1 of two GPUs.
    """
    if config.device != "cuda":
        return
    num_ranks = config.prefill.num_ranks + config.decode.num_ranks
    needed = sum(pool.num_ranks * pool.num_gpus for pool in config.pools.values())
    found = sum(node.resources.get("GPU", 0) for node in nodes)
    least = min(pool.num_gpus for pool in config.pools.values() if pool.num_ranks)
    if round(needed, 4) > found or num_ranks > int(found) * int(1 / least):
        share = ""
        if config.prefill.tp == config.decode.tp == 1 and 1 <= found < num_ranks:
            each = 100 // math.ceil(num_ranks / int(found)) / 100  # no rank spans two GPUs
            share = f", let ranks share GPUs (--num-gpus {each:g})"
        raise Unavailable(
            f"device: cuda needs {needed:g} GPUs for {num_ranks} ranks (num_gpus), and the nodes "
            f"offer {found:g} (CUDA_VISIBLE_DEVICES); start fewer workers (--prefill, --decode)"
            f"{share}, or use --device cpu"
        )
    for role, pool in config.pools.items():
        ranks = [
            int(node.resources.get("GPU", 0)) * int(1 / pool.num_gpus)
            for node in nodes
            if node.takes(pool)
        ]
        if pool.placement == "STRICT_PACK":
            num_workers = sum(count // pool.tp for count in ranks)
        else:
            num_workers = sum(ranks) // pool.tp
        if num_workers < pool.max_replicas:
            raise Unavailable(
                f"{role}.replicas: must be at most {num_workers}, got {pool.max_replicas}: no more "
                f"workers of {pool.tp} ranks with {pool.num_gpus:g} GPUs each fit the nodes of the "
                "pool (labels, resources, placement); lower tp or num_gpus, or add GPUs"
            )
