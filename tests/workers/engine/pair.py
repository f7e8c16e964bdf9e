"""A prefill and a decode engine, and a minimal router over both that checks every token of every
choice.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tandem.tests.workers.engine.fake import expected_logprobs, expected_tokens
from tandem.tests.workers.engine.harness import (
    VOCAB_SIZE,
    FakeDisk,
    SeqEvent,
    Worker,
    copy_tokens,
    is_sparse,
)
from tandem.tests.workers.spans import read_now, span
from tandem.workers.engine.beam import Beams
from tandem.workers.engine.config import EngineConfig
from tandem.workers.engine.events import Admitted, NewTokens, Preempted, PrefillFinished, Progress
from tandem.workers.engine.plan import FirstTokens, SamplingParams
from tandem.workers.engine.sequence import BeamSearch, PrefixRetention, SequenceSpec, State, Task


@dataclass(eq=False)
class Request:
    """What a client asked for and what it has got: one completion, or several, each in a request of
    its own.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    split: bool = False  # prefill and decode apart; else whole on the decode worker
    stop_ids: frozenset[int] = frozenset()
    salt: bytes = b""
    seed: int = 0
    n: int = 1
    beam: BeamSearch | None = None  # of width n
    retained: int = 0  # the most tokens of the prompt that the cache retains
    num_remote: int = 0  # tokens, of which a third worker has those of the prompt
    choices: "list[Request]" = field(default_factory=list)  # if n > 1 or beams
    hypothesis: tuple[int, ...] = ()  # what a choice of a beam search must be
    tokens: list[int] = field(default_factory=list)
    num_ends: int = 0
    num_attempts: int = 0
    prefill_id: int | None = None
    decode_id: int | None = None
    source: Admitted | None = None
    target: Admitted | None = None
    num_readable: int = 0  # tokens whose KV cache the prefill worker has
    num_pulled: int | None = None
    first_tokens: FirstTokens | None = None

    @functools.cached_property
    def expected(self) -> list[int]:
        if self.hypothesis:
            return list(self.hypothesis)
        tokens = expected_tokens(self.prompt, self.max_tokens, VOCAB_SIZE, self.seed)
        stops = [i for i, token in enumerate(tokens) if token in self.stop_ids]
        return tokens[: stops[0] + 1] if stops else tokens

    def split_up(self) -> "list[Request]":
        """A request for each completion."""
        shared: dict[str, Any] = {"split": self.split, "stop_ids": self.stop_ids, "salt": self.salt}
        if self.beam is None:
            seeds = range(self.seed, self.seed + self.n)
            return [Request(self.prompt, self.max_tokens, seed=seed, **shared) for seed in seeds]
        best = best_hypotheses(self.prompt, self.max_tokens, self.n, self.beam, self.stop_ids)
        return [
            Request(self.prompt, self.max_tokens, hypothesis=tokens, **shared) for tokens, _ in best
        ]


@functools.lru_cache(maxsize=4096)
def best_hypotheses(
    prompt: tuple[int, ...], max_tokens: int, width: int, beam: BeamSearch, stop_ids: frozenset[int]
) -> list[tuple[tuple[int, ...], float]]:
    """The hypotheses of a fake model, searched for without an engine, and their scores."""
    beams = Beams(
        width=width,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
        length_penalty=beam.length_penalty,
        early_stopping=beam.early_stopping,
    )
    rows = [prompt]
    while moves := beams.advance(
        [expected_logprobs(row, beams.num_candidates, VOCAB_SIZE) for row in rows]
    ):
        rows = [(*rows[place], token) for place, token in moves]
    return beams.best(beam.num_best)


