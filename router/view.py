"""What a router knows of the workers: the directory's last word, and what it has sent since."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ..proto import worker_pb2
from .policy import Candidate, Placement, place
from .prefix_index import PrefixIndex
from .request import TokenRequest


@dataclass(slots=True, eq=False)
class KnownWorker:
    """One worker of the view."""

    info: worker_pb2.WorkerInfo
    load: worker_pb2.Load
    sent_tokens: dict[str, int] = field(default_factory=dict)  # by request: dispatched here and not ended

    def candidate(self, matched: dict[str, int]) -> Candidate:
        """What is sent and maybe not yet reported counts, too: a burst spreads before the first report comes."""
        load = self.load
        return Candidate(
            worker_id=self.info.worker_id,
            pending_tokens=max(load.waiting_tokens, sum(self.sent_tokens.values())),
            num_requests=max(load.num_waiting + load.num_running, len(self.sent_tokens)),
            free_blocks=load.free_blocks + load.cached_blocks,
            block_size=self.info.block_size,
            matched_tokens=matched.get(self.info.worker_id, 0),
        )


class DirectoryView:
    """The workers as this router sees them. The last view stays when the directory is away."""

    def __init__(self) -> None:
        self._workers: dict[str, KnownWorker] = {}
        self._prefixes = PrefixIndex()
        self._turn = 0

    def update(self, workers: Iterable[worker_pb2.WorkerInfo]) -> None:
        """Takes the directory's whole list. A worker of a new epoch begins anew."""
        listed = {info.worker_id: info for info in workers}
        for worker_id in list(self._workers):
            if worker_id not in listed or listed[worker_id].epoch != self._workers[worker_id].info.epoch:
                del self._workers[worker_id]
                self._prefixes.forget(worker_id)
        for worker_id, info in listed.items():
            known = self._workers.get(worker_id)
            if known is None:
                self._workers[worker_id] = KnownWorker(info, info.load)
            else:
                known.info, known.load = info, info.load

    def workers(self) -> list[worker_pb2.WorkerInfo]:
        """All workers known, as the directory last described them."""
        return [known.info for known in self._workers.values()]

    def get(self, worker_id: str) -> worker_pb2.WorkerInfo | None:
        """One worker, if it is known."""
        known = self._workers.get(worker_id)
        return known.info if known else None

    def report_load(self, worker_id: str, load: worker_pb2.Load) -> None:
        """A worker's session said how busy it is; newer than any heartbeat."""
        if known := self._workers.get(worker_id):
            known.load = load

    def place(self, request: TokenRequest, avoid: Collection[str] = ()) -> Placement | None:
        """Chooses the workers of an attempt, none of those in `avoid`. None if no decode worker is left."""
        matched = self._prefixes.match(request.prompt, request.cache_salt)
        self._turn += 1
        return place(
            len(request.prompt),
            self._candidates(worker_pb2.ROLE_PREFILL, avoid, matched),
            self._candidates(worker_pb2.ROLE_DECODE, avoid, matched),
        )

    def sent(self, worker_id: str, request: TokenRequest, num_tokens: int) -> None:
        """The request was dispatched; `num_tokens` of its prompt are to be computed there."""
        if known := self._workers.get(worker_id):
            known.sent_tokens[request.request_id] = num_tokens
            self._prefixes.record(worker_id, request.prompt, request.cache_salt)

    def computed(self, worker_id: str, request_id: str) -> None:
        """The prompt has been computed; the request is still there."""
        known = self._workers.get(worker_id)
        if known and request_id in known.sent_tokens:
            known.sent_tokens[request_id] = 0

    def ended(self, worker_id: str, request_id: str) -> None:
        """The request has left the worker."""
        if known := self._workers.get(worker_id):
            known.sent_tokens.pop(request_id, None)

    def _candidates(self, role: "worker_pb2.Role", avoid: Collection[str], matched: dict[str, int]) -> list[Candidate]:
        found = [
            known.candidate(matched)
            for known in self._workers.values()
            if known.info.role == role and not known.info.draining and known.info.worker_id not in avoid
        ]
        turn = self._turn % len(found) if found else 0
        return found[turn:] + found[:turn]
