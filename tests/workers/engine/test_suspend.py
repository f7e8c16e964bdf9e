"""A running sequence is leased like a finished prefill, and continues on another engine as if
nothing had happened.
"""

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.tests.examples import num_examples
from tandem.tests.workers.engine.drive import (
    PROMPT,
    MakeWorker,
    expected,
    fill,
    finish_of,
    first_tokens,
    run,
    spec,
    tokens_of,
)
from tandem.tests.workers.engine.fake import expected_choices
from tandem.tests.workers.engine.harness import (
    VOCAB_SIZE,
    SeqEvent,
    Worker,
    copy_tokens,
    is_sparse,
)
from tandem.tests.workers.engine.pair import Request
from tandem.tests.workers.engine.test_engine_properties import (
    MAX_PROMPT,
    MAX_TOKENS,
    WINDOWS,
    configs,
    random_config,
)
from tandem.tests.workers.spans import read_now, span
from tandem.workers.engine.block_pool import BlockState
from tandem.workers.engine.config import EngineConfig
from tandem.workers.engine.events import Admitted, NewTokens, Preempted, Suspended
from tandem.workers.engine.plan import SamplingParams
from tandem.workers.engine.sequence import BeamSearch, FinishReason, SequenceSpec, State, Task


def suspended_of(events: list[SeqEvent]) -> list[Suspended]:
    return [event for event in events if isinstance(event, Suspended)]


def go_on(
    source: Worker, event: Suspended, target: Worker, max_tokens: int, first_index: int
) -> list[int]:
    """Continues on another engine, whose tokens it returns."""
    number = event.id
    target.submit(
        spec(number, event.tokens, task=Task.DECODE, max_tokens=max_tokens, first_index=first_index)
    )
    (admitted,) = target.step()
    assert isinstance(admitted, Admitted)
    part = span(source.executor.kv, admitted.num_cached, len(event.tokens) - admitted.num_cached)
    target.executor.kv.write(
        admitted.tables[0].blocks, part, read_now(source.executor.kv, event.tables[0].blocks, part)
    )
    target.engine.commit_import(number, first_tokens(event.first_token))
    source.engine.cancel(event.id)
    events = run(target)
    assert [e.first_index for e in events if isinstance(e, NewTokens)][:1] == [first_index + 1]
    return tokens_of(events, number)


