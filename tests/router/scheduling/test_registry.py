"""Tests the state that the router has of its workers, and its effect on the next request."""

import random
from collections import Counter

import pytest

from tandem.proto import worker_pb2
from tandem.proto.hashing import hash_chain
from tandem.proto.worker_pb2 import ROLE_DECODE, ROLE_PREFILL
from tandem.router.request import TokenRequest
from tandem.router.scheduling.capacity import Capacity
from tandem.router.scheduling.policy import Placement
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.router.scheduling.worker_state import WorkerState
from tandem.tests.router.pools import fill, info, report, request


def registry_of(
    prefill: int, decode: int, *, max_sequences: int = 0, local_prefill_tokens: int = 0
) -> WorkerRegistry:
    registry = WorkerRegistry(
        local_prefill_tokens=local_prefill_tokens, rng=random.Random(0), clock=lambda: 0.0
    )
    fill(registry, prefill=prefill, decode=decode, max_sequences=max_sequences, num_blocks=4096)
    return registry


def load(**fields: int | float) -> worker_pb2.WorkerLoad:
    return worker_pb2.WorkerLoad(free_blocks=4096, total_blocks=4096, **fields)  # type: ignore[arg-type]


def dispatch(registry: WorkerRegistry, asked: TokenRequest) -> tuple[str, str]:
    """Places a request as the dispatcher does."""
    placement = registry.place(asked)
    assert placement is not None
    assert placement.prefill is not None
    registry.dispatched(placement.prefill, asked, len(asked.submit.token_ids))
    registry.dispatched(placement.decode, asked, 0)
    return placement.prefill, placement.decode


def prompt(number: int, length: int = 200) -> list[int]:
    return [random.Random(number * 1000 + i).randrange(1000) for i in range(length)]


def test_a_burst_spreads_before_any_report_comes() -> None:
    registry = registry_of(4, 4)
    placed = [dispatch(registry, request(prompt(n), str(n))) for n in range(32)]
    for side in (0, 1):
        counts = Counter(place[side] for place in placed)
        assert len(counts) == 4
        assert max(counts.values()) - min(counts.values()) <= 1


def test_a_prefix_goes_to_the_worker_that_has_cached_it() -> None:
    registry = registry_of(3, 3)
    first = request(prompt(1), "1")
    prefill, decode = dispatch(registry, first)
    for worker_id in (prefill, decode):
        registry.ended(worker_id, "1")
    for n in range(4):
        again = request(prompt(1) + prompt(n), f"again {n}")
        assert dispatch(registry, again) == (prefill, decode)
        registry.ended(prefill, again.request_id)
        registry.ended(decode, again.request_id)
    salted = request(prompt(1), "salted", cache_salt=b"another tenant")
    turns = {registry.place(salted) for _ in range(60)}
    assert len(turns) == 9  # to another tenant all are equal, and equals take turns


@pytest.mark.parametrize("role", [ROLE_PREFILL, ROLE_DECODE])
def test_draining_and_avoided_workers_get_no_request(role: "worker_pb2.Role") -> None:
    names = ["p0", "p1", "p2"] if role == ROLE_PREFILL else ["d0", "d1", "d2"]
    registry = registry_of(3, 3)
    registry.update([*registry.workers(), info(names[0], role, draining=True)])
    for n in range(12):
        placement = registry.place(request(prompt(n)), avoid={names[1]})
        assert placement is not None
        assert {names[0], names[1]}.isdisjoint({placement.prefill, placement.decode})


