"""Whatever is submitted, cancelled, lost and preempted in whatever order: right tokens, one end
each, no block lost.
"""

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tandem.tests.workers.engine.harness import FakeDisk, engine_config
from tandem.tests.workers.engine.pair import Pair, Request
from tandem.workers.engine.config import EngineConfig, SpeculativeConfig
from tandem.workers.engine.events import Admitted, NewTokens, Preempted
from tandem.workers.engine.plan import StepPlan
from tandem.workers.engine.sequence import BeamSearch, FinishReason, Task
from tandem.workers.kv_cache.tables import TableSpec

MAX_PROMPT, MAX_TOKENS = 6, 9
ACTIONS = [
    "submit",
    "prefill",
    "decode",
    "pull",
    "cancel",
    "choice",
    "lose",
    "write",
    "read",
    "lend",
]
BEAMS = st.builds(
    BeamSearch,
    num_best=st.just(1),
    length_penalty=st.sampled_from([1.0, 0.0, -1.0]),
    early_stopping=st.booleans(),
)
# Two letters and few shapes, so that prefixes collide.
REQUESTS = st.builds(
    Request,
    prompt=st.lists(st.integers(1, 2), min_size=1, max_size=MAX_PROMPT).map(tuple),
    max_tokens=st.integers(1, MAX_TOKENS),
    split=st.booleans(),
    salt=st.sampled_from([b"", b"", b"other"]),
    stop_ids=st.frozensets(st.integers(0, 15), max_size=1),
    seed=st.sampled_from([0, 0, 5]),
    n=st.sampled_from([1, 1, 2, 3]),
    beam=st.none() | BEAMS,
    num_remote=st.sampled_from([0, 0, MAX_PROMPT]),
    retained=st.sampled_from([0, 0, 3, MAX_PROMPT]),
)


# Of the tables of a model: the full table alone, most of all.
WINDOWS: list[tuple[int | None, ...]] = [
    (None,),
    (None,),
    (None,),
    (None, 3),
    (None, 2),
    (None, 2, 5),
    (None, 40),
    (3,),
    (6,),
    (2, 7),
]


def make_tables(
    windows: tuple[int | None, ...], block_size: int, ratios: Iterator[int]
) -> tuple[TableSpec, ...]:
    return tuple(
        TableSpec(block_size=block_size * ratio, window=window)
        for window, ratio in zip(windows, ratios, strict=False)
    )


