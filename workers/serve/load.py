"""Reads the load of a worker's engine for routers."""

from collections.abc import Mapping

from ...proto import worker_pb2
from ..engine.block_pool import BlockState
from ..engine.engine import Engine


class LoadReader:
    """Takes snapshots of an engine's load, with growing versions; lives in the event loop."""

    def __init__(self, engine: Engine, num_blocks: int, num_states: int = 0) -> None:
        self._engine = engine
        self._num_blocks = num_blocks
        self._num_states = num_states
        self._last = worker_pb2.WorkerLoad()

    def read(self, *, draining: bool) -> worker_pb2.WorkerLoad:
        """Returns a snapshot.

        Reads the counters of the engine's thread while it runs. It may be moving a block, so the
        number of free blocks is computed from the other counts.
        """
        requests = self._engine.requests
        blocks = _counts(self._engine.blocks(), self._num_blocks)
        states = self.states()
        load = worker_pb2.WorkerLoad(
            version=self._last.version,
            num_waiting=len(requests.waiting),
            num_running=requests.num_holding,
            waiting_tokens=requests.waiting_tokens,
            total_blocks=self._num_blocks,
            step_seconds=self._engine.step_seconds,
            prompt_token_seconds=self._engine.prompt_token_seconds,
            draining=draining,
            held_states=sum(states[status] for status in ("owned", "leased", "reserved")),
            **{f"{state}_blocks": count for state, count in blocks.items()},
        )
        if load != self._last:
            load.version += 1
            self._last = load
        return load

    def states(self) -> dict[str, int]:
        """Returns the number of states by their status."""
        return _counts(self._engine.states(), self._num_states)


def _counts(found: Mapping[BlockState, int], total: int) -> dict[str, int]:
    """Returns the numbers of a pool by state, with so many free that all add up to `total`."""
    counts = {state.value: count for state, count in found.items()}
    free = BlockState.FREE.value
    counts[free] = max(total - sum(counts.values()) + counts[free], 0)
    return counts