@pytest.mark.parametrize("num_steps", range(1, 10))
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_suspended_sequence_continues_elsewhere_and_nothing_is_computed_twice(
    worker: MakeWorker, num_steps: int, block_size: int
) -> None:
    source, target = worker(block_size=block_size), worker(block_size=block_size)
    source.submit(spec(1, max_tokens=12))
    events = [event for _ in range(num_steps) for event in source.step()]
    assert source.engine.suspend(1)
    assert source.engine.suspend(1)
    events += run(source)
    (event,) = suspended_of(events)
    assert events[-1] == event
    made = tokens_of(events, 1)
    assert (event.tokens, event.first_token) == ((*PROMPT, *made[:-1]), made[-1])
    blocks = source.engine.blocks()
    num_blocks = -(-len(event.tokens) // block_size)
    assert len(event.tables[0].blocks) == num_blocks == blocks[BlockState.LEASED]
    assert (blocks[BlockState.OWNED], blocks[BlockState.RESERVED]) == (0, 0)
    assert source.engine.suspend(1), "it has been"
    made += go_on(source, event, target, 12 - len(made) + 1, len(made) - 1)
    assert made == expected(PROMPT, 12)
    assert source.executor.num_tokens + target.executor.num_tokens == len(PROMPT) + 11
    for each in (source, target):
        run(each)
        each.check_idle()


def test_a_sequence_that_ends_with_the_step_in_flight_ends(worker: MakeWorker) -> None:
    for max_tokens, stop_ids, finish in (
        (3, (), FinishReason.LENGTH),
        (9, (expected(PROMPT, 3)[2],), FinishReason.STOP),
    ):
        target = worker()
        target.submit(spec(1, max_tokens=max_tokens, stop_ids=stop_ids))
        events: list[SeqEvent] = []
        while len(tokens_of(events, 1)) < 2:
            events += target.step()
        if target.config.overlap:  # otherwise nothing is in flight between two steps
            assert 1 in target.in_flight
            target.engine.suspend(1)
        events += run(target)
        assert (tokens_of(events, 1), finish_of(events, 1)) == (expected(PROMPT, 3), [finish])
        assert not suspended_of(events)
        target.check_idle()


def test_a_sequence_that_is_cancelled_meanwhile_says_nothing(worker: MakeWorker) -> None:
    target = worker()
    target.submit(spec(1, max_tokens=20))
    for _ in range(4):
        target.step()
    target.engine.suspend(1)
    target.engine.cancel(1)
    assert not run(target)
    target.check_idle()


def test_others_go_on(worker: MakeWorker) -> None:
    target = worker()
    for number in (1, 2, 3):
        target.submit(spec(number, PROMPT[number:], max_tokens=9))
    events = [event for _ in range(4) for event in target.step()]
    target.engine.suspend(2)
    events += run(target)
    assert [event.id for event in suspended_of(events)] == [2]
    for number in (1, 3):
        assert tokens_of(events, number) == expected(PROMPT[number:], 9)
    target.engine.cancel(2)
    run(target)
    target.check_idle()


@pytest.mark.parametrize("num_tokens", [9, 12], ids=["a partial block", "full blocks"])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_a_prompt_is_computed_and_forks_first(
    worker: MakeWorker, num_tokens: int, num_steps: int
) -> None:
    """No step copies the partial block for the choices: its reader reads the original."""
    source, prompt = worker(chunk_tokens=5), tuple(range(1, num_tokens + 1))
    source.submit(spec(1, prompt, max_tokens=12, num_choices=3, sampling=SamplingParams(seed=7)))
    events = [event for _ in range(num_steps) for event in source.step()]
    for number in (1, 2, 3):
        source.engine.suspend(number)
    events += run(source)
    want = expected_choices(prompt, 3, 12, VOCAB_SIZE, seed=7)
    for number, event in zip((1, 2, 3), suspended_of(events), strict=True):
        made = tokens_of(events, number)
        assert event.id == number
        assert made == want[number - 1][: len(made)]
        assert (*event.tokens, event.first_token) == (*prompt, *made)
        source.executor.kv.history(
            event.tables[0].blocks, len(event.tokens)
        )  # raises if it is of something else
    for number in (2, 1, 3):
        source.engine.cancel(number)
        source.check()
    run(source)
    source.check_idle()


def test_a_choice_is_suspended_alone(worker: MakeWorker) -> None:
    source = worker()
    source.submit(spec(1, max_tokens=12, num_choices=3, sampling=SamplingParams(seed=7)))
    events = [event for _ in range(4) for event in source.step()]
    assert source.engine.suspend(2)
    events += run(source)
    assert [event.id for event in suspended_of(events)] == [2]
    want = expected_choices(PROMPT, 3, 12, VOCAB_SIZE, seed=7)
    assert (tokens_of(events, 1), tokens_of(events, 3)) == (want[0], want[2])
    source.engine.cancel(2)
    run(source)
    source.check_idle()


def test_a_committed_import_is_suspended_again_with_its_first_token(worker: MakeWorker) -> None:
    target = worker()
    target.submit(spec(1, task=Task.DECODE))
    (admitted,) = target.step()
    assert isinstance(admitted, Admitted)
    assert not target.engine.suspend(1), "it waits for its KV cache"
    first = fill(target, admitted, PROMPT)
    target.engine.commit_import(1, first_tokens(first))
    assert target.engine.suspend(1)
    (event,) = run(target)
    assert event == Suspended(id=1, tables=admitted.tables, tokens=PROMPT, first_token=first)
    assert target.executor.num_tokens == 0
    target.engine.cancel(1)
    run(target)
    target.check_idle()


def test_what_has_not_begun_or_does_not_move_is_left_alone(worker: MakeWorker) -> None:
    target = worker(max_sequences=2)
    target.submit(spec(1, task=Task.PREFILL))
    target.submit(spec(2, num_choices=2, beam=BeamSearch(num_best=1)))
    target.submit(spec(4, max_tokens=2))
    for number in (1, 2, 3, 4, 5):
        assert not target.engine.suspend(number), "none has begun"
    events = target.step()
    assert target.engine.suspend(1)
    while target.sequences[2].state is not State.RUNNING:
        events += target.step()
    assert target.engine.suspend(1), "it is leased"
    assert (target.engine.suspend(2), target.engine.suspend(4)) == (True, False)
    events += target.step() + target.step()
    assert target.engine.suspend(3), "a beam"
    events += run(target)
    assert (tokens_of(events, 1), tokens_of(events, 4)) == (
        expected(PROMPT, 1),
        expected(PROMPT, 2),
    )
    assert finish_of(events, 2)
    assert not suspended_of(events)
    target.engine.cancel(1)
    run(target)
    target.check_idle()


# --- any order
# --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Place:
    """Where a choice is: a sequence of one of two engines and, while it moves there, the lease of
    the other one.
    """

    worker: int
    number: int
    lease: Suspended | None = None
    target: Admitted | None = None
    num_pulled: int = 0


class Service:
    """Two engines and a router that moves choices from one to the other, and checks every token."""

    def __init__(self, configs: tuple[EngineConfig, EngineConfig], late: bool) -> None:
        self.workers = [Worker(config, late=late) for config in configs]
        self.places: dict[Request, Place] = {}  # of the choices that have not ended
        self.seen: Counter[str] = Counter()
        self._next_id = 0

    def submit(self, worker: int, requests: list[Request]) -> None:
        """Submits as one request of several choices, or as single ones where these do not fit
        together.
        """
        each = self._spec(requests[0], Task.COLOCATED, len(requests))
        if not self.workers[worker].engine.scheduler.fits(each):
            for request in requests:
                self.submit(worker, [request])
            return
        self._next_id += len(requests)
        self.workers[worker].submit(each)
        for number, request in enumerate(requests, each.id):
            self.places[request] = Place(worker, number)

    def suspend(self, worker: int, number: int) -> None:
        target = self.workers[worker]
        self.seen["in flight"] += target.engine.suspend(number) and number in target.in_flight
        target.check()

    def step(self, worker: int) -> None:
        for event in self.workers[worker].step():
            self.seen[type(event).__name__] += 1
            self._handle(worker, event)

    def pull(self, request: Request, max_tokens: int = 1 << 30) -> None:
        """Copies some of the KV cache of a choice that moves; commits when it is whole."""
        place = self.places[request]
        lease, target = place.lease, place.target
        if lease is None or target is None:
            return
        source, sink = self.workers[1 - place.worker], self.workers[place.worker]
        count = min(len(lease.tokens) - place.num_pulled, max_tokens)
        if count:
            kv = source.executor.kv
            for layer, number in enumerate(kv.table_of):
                if kv.tables[number].window is None:
                    part = span(kv, place.num_pulled, count, layer, 1)
                    data = read_now(kv, lease.tables[number], part)
                    sink.executor.kv.write(target.tables[number], part, data)
            place.num_pulled += count
        if place.num_pulled == len(lease.tokens):
            if is_sparse(source.config):  # what is left of each window
                copy_tokens(
                    (source.executor.kv, lease.tables),
                    sink.executor.kv,
                    target.tables,
                    target.num_cached,
                    len(lease.tokens),
                )
            if lease.state is not None and target.state is not None:
                sink.write_state(target.state, source.read_state(lease.state))
            sink.engine.commit_import(place.number, first_tokens(lease.first_token))
            source.engine.cancel(lease.id)
            source.check()
            place.lease = None
            self.seen["moved"] += 1

    def lose(self, request: Request) -> None:
        """The lease runs out: the choice is computed again."""
        worker = self.places[request].worker
        self._free(request)
        self.submit(worker, [request])

    def cancel(self, request: Request) -> None:
        self._free(request)
        request.num_ends = 1

    def finish(self) -> None:
        """Runs all to its end. Where two engines are full of leases that wait for each other, one
        is lost.
        """
        for _ in range(3000):
            if not self.places:
                break
            num_events = self.seen.total()
            for worker in (0, 1):
                self.step(worker)
            for request in list(self.places):
                self.pull(request)
            moving = [request for request, place in self.places.items() if place.lease]
            if (
                moving
                and self.seen.total() == num_events
                and not any(w.engine.has_work for w in self.workers)
            ):
                self.lose(moving[0])
        assert not self.places, "somebody starves"
        for each in self.workers:
            run(each)
            each.check_idle()

    def _free(self, request: Request) -> None:
        place = self.places.pop(request)
        self.workers[place.worker].engine.cancel_choice(*self._submitted(place))
        if place.lease is not None:
            self.workers[1 - place.worker].engine.cancel(place.lease.id)
        for each in self.workers:
            each.check()

    def _submitted(self, place: Place) -> tuple[int, int]:
        """The id of the submit that a sequence comes from, and its choice."""
        first = max(number for number in self.workers[place.worker].specs if number <= place.number)
        return first, place.number - first

    def _spec(self, request: Request, task: Task, num_choices: int = 1) -> SequenceSpec:
        known = request.tokens[:-1] if task is Task.DECODE else request.tokens
        return SequenceSpec(
            id=self._next_id + 1,
            task=task,
            tokens=request.prompt + tuple(known),
            first_index=len(known),
            max_tokens=request.max_tokens - len(known),
            sampling=SamplingParams(seed=request.seed),
            num_choices=num_choices,
            stop_ids=request.stop_ids,
            salt=request.salt,
        )

    def _handle(self, worker: int, event: SeqEvent) -> None:
        request = next(
            (r for r, p in self.places.items() if (p.worker, p.number) == (worker, event.id)), None
        )
        if request is None:
            assert isinstance(event, Admitted), "of choices of which the first was cancelled"
            return
        place = self.places[request]
        match event:
            case Admitted():
                place.target, place.num_pulled = event, event.num_cached
            case NewTokens():
                assert event.first_index == len(request.tokens), "an index is missing or repeated"
                request.tokens += event.token_ids
                assert request.tokens == request.expected[: len(request.tokens)]
                if event.finish is not None:
                    assert request.tokens == request.expected
                    request.num_ends += 1
                    del self.places[request]
            case Preempted():
                del self.places[request]
                self.submit(worker, [request])
            case Suspended():
                assert event.tokens == (*request.prompt, *request.tokens[:-1])
                assert event.first_token == request.tokens[-1]
                for table, own in zip(
                    self.workers[worker].config.tables, event.tables, strict=True
                ):
                    num_blocks = -(-len(event.tokens) // table.block_size)
                    assert own.first + len(own.blocks) == num_blocks
                decode = self._spec(request, Task.DECODE)
                self._next_id += 1
                self.workers[1 - worker].submit(decode)
                self.places[request] = Place(1 - worker, decode.id, event)


REQUESTS = st.builds(
    lambda prompt, max_tokens, salt, stop_ids, seed, n: [
        Request(prompt, max_tokens, salt=salt, stop_ids=stop_ids, seed=seed + choice)
        for choice in range(n)
    ],
    prompt=st.lists(st.integers(1, 2), min_size=1, max_size=MAX_PROMPT).map(tuple),
    max_tokens=st.integers(1, MAX_TOKENS),
    salt=st.sampled_from([b"", b"", b"other"]),
    stop_ids=st.frozensets(st.integers(0, 15), max_size=1),
    seed=st.sampled_from([0, 0, 5]),
    n=st.sampled_from([1, 1, 2, 3]),
)
ACTIONS = st.tuples(
    st.sampled_from(
        ["step 0", "step 1", "step 0", "step 1", "suspend", "suspend", "pull", "cancel", "lose"]
    ),
    st.integers(0, 2**10),
)


def act(service: Service, action: str, number: int) -> None:
    """Does to one of the choices, which `number` picks, or to an engine what `action` names."""
    if action.startswith("step"):
        service.step(int(action[-1]))
        return
    candidates = [
        r for r, place in service.places.items() if action in ("suspend", "cancel") or place.lease
    ]
    if not candidates:
        return
    request = candidates[number % len(candidates)]
    if action == "suspend":
        service.suspend(service.places[request].worker, service.places[request].number)
    elif action == "pull":
        service.pull(request, 1 + number % 8)
    else:
        {"cancel": service.cancel, "lose": service.lose}[action](request)


def finish(service: Service, requests: list[Request]) -> None:
    service.finish()
    assert all(request.num_ends == 1 for request in requests)


@given(
    data=st.data(),
    batches=st.lists(REQUESTS, min_size=1, max_size=5),
    actions=st.lists(ACTIONS, max_size=60),
)
def test_in_any_order_every_choice_gets_its_tokens(
    data: st.DataObject, batches: list[list[Request]], actions: list[tuple[str, int]]
) -> None:
    model = data.draw(st.sampled_from(WINDOWS)), data.draw(st.sampled_from([False, False, True]))
    overlap = data.draw(st.booleans())
    pair = [replace(data.draw(configs(*model)), overlap=overlap) for _ in range(2)]
    service = Service((pair[0], pair[1]), late=data.draw(st.booleans()))
    for number, batch in enumerate(batches):
        service.submit(number % 2, batch)
    for action, number in actions:
        act(service, action, number)
    finish(service, [request for batch in batches for request in batch])


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_long_random_walks_meet_every_event(overlap: bool) -> None:
    dense = walk(range(num_examples(8)), overlap, has_state=False)
    sparse = Counter[str]()
    for number, windows in enumerate(WINDOWS[3:]):
        sparse += walk(range(number, number + 1), overlap, windows, has_state=number % 2 > 0)
    want = {"Suspended", "moved", "Preempted", *(["in flight"] if overlap else [])}
    for seen in (dense, sparse):
        assert all(seen[name] >= 5 for name in want), seen


def walk(
    seeds: range, overlap: bool, windows: tuple[int | None, ...] = (None,), *, has_state: bool
) -> Counter[str]:
    """Counts what happens to two engines of one model in 400 actions for each seed."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        first, second = (random_config(rng, overlap, windows, has_state) for _ in range(2))
        pair = first, second
        service, requests = Service(pair, late=rng.random() < 0.5), list[Request]()
        for _ in range(400):
            if len(service.places) < 8 and rng.random() < 0.2:
                batch = random_batch(rng)
                requests += batch
                service.submit(rng.randrange(2), batch)
            names = ["step 0", "step 1", "suspend", "pull", "cancel", "lose"]
            act(service, rng.choices(names, [8, 8, 4, 6, 0.3, 0.3])[0], rng.randrange(100))
        finish(service, requests)
        seen += service.seen
    return seen


def random_batch(rng: random.Random) -> list[Request]:
    prompt, max_tokens = (
        tuple(rng.choices([1, 2], k=rng.randint(1, MAX_PROMPT))),
        rng.randint(1, MAX_TOKENS),
    )
    return [Request(prompt, max_tokens, seed=7 + choice) for choice in range(rng.randint(1, 3))]