class Pair:
    """Routes requests through a prefill and a decode worker as a router would."""

    def __init__(
        self,
        prefill: EngineConfig,
        decode: EngineConfig,
        *,
        late: bool = False,
        disk: FakeDisk | None = None,
    ) -> None:
        self.prefill, self.decode = (
            Worker(each, late=late, disk=disk) for each in (prefill, decode)
        )
        self.active: list[Request] = []
        self._next_id = 0

    def submit(self, request: Request) -> None:
        """Starts a request, or starts it again after a loss with the tokens it has. One for more
        than the decode worker could ever hold is made one for a single completion.
        """
        task = Task.DECODE if request.split else Task.COLOCATED
        if not self.decode.engine.scheduler.fits(self._spec(request, task)):
            request.n, request.beam = 1, None
        if request not in self.active:
            self.active.append(request)
        request.num_attempts += 1
        request.source = request.target = request.num_pulled = request.first_tokens = None
        request.prefill_id = request.decode_id = None
        request.choices = request.split_up() if request.n > 1 or request.beam else []
        if request.split:
            request.prefill_id = self._send(self.prefill, request, Task.PREFILL)
        else:
            request.decode_id = self._send(self.decode, request, Task.COLOCATED)

    def cancel(self, request: Request) -> None:
        self._drop(request)
        for choice in request.choices:
            choice.num_ends = 1
        self._end(request)

    def cancel_choice(self, request: Request, number: int) -> None:
        """Idempotent."""
        for worker, first in self._places(request):
            worker.engine.cancel_choice(first, number)
            worker.check()
        request.choices[number].num_ends = 1
        self._end_if_over(request)

    def states(self, request: Request) -> list[State]:
        """The request's states on the workers that have it."""
        found = [
            worker.sequences.get(i)
            for worker, first in self._places(request)
            for i in self._ids(request, first)
        ]
        return [sequence.state for sequence in found if sequence is not None]

    def lose_lease(self, request: Request) -> None:
        """The prefill worker's lease runs out: the import fails and the request starts again, each
        choice alone.
        """
        self._drop(request)
        self._restart(request)

    def step(self, worker: Worker) -> list[SeqEvent]:
        events = worker.step()
        for event in events:
            self._handle(worker, event)
        return events

    def pull(self, request: Request, max_tokens: int = 1 << 30) -> None:
        """Copies what KV cache there is, layer by layer; commits when it is whole."""
        if request.target is None or request.source is None or request.num_pulled is None:
            return
        start = request.num_pulled
        count = min(request.num_readable - start, max_tokens)
        source, target = self.prefill.executor.kv, self.decode.executor.kv
        if count > 0:
            for layer, number in enumerate(source.table_of):
                if source.tables[number].window is None:
                    part = span(source, start, count, layer, 1)
                    data = read_now(source, request.source.tables[number], part)
                    target.write(request.target.tables[number], part, data)
            request.num_pulled += count
        if request.first_tokens is not None and request.num_pulled == request.num_readable:
            assert request.decode_id is not None
            assert request.prefill_id is not None
            if is_sparse(self.decode.config):  # what is left of each window
                copy_tokens(
                    (source, request.source.tables),
                    target,
                    request.target.tables,
                    request.target.num_cached,
                    request.num_readable,
                )
            if request.target.state is not None and request.source.state is not None:
                state = self.prefill.read_state(request.source.state)
                self.decode.write_state(request.target.state, state)
            self.decode.engine.commit_import(request.decode_id, request.first_tokens)
            self.prefill.engine.cancel(request.prefill_id)
            request.num_pulled = request.prefill_id = None

    def drain(self, max_steps: int = 3000) -> None:
        """Runs everything to its end, in bounded steps, and finds nothing left behind."""
        for _ in range(max_steps):
            if not self.active:
                break
            for worker in (self.prefill, self.decode):
                worker.finish_copies()
                for number, event in list(worker.importing.items()):
                    worker.finish_import(number, len(event.import_hashes))
                if worker.engine.has_work:
                    self.step(worker)
            for request in list(self.active):
                self.pull(request)
        assert not self.active, "somebody starves"
        for worker in (self.prefill, self.decode):
            worker.check_idle()

    def _spec(self, request: Request, task: Task) -> SequenceSpec:
        return SequenceSpec(
            id=self._next_id + 1,
            task=task,
            tokens=request.prompt + tuple(request.tokens),
            first_index=len(request.tokens),
            max_tokens=request.max_tokens - len(request.tokens),
            sampling=SamplingParams(seed=request.seed),
            num_choices=request.n,
            beam=request.beam,
            stop_ids=request.stop_ids,
            salt=request.salt,
            tenant=request.salt,
            retentions=(
                PrefixRetention(
                    num_tokens=min(request.retained, len(request.prompt)), seconds=1e-3
                ),
            )
            if request.retained and task is not Task.DECODE
            else (),
            num_remote=min(request.num_remote, len(request.prompt))
            if task is not Task.DECODE
            else 0,
        )

    def _send(self, worker: Worker, request: Request, task: Task) -> int:
        spec = self._spec(request, task)
        self._next_id += request.n
        worker.submit(spec)
        return spec.id

    def _handle(self, worker: Worker, event: SeqEvent) -> None:
        owners = [(r, first) for r in self.active for w, first in self._places(r) if w is worker]
        owners = [(r, first) for r, first in owners if event.id in self._ids(r, first)]
        assert len(owners) == 1, f"{event} is of no request that lives"
        request, first = owners[0]
        match event:
            case Admitted() if worker is self.prefill:
                request.source = event
                request.num_readable = event.num_cached
                request.decode_id = self._send(self.decode, request, Task.DECODE)
                for number, choice in enumerate(request.choices):
                    if choice.num_ends:
                        self.decode.engine.cancel_choice(request.decode_id, number)
            case Admitted():
                request.target = event
                request.num_pulled = event.num_cached if request.split else None
            case Progress():
                assert (
                    request.num_readable
                    <= event.num_computed
                    <= len(request.prompt) + len(request.tokens)
                )
                request.num_readable = event.num_computed
            case PrefillFinished():
                assert worker is self.prefill
                request.first_tokens = event.first_tokens
            case NewTokens() if request.choices:
                self._take_choice(worker, request, event.id - first, event)
            case NewTokens():
                self._take(request, event)
                if event.finish is not None:
                    self._drop(request)
                    self._end(request)
            case Preempted():
                self._preempt(request, event.id - first)

    def _take(self, request: Request, event: NewTokens) -> None:
        assert request.num_ends == 0, "a token of a choice that has ended"
        assert event.first_index == len(request.tokens), "an index is missing or repeated"
        end = event.first_index + len(event.token_ids)
        assert list(event.token_ids) == request.expected[event.first_index : end], (
            f"token {event.first_index} of {request}"
        )
        request.tokens += event.token_ids
        assert (event.finish is not None) == (len(request.tokens) == len(request.expected))

    def _take_choice(self, worker: Worker, request: Request, number: int, event: NewTokens) -> None:
        """A choice that ended with its first token on the prefill worker ends so once more when the
        other commits it, unless it is cancelled there; here the odd ones are.
        """
        choice = request.choices[number]
        if (
            worker is self.decode
            and choice.expected == choice.tokens == [*event.token_ids]
            and number % 2 == 0
        ):
            assert (event.first_index, event.finish is not None) == (0, True)
            return
        self._take(choice, event)
        if event.finish is None:
            return
        choice.num_ends = 1
        if worker is self.prefill and request.decode_id is not None and number % 2:
            self.decode.engine.cancel_choice(request.decode_id, number)
        self._end_if_over(request)

    def _preempt(self, request: Request, number: int) -> None:
        if request.beam or not request.choices:
            assert number == 0
            self._drop(request)
            self._restart(request)
            return
        choice = request.choices[number]
        assert choice.num_ends == 0
        choice.num_ends = -1  # here; it goes on alone
        self._end_if_over(request)
        choice.num_ends = 0
        request.choices[number] = Request(choice.prompt, choice.max_tokens, num_ends=1)
        self.submit(choice)

    def _restart(self, request: Request) -> None:
        if request.beam or not request.choices:
            self.submit(request)
            return
        rest = [choice for choice in request.choices if not choice.num_ends]
        request.choices = []
        self._end(request)
        for choice in rest:
            self.submit(choice)

    def _end_if_over(self, request: Request) -> None:
        if request in self.active and all(choice.num_ends for choice in request.choices):
            self._drop(request)
            self._end(request)

    def _ids(self, request: Request, first: int) -> range:
        return range(first, first + request.n)

    def _places(self, request: Request) -> Iterator[tuple[Worker, int]]:
        for worker, first in ((self.prefill, request.prefill_id), (self.decode, request.decode_id)):
            if first is not None:
                yield worker, first

    def _drop(self, request: Request) -> None:
        for worker, first in self._places(request):
            for number in self._ids(request, first):
                worker.engine.cancel(number)
                worker.check()

    def _end(self, request: Request) -> None:
        request.num_ends += 1
        self.active.remove(request)
        assert request.num_ends == 1