def test_a_worker_of_the_other_pool_does_all_if_a_pool_is_empty() -> None:
    registry = registry_of(1, 1)
    asked = request(prompt(1))
    assert registry.place(asked, avoid={"p0"}) == (None, "d0")
    assert registry.place(asked, avoid={"d0"}) == (None, "p0")
    assert registry.place(asked, colocated=True) == (None, "d0")
    assert registry.place(asked, avoid={"d0", "p0"}) is None
    assert WorkerRegistry().place(asked) is None
    registry.update([info("p0", ROLE_PREFILL, max_sequences=4)])
    free = registry.capacity.free()
    assert free is not None
    assert free.sequences == 4
    assert registry.capacity.largest() == Capacity(sequences=4, kv_tokens=free.kv_tokens)
    registry.capacity.reserve(asked)
    registry.dispatched("p0", asked, len(asked.submit.token_ids), decodes=True)
    assert registry.capacity._reserved == {}
    free = registry.capacity.free()
    assert free is not None
    assert free.sequences == 3


def test_a_restarted_worker_starts_empty() -> None:
    registry = registry_of(1, 1, max_sequences=4)
    asked = request(prompt(1), "1")
    dispatch(registry, asked)
    registry.update([info("p0", ROLE_PREFILL), info("d0", ROLE_DECODE, max_sequences=4)])
    assert registry._workers["d0"].requests.keys() == {"1"}
    registry.update([info("p0", ROLE_PREFILL), info("d0", ROLE_DECODE, max_sequences=4, epoch=2)])
    assert registry._workers["d0"].requests == {}
    free = registry.capacity.free()
    assert free is not None
    assert free.sequences == 4
    registry.ended("d0", "1")
    registry.prefilled("gone", "1")
    report(registry, "gone", load=worker_pb2.WorkerLoad())
    assert registry.capacity.free() == free


def test_a_worker_that_left_is_removed_with_its_cache() -> None:
    registry = registry_of(1, 1)
    dispatch(registry, request(prompt(1), "1"))
    registry.update([])
    assert registry.workers() == []
    assert registry.get("p0") is None
    fill(registry, prefill=2, decode=2)
    placed = {registry.place(request(prompt(1))) for _ in range(60)}
    assert len(placed) == 4  # nothing draws it anywhere


def test_a_report_changes_the_next_placement() -> None:
    registry = registry_of(0, 2)
    report(registry, "d0", load=load(num_running=5))
    for _ in range(4):
        placement = registry.place(request([1]))
        assert placement is not None
        assert placement.decode == "d1"


def test_computed_prompts_are_no_longer_load_of_the_prefill_worker() -> None:
    registry = registry_of(2, 1)
    long = request(prompt(1, 1000), "long")
    prefill, _ = dispatch(registry, long)
    other = "p1" if prefill == "p0" else "p0"
    assert all(dispatch(registry, request(prompt(n, 100), str(n)))[0] == other for n in range(2, 6))
    registry.prefilled(prefill, "long")
    assert dispatch(registry, request(prompt(9, 100), "9"))[0] == prefill


def test_reported_blocks_attract_requests_until_they_are_evicted() -> None:
    registry = registry_of(1, 3)
    asked = request(prompt(1), "1")
    chain = hash_chain(asked.submit.token_ids, 16)
    report(registry, "d1", epoch=1, stored=chain)
    report(registry, "d2", epoch=7, stored=chain)  # of another start
    report(registry, "gone", epoch=1, stored=chain)
    assert {registry.place(asked) for _ in range(20)} == {dispatch_of("p0", "d1")}
    report(registry, "d1", epoch=1, evicted=chain)
    assert len({registry.place(asked) for _ in range(60)}) == 3


def test_a_recovery_goes_to_the_worker_with_most_of_it_cached() -> None:
    registry = registry_of(2, 1)
    first = request(prompt(1, 1_000), "1")
    cached, _ = dispatch(registry, first)
    registry.prefilled(cached, "1")
    for name in map(str, range(2, 10)):
        worker, _ = dispatch(registry, request(prompt(int(name), 3_000), name))
        if worker != cached:
            registry.prefilled(worker, name)
    again = request([*first.submit.token_ids, 7], "1#0")
    placed = [registry.place(again, is_recovery=ahead) for ahead in (False, True) for _ in range(5)]
    assert [each is not None and each.prefill == cached for each in placed] == [False] * 5 + [
        True
    ] * 5


def test_a_recovery_goes_to_its_cached_prefix_even_on_a_slow_worker() -> None:
    """Prompts of one length do not show if a token or the start is slow; a cached one is short."""
    registry = registry_of(2, 1)
    first = request(prompt(1, 1_000), "1")
    cached, decode = dispatch(registry, first)
    other = "p1" if cached == "p0" else "p0"
    for _ in range(10):
        registry.record_prefill(cached, 1_000, 3.0)
        registry.record_prefill(other, 1_000, 1.0)
        registry.record_transfer(cached, decode, 2**25, 1.0)
    again = request([*first.submit.token_ids, *prompt(2, 100)], "1#0")
    assert {registry.place(again, is_recovery=True) for _ in range(9)} == {
        dispatch_of(cached, decode)
    }


def test_recoveries_spread_over_workers_with_the_same_cached_prefix() -> None:
    """They continue the streams of a dead worker, whose prompts begin alike.

    A worker with longer uncached rests gets fewer of them.
    """
    registry, shared = registry_of(2, 1), prompt(1, 800)
    for worker in ("p0", "p1"):
        report(registry, worker, epoch=1, stored=hash_chain(shared, 16))
    dispatched: dict[str | None, list[int]] = {"p0": [], "p1": []}
    for number, length in enumerate((300, 100, 100, 100, 100, 100)):
        again = request([*shared, *prompt(2 + number, length)], f"{number}#0")
        placement = registry.place(again, is_recovery=True)
        assert placement is not None
        assert placement.prefill is not None
        registry.dispatched(placement.prefill, again, len(again.submit.token_ids), is_recovery=True)
        registry.dispatched(placement.decode, again, 0)
        dispatched[placement.prefill].append(length)
    assert sorted(map(sorted, dispatched.values())) == [[100, 100, 100, 100], [100, 300]]
    for worker in ("p0", "p1"):
        for number in range(6):
            registry.prefilled(worker, f"{number}#0")
    assert [registry._workers[worker].ahead_tokens for worker in ("p0", "p1")] == [0, 0]


def test_workers_of_a_host_are_replaceable_if_others_have_their_role() -> None:
    registry = WorkerRegistry(rng=random.Random(0), clock=lambda: 0.0)
    entries = [("p1", ROLE_PREFILL, "a"), ("d1", ROLE_DECODE, "a"), ("d2", ROLE_DECODE, "b")]
    workers = []
    for name, role, host in entries:
        worker = info(name, role)
        worker.address = f"{host}:1"
        workers.append(worker)
    registry.update(workers)
    assert [registry.host(name) for name in ("p1", "d2", "unknown")] == ["a", "b", ""]
    assert registry.replaceable({"a"}) == {"d1"}, "the only prefill worker stays"
    assert registry.replaceable({"b"}) == {"d2"}
    assert registry.replaceable({"a", "b"}) == set()


def test_on_reach_is_called_when_a_worker_is_lost_or_found() -> None:
    registry, told = registry_of(1, 2), [0]
    registry.on_reachability = lambda: told.append(int(registry.can_reach_worker))
    assert registry.can_reach_worker
    for worker in ("d0", "d1", "p0"):  # a prefill worker does both while it is alone
        registry.session_lost(worker, 1)
    assert told == [0, 1, 1, 0]
    for _ in range(2):
        report(registry, "d1", epoch=1)
    assert told == [0, 1, 1, 0, 1]
    registry.update([])
    assert not registry.can_reach_worker


def test_a_cache_is_unknown_without_a_session() -> None:
    registry = registry_of(1, 3)
    asked = request(prompt(1), "1")
    report(registry, "d1", epoch=1, stored=hash_chain(asked.submit.token_ids, 16))
    registry.session_lost("d1", 2)
    assert {registry.place(asked) for _ in range(20)} == {dispatch_of("p0", "d1")}
    registry.session_lost("d1", 1)
    report(registry, "d1", epoch=1)
    assert len({registry.place(asked) for _ in range(60)}) == 3


