"""One router's stream into a worker: its jobs, and what waits to go up."""

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..proto import inference_pb2, worker_pb2
from .engine.events import Token
from .engine.plan import SampledLogprobs
from .engine.sequence import FinishReason, SequenceSpec
from .transfer.receiver import FetchResult, FetchTarget

JobKey = tuple[str, int]  # request id, attempt

_MAX_HASHES: Final = 16_384  # in one message
_MAX_SCORES: Final = 1_024  # of prompt tokens, made messages at once: 3 ms with 20 alternatives each

_FINISH = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


@dataclass(slots=True, eq=False)
class WorkerRequest:
    """One submit that a worker has accepted and not yet ended."""

    spec: SequenceSpec
    session: "RouterSession"
    key: JobKey
    first_choice: int
    choices: set[int] = field(init=False)  # that have not ended
    checking: asyncio.Task[None] | None = None  # until its grammar is known to be good
    grammar: object = None  # keeps it compiled
    target: asyncio.Future[FetchTarget] | None = None  # DECODE: set at admission
    pulling: asyncio.Task[None] | None = None  # DECODE: until the cache has arrived
    fetched: FetchResult | None = None

    def __post_init__(self) -> None:
        num_choices = self.spec.beam.num_best if self.spec.beam else self.spec.num_choices
        self.choices = set(range(self.first_choice, self.first_choice + num_choices))

    def choice_of(self, sequence_id: int) -> int:
        """Which choice a sequence of the job is."""
        return self.first_choice + sequence_id - self.spec.id


@dataclass(slots=True, eq=False)
class RouterSession:
    """The jobs of one stream. Outputs and changes of the prefix cache gather here and leave as one message a step."""

    jobs: dict[JobKey, WorkerRequest] = field(default_factory=dict)
    _outputs: list[worker_pb2.Output] = field(default_factory=list)
    # Not yet complete, and what came after it; only the one request waits.
    _growing: dict[JobKey, list[worker_pb2.Output]] = field(default_factory=dict)
    _follows_cache: bool = False
    _changes: dict[bytes, bool] = field(default_factory=dict)  # blocks, by their hashes, that have come or gone
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _closed: bool = False

    def put(self, key: JobKey, choice: int = 0, **event: object) -> None:
        """Queues one output, `admitted=`, `tokens=`, `joined=` or `failure=`."""
        output = worker_pb2.Output(request_id=key[0], attempt=key[1], choice=choice, **event)  # type: ignore[arg-type]
        self._queue(key, output)

    def put_tokens(self, key: JobKey, choice: int, events: Sequence[Token]) -> None:
        """Queues generated tokens of one choice, in order and at least one. What is to be said of a long prompt is put
        together piece by piece, so that the event loop comes to others in between."""
        scores = [logprobs for event in events for logprobs in event.prompt_logprobs]
        at_once = len(scores) if key in self._growing else _MAX_SCORES
        tokens = tokens_output(events, scores[:at_once])
        output = worker_pb2.Output(request_id=key[0], attempt=key[1], choice=choice, tokens=tokens)
        if len(scores) > at_once:
            self._growing[key] = [output]
            self._grow_soon(key, iter(scores[at_once:]))
        else:
            self._queue(key, output)

    def _queue(self, key: JobKey, output: worker_pb2.Output) -> None:
        self._growing.get(key, self._outputs).append(output)
        self._ready.set()

    def _grow_soon(self, key: JobKey, scores: Iterator[SampledLogprobs]) -> None:
        asyncio.get_running_loop().call_soon(self._grow, key, scores)

    def _grow(self, key: JobKey, scores: Iterator[SampledLogprobs]) -> None:
        piece = list(itertools.islice(scores, _MAX_SCORES))
        if piece:
            self._growing[key][0].tokens.prompt_logprobs.extend(map(_scores, piece))
            self._grow_soon(key, scores)
        else:
            self._outputs += self._growing.pop(key)
            self._ready.set()

    def follow_cache(self, hashes: Iterable[bytes]) -> None:
        """Queues the whole prefix cache; from now on changes count."""
        self._follows_cache = True
        self.change_cache(hashes, ())

    def change_cache(self, stored: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """Queues what has come into the prefix cache and what has gone; before `follow_cache` it does nothing."""
        if not self._follows_cache:
            return
        for digest, is_stored in (*((d, True) for d in stored), *((d, False) for d in evicted)):
            # Whatever the router has not heard of yet needs no mention once it is undone.
            if self._changes.pop(digest, is_stored) is is_stored:
                self._changes[digest] = is_stored
        if self._changes:
            self._ready.set()

    def close(self) -> None:
        """Nothing new goes up: `take` returns None once the queued outputs have gone."""
        self._closed = True
        self._ready.set()

    async def take(self) -> worker_pb2.SessionResponse | None:
        """All that is queued by now, waiting for the first, but only so much of a large cache as a message takes; None
        when the session is closed."""
        while not (self._outputs or self._changes or (self._closed and not self._growing)):
            self._ready.clear()
            await self._ready.wait()
        if self._closed and not (self._outputs or self._growing):
            return None
        outputs, self._outputs = self._outputs, []
        return worker_pb2.SessionResponse(outputs=outputs, cache=self._take_changes())

    def _take_changes(self) -> worker_pb2.CacheChange | None:
        taken = dict(itertools.islice(self._changes.items(), _MAX_HASHES))
        if not taken:
            return None
        for digest in taken:
            del self._changes[digest]
        return worker_pb2.CacheChange(
            stored=[digest for digest, is_stored in taken.items() if is_stored],
            evicted=[digest for digest, is_stored in taken.items() if not is_stored],
        )


def tokens_output(events: Sequence[Token], prompt_logprobs: Iterable[SampledLogprobs] = ()) -> worker_pb2.Tokens:
    """Generated tokens of one choice, in order and at least one, as they go up the session."""
    return worker_pb2.Tokens(
        first_index=events[0].index,
        ids=[event.token for event in events],
        finish_reason=_FINISH[events[-1].finish],
        prefill_seconds=events[0].prefill_seconds,
        logprobs=[_scores(event.logprobs) for event in events if event.logprobs is not None],
        prompt_logprobs=map(_scores, prompt_logprobs),
        score=events[-1].score,
    )


def _scores(logprobs: SampledLogprobs) -> worker_pb2.TokenScores:
    return worker_pb2.TokenScores(
        logprob=logprobs.logprob,
        top_ids=[token for token, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )
