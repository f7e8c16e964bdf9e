"""Predicts the time of prompts and KV transfers on each worker from the times of earlier ones."""

from collections.abc import Callable
from typing import Final

from ...proto import worker_pb2
from ...proto.costs import LinearCost
from .policy import NEUTRAL_PREFILL, NEUTRAL_TRANSFER
from .rates import Rates
from .worker_state import WorkerState

_MIN_SECONDS: Final = 1e-9
_TYPICAL_TOKENS: Final = 512
_TYPICAL_BYTES: Final = 2**24


class WorkerSpeeds:
    """Holds the estimated costs of prompts, by role and worker, and of transfers, by worker."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._prefill = {
            role: Rates(NEUTRAL_PREFILL, typical=_TYPICAL_TOKENS, clock=clock)
            for role in (worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE)
        }
        self.transfer = Rates(NEUTRAL_TRANSFER, typical=_TYPICAL_BYTES, clock=clock)
        """Of KV transfers from or to a worker, in bytes."""

    def record_prefill(self, worker: WorkerState, num_tokens: int, seconds: float) -> None:
        """Records that a worker took `seconds` for a prompt with `num_tokens` uncached tokens."""
        self._prefill[worker.info.role].observe(worker.info.worker_id, num_tokens, seconds)

    def forget(self, worker: WorkerState) -> None:
        """Removes the observations of a worker that has left or restarted."""
        self._prefill[worker.info.role].forget(worker.info.worker_id)
        self.transfer.forget(worker.info.worker_id)

    def prefill_cost(self, role: "worker_pb2.Role", worker_id: str) -> LinearCost:
        """Returns the cost of a prompt on a worker.

        Without observations of its role, this is the cost on the fastest worker of the other role.
        """
        own = self._prefill[role]
        return own.cost(worker_id) if own.known else self._best(role)

    def token_seconds(self, worker: WorkerState) -> float:
        """Returns the seconds per prompt token of a busy worker, as reported or else predicted."""
        reported = worker.load.prompt_token_seconds
        if reported:
            return max(reported, _MIN_SECONDS)
        info = worker.info
        return max(self.prefill_cost(info.role, info.worker_id).each, _MIN_SECONDS)

    def is_measured(self, worker: WorkerState) -> bool:
        """Returns True if the worker has reported its speed, or this router has observed it."""
        own = self._prefill[worker.info.role]
        return bool(worker.load.prompt_token_seconds) or worker.info.worker_id in own

    def unmeasured_token_seconds(self, role: "worker_pb2.Role") -> float:
        """Returns the seconds per prompt token of the workers of a role that are not measured."""
        return max(self._best(role).each, _MIN_SECONDS)

    def min_prefill_seconds(self) -> float:
        """Returns the time of the fastest worker for one token; 0 before the first measurement."""
        rates = self._prefill[worker_pb2.ROLE_PREFILL]
        return rates.best().seconds(1) if rates.known else 0.0

    def _best(self, role: "worker_pb2.Role") -> LinearCost:
        """Returns the cost on the fastest worker of a role, or of the other one if unknown."""
        own = self._prefill[role]
        if own.known:
            return own.best()
        is_prefill = role == worker_pb2.ROLE_PREFILL
        other = worker_pb2.ROLE_DECODE if is_prefill else worker_pb2.ROLE_PREFILL
        return self._prefill[other].best()