def test_nothing_is_placed_on_a_worker_whose_session_has_broken_until_another_session_reports() -> (
    None
):
    registry = registry_of(1, 2)
    asked, (d0, d1) = request(prompt(1), "1"), (registry.get("d0"), registry.get("d1"))
    assert d0 is not None
    assert d1 is not None
    both = registry.capacity.free()
    woken: list[bool] = []
    registry.capacity.subscribe(lambda: woken.append(True))

    def places() -> set[str]:
        return {placed.decode for _ in range(20) if (placed := registry.place(asked)) is not None}

    assert places() == {"d0", "d1"}
    registry.session_lost("d1", 1)
    assert places() == {"d0"}
    assert registry.is_lost("d1", 1)
    assert not registry.has_other("d0")
    free = registry.capacity.free()
    assert free is not None
    assert free.workers == 1
    heartbeat = info("d1", ROLE_DECODE, num_blocks=4096)
    heartbeat.load.version = 9  # sent before its end
    registry.update([info("p0", ROLE_PREFILL), d0, heartbeat])
    assert places() == {"d0"}
    woken.clear()
    report(registry, "d1", epoch=1)
    assert woken
    assert places() == {"d0", "d1"}
    assert registry.capacity.free() == both
    registry.session_lost("d1", 1)
    registry.update([info("p0", ROLE_PREFILL), d0, info("d1", ROLE_DECODE, epoch=2)])
    assert places() == {"d0", "d1"}


def test_the_room_of_other_workers_is_free_sequences_and_free_kv_cache() -> None:
    registry = registry_of(1, 3, max_sequences=4)
    assert registry.room_elsewhere("d0") == 8
    assert registry.room_elsewhere("p0") == registry.room_elsewhere("left") == 12
    for number, worker_id in enumerate(("d0", "d0", "d1")):
        registry.dispatched(worker_id, request(prompt(number, 1000), str(number)), 0)
    assert registry.room_elsewhere("d0") == 7
    report(registry, "d2", load=load(draining=True, version=1))
    assert registry.room_elsewhere("d0") == registry.room_elsewhere("d2") - 2 == 3
    held = worker_pb2.WorkerLoad(
        free_blocks=130, owned_blocks=3966, total_blocks=4096, num_running=1, version=1
    )
    report(registry, "d1", load=held)
    assert registry.room_elsewhere("d0") == 2, "each of its sequences takes 63 blocks"


def dispatch_of(prefill: str | None, decode: str) -> Placement:
    return Placement(prefill=prefill, decode=decode)


def test_a_prompt_is_hashed_once_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counting(tokens: tuple[int, ...], block_size: int, salt: bytes) -> list[bytes]:
        calls.append(block_size)
        return hash_chain(tokens, block_size, salt)

    monkeypatch.setattr("tandem.router.scheduling.prefix_index.hash_chain", counting)
    registry = registry_of(4, 4)
    prefill, decode = dispatch(registry, request(prompt(1), "1"))
    registry.ended(prefill, "1")
    registry.ended(decode, "1")
    assert calls == [16]


def test_measured_workers_are_preferred_by_their_speed() -> None:
    registry = registry_of(2, 1)
    for tokens in (100, 800, 400, 200):
        registry.record_prefill("p0", tokens, tokens * 1e-3)
        registry.record_prefill("p1", tokens, tokens * 1e-4)
        registry.record_prefill("gone", tokens, 1.0)
    assert {registry.place(request(prompt(n))) for n in range(20)} == {dispatch_of("p1", "d0")}
    placed = Counter(dispatch(registry, request(prompt(n), str(n)))[0] for n in range(66))
    assert 2 < placed["p0"] < 12  # a tenth of the speed, a tenth of the work


