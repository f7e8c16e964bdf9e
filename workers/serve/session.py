"""Holds the requests and the queued outputs of one router's Session stream into a worker."""

import asyncio
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from ...proto import inference_pb2, worker_pb2
from ...proto.limits import MAX_INTERNAL_MESSAGE_BYTES
from ..engine.events import NewTokens
from ..engine.plan import SampledLogprobs
from ..engine.sequence import FinishReason, SequenceSpec
from ..transfer.frames import FetchResult

RequestKey = tuple[str, int]  # request id, attempt

_MAX_HASHES: Final = 16_384  # in one message
_MAX_OUTPUTS: Final = 1_024  # outputs of a message that are sent without a check of their size
_MAX_MESSAGE_BYTES: Final = MAX_INTERNAL_MESSAGE_BYTES // 4
_MAX_LOGPROBS: Final = 1_024  # prompt tokens converted at once: 3 ms with 20 alternatives each

_FINISH = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


@dataclass(slots=True, eq=False)
class WorkerRequest:
    """Holds a submit that a worker has accepted and that has not ended."""

    submit: worker_pb2.Submit
    spec: SequenceSpec
    session: "RouterSession"
    key: RequestKey
    choices: set[int]  # choices that have not ended
    computed_after: int = 0  # as in KvHandle, of what it computes or fetches
    preparing: asyncio.Task[None] | None = None  # loads its adapter and compiles its grammar
    grammar: object = None  # a reference that keeps its grammar compiled
    fetch: asyncio.Task[FetchResult] | None = None  # fetches its KV cache from another worker
    # Sequence ids by choice, of choices whose KV cache is offered to other workers.
    suspended: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class RouterSession:
    """Collects outputs and prefix cache changes of one stream; a step sends them as one message."""

    requests: dict[RequestKey, WorkerRequest] = field(default_factory=dict)
    load_version: int = -1  # of the last load that was sent
    next_idle_report: float = 0.0  # by the event loop's clock; see LoadReports
    _outputs: list[worker_pb2.Output] = field(default_factory=list)
    # By request: an output whose prompt log probabilities are being converted, and the request's
    # later outputs, which wait for it.
    _unfinished: dict[RequestKey, list[worker_pb2.Output]] = field(default_factory=dict)
    _has_large: bool = False  # a queued output has log probabilities of a prompt
    # By block hash: True if it was stored, False if it was evicted.
    _changes: dict[bytes, bool] = field(default_factory=dict)
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    reports_load: bool = False  # the message that `take` returned is to have the load
    _woken: bool = False
    _closed: bool = False
    # The worker has had another role since the session began: no new request comes in here.
    is_retired: bool = False

    def retire(self) -> None:
        """Takes no new request from now on, and reports a draining worker at once."""
        self.is_retired = True
        self.load_version = -1
        self.wake()

    def put(self, key: RequestKey, choice: int = 0, **event: object) -> None:
        """Queues an output with `admitted`, `tokens`, `kv_received`, `suspended` or `failure`."""
        output = worker_pb2.Output(request_id=key[0], attempt=key[1], choice=choice, **event)  # type: ignore[arg-type]
        self._unfinished.get(key, self._outputs).append(output)
        self._ready.set()

    def put_failure(
        self, key: RequestKey, kind: "worker_pb2.FailureKind", message: str, choice: int = 0
    ) -> None:
        """Queues the failure of a request, or of one preempted choice."""
        self.put(key, choice, failure=worker_pb2.Failure(kind=kind, message=message))

    def put_tokens(self, key: RequestKey, choice: int, event: NewTokens) -> None:
        """Queues generated tokens of one choice.

        Converts log probabilities of a long prompt piece by piece, so that the event loop serves
        other requests in between.
        """
        output = worker_pb2.Output(request_id=key[0], attempt=key[1], choice=choice)
        # Setting each field takes 1.2 us; a constructor with all fields takes 2.5 us.
        tokens = output.tokens
        tokens.first_index = event.first_index
        tokens.ids.extend(event.token_ids)
        tokens.finish_reason = _FINISH[event.finish]
        tokens.prefill_seconds = event.prefill_seconds
        tokens.score = event.score
        if event.num_draft_tokens:
            tokens.num_draft_tokens = event.num_draft_tokens
            tokens.num_accepted_tokens = len(event.token_ids) - 1
            tokens.num_drafts = 1
        if event.embedding:
            tokens.embedding.extend(event.embedding)
        if event.logprobs:
            tokens.logprobs.extend(map(_scores, event.logprobs))
        scores = event.prompt_logprobs
        at_once = len(scores) if key in self._unfinished else _MAX_LOGPROBS
        if scores:
            self._has_large = True
            tokens.prompt_logprobs.extend(map(_scores, scores[:at_once]))
        if len(scores) > at_once:
            self._unfinished[key] = [output]
            asyncio.get_running_loop().call_soon(self._convert_more, key, iter(scores[at_once:]))
        else:
            self._unfinished.get(key, self._outputs).append(output)
            self._ready.set()

    def _convert_more(self, key: RequestKey, scores: Iterator[SampledLogprobs]) -> None:
        piece = list(itertools.islice(scores, _MAX_LOGPROBS))
        if piece:
            self._unfinished[key][0].tokens.prompt_logprobs.extend(map(_scores, piece))
            asyncio.get_running_loop().call_soon(self._convert_more, key, scores)
        else:
            self._outputs += self._unfinished.pop(key)
            self._ready.set()

    def is_stale(self, load_version: int) -> bool:
        """Returns True if the session has not sent this load or a change of the prefix cache."""
        return bool(self._changes) or self.load_version != load_version

    def change_cache(self, stored: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """Queues hashes that entered and left the prefix cache, for the next message."""
        for digest in stored:
            self._change(digest, is_stored=True)
        for digest in evicted:
            self._change(digest, is_stored=False)

    def _change(self, digest: bytes, is_stored: bool) -> None:
        """Queues a change, or removes the opposite change if it has not been sent yet."""
        if self._changes.pop(digest, is_stored) is is_stored:
            self._changes[digest] = is_stored

    def wake(self) -> None:
        """Makes `take` return at once, maybe with an empty message, and report the load."""
        self._woken = True
        self._ready.set()

    def close(self) -> None:
        """Ends the stream: `take` returns None after all queued outputs and the load."""
        self._closed = True
        self._ready.set()

    async def take(self) -> worker_pb2.SessionResponse | None:
        """Waits for outputs or `wake` and returns all queued items as a message.

        Returns None when the session is closed. Items that do not fit into a message stay queued.
        """
        while not (self._outputs or self._woken or (self._closed and not self._unfinished)):
            self._ready.clear()
            await self._ready.wait()
        self.reports_load, self._woken = self._woken, False
        if self._closed and not (self._outputs or self._unfinished or self.reports_load):
            return None
        outputs = self._take_outputs()
        taken = dict(itertools.islice(self._changes.items(), _MAX_HASHES))
        for digest in taken:
            del self._changes[digest]
        if self._changes:
            self.wake()
        return worker_pb2.SessionResponse(
            outputs=outputs,
            stored_blocks=[digest for digest, is_stored in taken.items() if is_stored],
            evicted_blocks=[digest for digest, is_stored in taken.items() if not is_stored],
        )

    def _take_outputs(self) -> list[worker_pb2.Output]:
        """Removes and returns the queued outputs that fit into a message."""
        count = len(self._outputs)
        if self._has_large or count > _MAX_OUTPUTS:
            sizes = itertools.accumulate(output.ByteSize() for output in self._outputs)
            count = 1 + sum(1 for _ in itertools.takewhile(_MAX_MESSAGE_BYTES.__gt__, sizes))
        taken = self._outputs[:count]
        self._outputs = self._outputs[count:]
        self._has_large &= bool(self._outputs)
        return taken


def _scores(logprobs: SampledLogprobs) -> worker_pb2.TokenScores:
    return worker_pb2.TokenScores(
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_ids=[token for token, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )
