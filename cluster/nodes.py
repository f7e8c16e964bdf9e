"""Describes what the nodes of a cluster have to offer, and how the ranks of a service spread over them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .config import PoolConfig, RouterConfig, TandemConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOffer:
    """Describes what a node of the cluster has to offer."""

    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    def takes(self, section: RouterConfig | PoolConfig) -> bool:
        """Returns whether replicas of this section may run here."""
        has_resources = all(self.resources.get(name, 0) >= amount for name, amount in section.resources.items())
        return has_resources and section.labels.items() <= self.labels.items()


def ranks_per_node(config: TandemConfig, pool: PoolConfig, nodes: Sequence[NodeOffer]) -> int:
    """Returns how many ranks of both pools may share a node that runs ranks of `pool`: the share of its cores that one
    rank may take is one in so many.

    Workers are expected to spread evenly over the nodes that their pool may have, the ranks of one worker to stay
    together unless its placement spreads them."""
    num_ranks = [0] * len(nodes)
    for each in (config.prefill, config.decode):
        together = 1 if "SPREAD" in each.placement else each.tp
        if eligible := [index for index, node in enumerate(nodes) if node.takes(each)]:
            for index in eligible:
                num_ranks[index] += -(-each.num_ranks // together // len(eligible)) * together
    return max((num_ranks[index] for index, node in enumerate(nodes) if node.takes(pool)), default=1)