def test_slow_transfers_are_avoided_until_the_fast_worker_is_crowded() -> None:
    registry = registry_of(1, 2)
    for num_bytes in (2**20, 2**23, 2**22):
        registry.record_transfer("p0", "d0", num_bytes, num_bytes * 1e-7)
        registry.record_transfer("p0", "d1", num_bytes, num_bytes * 1e-9)
    placed = [dispatch(registry, request(prompt(n), str(n)))[1] for n in range(120)]
    assert set(placed[:20]) == {"d1"}
    assert "d0" in placed


def test_a_short_uncached_rest_is_prefilled_by_the_decode_worker_if_allowed_and_faster() -> None:
    registry = registry_of(1, 1, local_prefill_tokens=64)
    report(registry, "d0", load=load(step_seconds=0.01))
    dispatch(registry, request(prompt(1, 4000), "long"))
    assert registry.place(request(prompt(2, 40))) == dispatch_of(None, "d0")
    assert registry.place(request(prompt(2, 90))) == dispatch_of("p0", "d0")


def test_reports_minus_our_own_use_are_the_use_by_other_routers() -> None:
    registry = registry_of(1, 2, max_sequences=10)
    first = registry.capacity.free()
    assert first is not None
    assert first.sequences == 20
    _, decode = dispatch(registry, request(prompt(1), "1", num_choices=3))
    report(registry, decode, load=load(num_running=5))
    free = registry.capacity.free()
    assert free is not None
    assert free.sequences == 20 - 5  # ours are among them
    registry.ended(decode, "1")
    free = registry.capacity.free()
    assert free is not None
    assert free.sequences == 20 - 2


def test_two_routers_count_each_others_requests_and_their_ends() -> None:
    """The reports of sessions and of the directory may come in any order."""
    mine, other = registry_of(1, 1, max_sequences=10), registry_of(1, 1, max_sequences=10)
    dispatch(mine, request(prompt(1), "1"))
    dispatch(other, request(prompt(2), "1"))  # ids need not differ between routers
    busy, idle = load(num_running=2, version=2), load(version=3)
    for registry in (mine, other):
        report(registry, "d0", load=busy)
        assert sequences_of(registry) == 10 - 2
    other.ended("d0", "1")
    mine.ended("d0", "1")
    newer, older = (info("d0", ROLE_DECODE, max_sequences=10) for _ in range(2))
    newer.load.CopyFrom(idle)
    older.load.CopyFrom(busy)
    for registry in (mine, other):
        assert sequences_of(registry) == 10 - 1
        registry.update([newer])
        assert sequences_of(registry) == 10
        report(registry, "d0", load=busy)  # overtaken by the heartbeat
        assert sequences_of(registry) == 10
        registry.update([older])
        assert sequences_of(registry) == 10


def test_loads_from_the_directory_count_unless_a_session_has_reported_newer_ones() -> None:
    registry = registry_of(0, 1, max_sequences=10)
    report(registry, "d0", load=load(num_running=4, version=2))

    def learn(version: int, num_running: int) -> int:
        listed = info("d0", ROLE_DECODE, max_sequences=10)
        listed.load.CopyFrom(load(num_running=num_running, version=version))
        registry.update([listed])
        return 10 - sequences_of(registry)

    assert learn(2, 5) == 4
    assert learn(1, 5) == 4
    assert learn(3, 6) == 6