def longest_blocks(tables: tuple[TableSpec, ...]) -> int:
    """The blocks of one of the longest requests."""
    return sum(-(-(MAX_PROMPT + MAX_TOKENS - 1) // table.block_size) for table in tables)


@st.composite
def configs(draw: st.DrawFn, windows: tuple[int | None, ...], has_state: bool) -> EngineConfig:
    """Workers that hold one to three of the longest requests."""
    block_size = draw(st.integers(1, 4))
    ratios = draw(st.lists(st.sampled_from([1, 1, 2, 3]), min_size=3, max_size=3))
    tables = make_tables(windows, block_size, iter(ratios if len(windows) > 1 else [1]))
    least = longest_blocks(tables)
    return engine_config(
        num_blocks=draw(st.integers(least, 3 * least)),
        num_host_blocks=draw(st.integers(0, 2 * least)),
        block_size=block_size,
        tables=tables,
        num_states=draw(st.integers(3, 14)) if has_state else 0,
        num_host_states=draw(st.integers(0, 6)) if has_state else 0,
        state_tokens=draw(st.integers(0, 4)),
        chunk_tokens=draw(st.integers(1, 12)),
        mixed_chunk_tokens=draw(st.integers(1, 12)),
        max_sequences=draw(st.integers(1, 8)),
        growth_tokens=draw(st.integers(0, 4)),
        prefix_caching=draw(st.sampled_from([True, True, False])),
        overlap=draw(st.booleans()),
        speculative=draw(
            st.none() | st.builds(SpeculativeConfig, max_step_tokens=st.integers(2, 12))
        ),
    )


class EngineMachine(RuleBasedStateMachine):
    """Requests whole and split over two engines. The checks of tokens, indices, ends and budgets
    are the harness's.
    """

    @initialize(
        workers=st.tuples(st.sampled_from(WINDOWS), st.sampled_from([False, False, True])).flatmap(
            lambda model: st.tuples(configs(*model), configs(*model))
        ),
        late=st.booleans(),
        has_disk=st.booleans(),
    )
    def start(self, workers: tuple[EngineConfig, EngineConfig], late: bool, has_disk: bool) -> None:
        self.pair = Pair(*workers, late=late, disk=FakeDisk() if has_disk else None)
        self.requests: list[Request] = []

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def submit(self, requests: list[Request]) -> None:
        for request in requests:
            self.requests.append(request)
            self.pair.submit(request)

    @rule(times=st.integers(1, 5))
    def step_prefill(self, times: int) -> None:
        for _ in range(times):
            self.pair.step(self.pair.prefill)

    @rule(times=st.integers(1, 5))
    def step_decode(self, times: int) -> None:
        for _ in range(times):
            self.pair.step(self.pair.decode)

    @precondition(lambda self: self.pair.active)
    @rule(max_tokens=st.integers(1, 8))
    def pull(self, max_tokens: int) -> None:
        for request in list(self.pair.active):
            self.pair.pull(request, max_tokens)

    @rule()
    def clear_caches(self) -> None:
        self.pair.prefill.clear_cache()
        self.pair.decode.clear_cache()

    @rule()
    def write_to_disk(self) -> None:
        self.pair.prefill.finish_copies()
        self.pair.decode.finish_copies()

    @precondition(lambda self: self.pair.prefill.importing or self.pair.decode.importing)
    @rule(data=st.data())
    def read_from_disk(self, data: st.DataObject) -> None:
        """All of a prefix, part of it or nothing."""
        for worker in (self.pair.prefill, self.pair.decode):
            for number, event in list(worker.importing.items()):
                worker.finish_import(number, data.draw(st.integers(0, len(event.import_hashes))))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        """To another worker, until what the disk reads is finished, too."""
        request = data.draw(st.sampled_from(self.requests))
        self.pair.decode.lend((*request.prompt, *request.tokens), request.salt)

    @precondition(lambda self: self.pair.active)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.pair.cancel(data.draw(st.sampled_from(self.pair.active)))

    @precondition(lambda self: any(r.choices for r in self.pair.active))
    @rule(data=st.data())
    def cancel_choice(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from([r for r in self.pair.active if r.choices]))
        self.pair.cancel_choice(request, data.draw(st.integers(0, len(request.choices) - 1)))

    @precondition(lambda self: any(r.num_pulled is not None for r in self.pair.active))
    @rule(data=st.data())
    def lose_lease(self, data: st.DataObject) -> None:
        self.pair.lose_lease(
            data.draw(st.sampled_from([r for r in self.pair.active if r.num_pulled is not None]))
        )

    @invariant()
    def integrity_holds(self) -> None:
        self.pair.prefill.check()
        self.pair.decode.check()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.drain()
            assert_all_ended(self.requests)


def assert_all_ended(requests: list[Request]) -> None:
    assert all(request.num_ends == 1 for request in requests)
    assert all(choice.num_ends == 1 for request in requests for choice in request.choices)


def test_engines_keep_every_promise_in_any_order() -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=settings().max_examples,
            stateful_step_count=30,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_long_random_walks_meet_every_event(overlap: bool) -> None:
    """Hypothesis walks are short and shrink well; these are long, crowded and meet what is rare."""
    seen: Counter[str] = Counter()
    disk = FakeDisk()  # that all share
    for seed in range(30 if overlap else 16):
        walk(random.Random(seed), seen, overlap, disk if seed % 3 else None)
    sparse = Counter[str]()
    for seed in range(16):
        windows = WINDOWS[3 + seed % (len(WINDOWS) - 3)]
        walk(random.Random(100 + seed), sparse, overlap, None, windows, has_state=seed % 2 > 0)
    assert all(
        sparse[name] >= 3
        for name in ("cached", "import", "copies", "from another worker", "lent", "read")
    ), sparse
    cancels = {f"cancel {state}" for state in ("waiting", "importing", "running", "leased")}
    want = {"Preempted", "import", "Progress", "cached", "lost lease", *cancels}
    want |= {
        "restored",
        "restored by an import",
        "saved before an import",
        "draft accepted",
        "draft refused",
    }
    want |= {
        "read",
        "read in part",
        "failed reading",
        "cancelled reading",
        "from another worker",
        "lent",
        "not lent",
    }
    want |= {
        "fork",
        "beams",
        "copies",
        "cancel choice waiting",
        "cancel choice importing",
        "cancel choice running",
    }
    want |= {"cancel in flight", "stop in flight", "preempted in flight"} if overlap else set()
    assert want <= set(seen), seen
    assert all(seen[name] >= 5 for name in want), seen


def walk(
    rng: random.Random,
    seen: Counter[str],
    overlap: bool,
    disk: FakeDisk | None,
    windows: tuple[int | None, ...] = (None,),
    *,
    has_state: bool = False,
) -> None:
    """One service's life of 300 actions, then its end; counts into `seen` what happened."""
    pair = Pair(
        random_config(rng, overlap, windows, has_state),
        random_config(rng, overlap, windows, has_state),
        late=rng.random() < 0.5,
        disk=disk,
    )
    requests: list[Request] = []
    for _ in range(300):
        action = rng.choices(ACTIONS, [3, 6, 8, 6, 1, 1, 1, 8, 2, 1])[0]
        importing = [r for r in pair.active if r.num_pulled is not None]
        if action == "submit" and len(pair.active) < 12:
            requests.append(random_request(rng))
            pair.submit(requests[-1])
        elif action in ("prefill", "decode"):
            target = pair.prefill if action == "prefill" else pair.decode
            before, num_plans = target.in_flight, len(target.executor.plans)
            events = pair.step(target)
            seen.update(type(event).__name__ for event in events)
            if events and target.executor.plans:
                seen["copies"] += len(target.executor.plans[-1].copies)
            seen["preempted in flight"] += sum(
                isinstance(e, Preempted) and e.id in before for e in events
            )
            stops = [
                e.id for e in events if isinstance(e, NewTokens) and e.finish is FinishReason.STOP
            ]
            seen["stop in flight"] += sum(number in target.in_flight for number in stops)
            for event in events:
                if isinstance(event, NewTokens) and event.num_draft_tokens:
                    seen["draft accepted"] += len(event.token_ids) > 1
                    seen["draft refused"] += len(event.token_ids) <= event.num_draft_tokens
            seen["from another worker"] += sum(
                isinstance(event, Admitted) and event.prefix_source == "remote" for event in events
            )
            seen["cached"] += sum(
                isinstance(event, Admitted) and event.num_cached > 0 for event in events
            )
            seen["restored"] += sum(
                isinstance(event, Admitted) and event.num_loaded > 0 for event in events
            )
            admitted = [
                event for event in events if isinstance(event, Admitted) and event.num_loaded
            ]
            seen["restored by an import"] += sum(
                target.specs[each.id].task is Task.DECODE for each in admitted
            )
            alone = [
                plan
                for plan in target.executor.plans[num_plans:]
                if plan.saved and plan == saves(plan)
            ]
            seen["saved before an import"] += len(alone)
        elif action == "pull" and importing:
            request = rng.choice(importing)
            pair.pull(request, rng.randint(1, 8))
            seen["import"] += request.num_pulled is None
        elif action == "cancel" and pair.active:
            request = rng.choice(pair.active)
            seen.update(f"cancel {state.value}" for state in pair.states(request))
            seen["cancel in flight"] += request.decode_id in pair.decode.in_flight
            pair.cancel(request)
        elif action == "choice" and any(r.choices for r in pair.active):
            request = rng.choice([r for r in pair.active if r.choices])
            seen.update(f"cancel choice {state.value}" for state in pair.states(request))
            pair.cancel_choice(request, rng.randrange(len(request.choices)))
        elif action == "write":
            for worker in (pair.prefill, pair.decode):
                worker.finish_copies()
        elif action == "read":
            seen.update(read_from_disk(pair, rng))
        elif action == "lend" and requests:
            request = rng.choice(requests)
            num_blocks = pair.decode.lend((*request.prompt, *request.tokens), request.salt)
            seen["lent" if num_blocks else "not lent"] += 1
        elif action == "lose" and importing:
            seen["lost lease"] += 1
            pair.lose_lease(rng.choice(importing))
    pair.drain()
    assert_all_ended(requests)
    seen["fork"] += sum(request.n > 1 and request.beam is None for request in requests)
    seen["beams"] += sum(request.beam is not None for request in requests)


def read_from_disk(pair: Pair, rng: random.Random) -> Iterator[str]:
    """Ends the imports from disk, well or not; yields what happened."""
    for worker in (pair.prefill, pair.decode):
        for number, event in list(worker.importing.items()):
            num_blocks = rng.randint(0, len(event.import_hashes))
            if not worker.finish_import(number, num_blocks):
                yield "cancelled reading"
            elif num_blocks == len(event.import_hashes):
                yield "read"
            else:
                yield "read in part" if num_blocks else "failed reading"


def saves(plan: StepPlan) -> StepPlan:
    return StepPlan(sequences=(), dropped=(), saved=plan.saved)


def random_request(rng: random.Random) -> Request:
    return Request(
        prompt=tuple(rng.choices([1, 2], k=rng.randint(1, MAX_PROMPT))),
        max_tokens=rng.randint(1, MAX_TOKENS),
        split=rng.random() < 0.6,
        salt=rng.choice([b"", b"", b"other"]),
        stop_ids=frozenset(rng.choices(range(16), k=rng.randint(0, 1))),
        seed=rng.choice([0, 5]),
        n=(n := rng.choice([1, 1, 2, 3])),
        beam=BeamSearch(num_best=rng.randint(1, n)) if rng.random() < 0.2 else None,
        num_remote=rng.choice([0, 0, 0, MAX_PROMPT]),
    )


def random_config(
    rng: random.Random, overlap: bool, windows: tuple[int | None, ...], has_state: bool
) -> EngineConfig:
    block_size = rng.randint(1, 4)
    ratios = rng.choices([1, 1, 2, 3], k=3) if len(windows) > 1 else [1]
    tables = make_tables(windows, block_size, iter(ratios))
    least = longest_blocks(tables)
    return engine_config(
        num_blocks=rng.randint(least, 3 * least),
        num_host_blocks=rng.choice([0, rng.randint(1, 3 * least)]),
        block_size=block_size,
        tables=tables,
        num_states=rng.randint(3, 14) if has_state else 0,
        num_host_states=rng.randint(0, 6) if has_state else 0,
        state_tokens=rng.randint(0, 4) if has_state else 0,
        chunk_tokens=rng.randint(1, 12),
        mixed_chunk_tokens=rng.randint(1, 12),
        max_sequences=rng.randint(2, 8),
        growth_tokens=rng.randint(0, 4),
        overlap=overlap,
        speculative=rng.choice([None, SpeculativeConfig(max_step_tokens=rng.randint(2, 12))]),
    )