def test_an_unchanged_list_counts_no_worker_again(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_of(2, 2)
    registry.capacity.subscribe(lambda: None)
    counted: list[str] = []
    monkeypatch.setattr(
        registry.capacity, "recount", lambda worker: counted.append(worker.info.worker_id)
    )
    registry.update([*registry.workers(), info("d7", ROLE_DECODE)])
    assert counted == ["d7"]


def test_capacity_is_counted_when_it_is_read_or_subscribed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[str] = []
    count = WorkerState.measure_free

    def measure_free(worker: WorkerState, token_seconds: float) -> Capacity:
        counted.append(worker.info.worker_id)
        return count(worker, token_seconds)

    registry = registry_of(2, 2, max_sequences=10)
    assert sequences_of(registry) == 20
    monkeypatch.setattr(WorkerState, "measure_free", measure_free)
    for version in range(1, 100):
        report(registry, "d0", load=load(num_running=version % 5, version=version))
    assert counted == []
    assert sequences_of(registry) == 20 - 4
    assert sequences_of(registry) == 20 - 4
    assert counted == ["d0"]
    woken: list[bool] = []
    registry.capacity.subscribe(lambda: woken.append(True))
    report(registry, "d0", load=load(num_running=1, version=100))
    assert (woken, counted) == ([True], ["d0", "d0"])


def sequences_of(registry: WorkerRegistry) -> int:
    free = registry.capacity.free()
    assert free is not None
    return free.sequences


def test_the_kv_cache_of_a_prefill_worker_is_placed_on_another_decode_worker() -> None:
    registry = registry_of(3, 3, local_prefill_tokens=1000)
    registry.update([*registry.workers(), info("p1", ROLE_PREFILL, draining=True)])
    for n in range(20):
        placement = registry.place(request(prompt(n, 20)), avoid={"d0", "p1"}, prefill="p1")
        assert placement is not None
        assert placement.prefill == "p1"
        assert placement.decode in ("d1", "d2")
    assert registry.place(request(prompt(1)), avoid={"d0", "d1", "d2"}, prefill="p1") is None
    placement = registry.place(request(prompt(1)), prefill="no longer listed")
    assert placement is not None
    assert placement.prefill == "no longer listed"


def test_a_repeated_heartbeat_does_not_replace_the_report_of_a_session() -> None:
    registry = registry_of(1, 1, max_sequences=10)
    before = registry.workers()
    report(registry, "d0", load=load(num_running=4))
    registry.update([*before, info("d1", ROLE_DECODE, max_sequences=10)])
    free = registry.capacity.free()
    assert free is not None
    assert free.sequences == 20 - 4


def test_capacity_is_reserved_until_it_is_used() -> None:
    registry = registry_of(1, 1, max_sequences=10)
    woken: list[bool] = []
    registry.capacity.subscribe(lambda: woken.append(True))
    before = registry.capacity.free()
    asked = request(prompt(1), "1", max_tokens=50, num_choices=2)
    registry.capacity.reserve(asked)
    reserved = registry.capacity.free()
    assert before is not None
    assert reserved is not None
    assert (before - reserved).sequences == 2
    assert (before - reserved).kv_tokens == 200 + 2 * 50
    assert (before - reserved).prompt_tokens == 200
    prefill, decode = dispatch(registry, asked)
    assert registry.capacity.free() == reserved
    woken.clear()
    registry.prefilled(prefill, "1")
    assert woken
    woken.clear()
    registry.ended(decode, "1")
    assert woken
    registry.ended(prefill, "1")
    registry.capacity.release("1")
    assert registry.capacity.free() == before


def test_free_capacity_is_that_of_workers_that_take_requests() -> None:
    registry = registry_of(1, 2, max_sequences=10)
    registry.update(
        [
            info("d0", ROLE_DECODE, max_sequences=10, draining=True),
            info("d1", ROLE_DECODE, max_sequences=10),
        ]
    )
    free = registry.capacity.free()
    assert free is not None
    assert free.sequences == 10
    assert free.prompt_tokens > 0  # without a prefill worker, decode workers compute prompts
    registry.update([info("d0", ROLE_DECODE, draining=True)])
    assert registry.capacity.free() is None


def holders_of(tokens: list[int]) -> WorkerRegistry:
    """Returns a registry: a prefill worker with 160 cached tokens, decode workers with more."""
    registry = registry_of(1, 3)
    listed = registry.workers()
    for each in listed:
        each.address = f"{each.worker_id}:1"
    registry.update(listed)
    for worker_id, num_tokens in {"p0": 160, "d0": 320, "d1": 480}.items():
        report(registry, worker_id, stored=hash_chain(tokens[:num_tokens], 16))
    return registry


def test_a_prefill_worker_is_told_where_more_of_a_prompt_is_cached() -> None:
    tokens = prompt(1, 500)
    registry = holders_of(tokens)
    asked = request(tokens, "a")
    assert registry.place(asked) is not None
    holder = registry.find_holder(asked, "p0")
    assert holder == worker_pb2.PrefixHolder(address="d1:1", num_tokens=480, block_size=16)
    assert registry.find_holder(asked, "gone") is None
    salted = request(tokens, "b", cache_salt=b"another tenant")
    assert registry.find_holder(salted, "p0") is None
    assert registry.find_holder(request(tokens[:200], "c"), "p0") is None  # 40 more


def test_fetched_tokens_are_not_computed_but_need_blocks() -> None:
    tokens = prompt(1, 500)
    registry = holders_of(tokens)
    asked = request(tokens, "a")
    registry.place(asked)
    before = registry._workers["p0"].free_tokens
    registry.dispatched("p0", asked, 500, fetched_tokens=480)
    used = registry._workers["p0"]
    assert used.own.uncached_tokens == 20
    assert before - used.free_tokens == 500 - 160
    assert registry.prefill_tokens == 20


def test_no_prefix_is_fetched_from_a_worker_that_cannot_give_it() -> None:
    """The worker drains, is lost, has another model, or has no address."""
    tokens = prompt(1, 500)
    registry = holders_of(tokens)
    asked = request(tokens, "a")

    def found() -> str:
        registry.place(asked)
        holder = registry.find_holder(asked, "p0")
        return holder.address if holder else ""

    assert found() == "d1:1"
    report(registry, "d1", load=load(version=1, draining=True))
    assert found() == "d0:1"
    report(registry, "d1", load=load(version=2))
    assert found() == "d1:1"
    registry.session_lost("d1", 1)
    assert found() == "d0:1"
    for change in ({"layout": b"other"}, {"address": ""}):
        listed = registry.workers()
        for each in listed:
            if each.worker_id == "d0":
                each.MergeFrom(worker_pb2.WorkerInfo(**change))
                each.address = change.get("address", each.address)  # type: ignore[assignment]
        registry.update(listed)
        assert found() == ""


def test_a_worker_with_windows_holds_less_and_reports_longer_blocks() -> None:
    registry = WorkerRegistry()
    windows = info("d0", ROLE_DECODE, num_blocks=64, block_size=16)
    windows.tables.add(block_size=32, token_bytes=1)
    windows.tables.add(block_size=16, token_bytes=2, window=64)
    registry.update([windows])
    asked = request(range(1600), "a", max_tokens=8)
    registry.capacity.reserve(asked)
    free = registry.capacity.free()
    assert free is not None
    assert free.kv_tokens == 64 * 16 - (1608 // 2 + 64 + 16)
    report(registry, "d0", stored=hash_chain(range(1600), 16)[1:20:2])  # 320 tokens
    assert registry.place(asked) == Placement(prefill=None, decode="d0")
    registry.dispatched("d0", asked, 1600)
    used, _ = registry._workers["d0"].requests["a"]
    assert used.uncached_tokens == 1600 - 320
    assert used.kv_tokens == (1608 - 320) // 2 + 64 + 16


def test_a_worker_with_states_is_found_by_its_last_point() -> None:
    registry = WorkerRegistry()
    hybrid = info("d0", ROLE_DECODE, block_size=16)
    hybrid.has_sparse_points = True
    registry.update([hybrid, info("d1", ROLE_DECODE, block_size=16)])
    chain = hash_chain(range(1600), 16)
    for worker_id in ("d0", "d1"):
        report(registry, worker_id, stored=[chain[9], chain[59]])
    for length, num_held in ((1600, 960), (900, 160)):
        matched = registry._look_up(request(range(length))).matched
        assert [matched.num_tokens(each) for each in ("d0", "d1")] == [num_held, 0]
