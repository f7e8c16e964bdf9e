"""What the router believes of its workers, and what follows from it for the next request."""

import random
from collections import Counter

import pytest

from tandem.proto import worker_pb2
from tandem.proto.hashing import hash_chain
from tandem.proto.worker_pb2 import ROLE_DECODE, ROLE_PREFILL
from tandem.router.request import TokenRequest
from tandem.router.scheduling.policy import Placement
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.tests.router.pools import fill, info, request


def view_of(prefill: int, decode: int, *, max_sequences: int = 0, local_prefill_tokens: int = 0) -> WorkerRegistry:
    view = WorkerRegistry(local_prefill_tokens=local_prefill_tokens, rng=random.Random(0), clock=lambda: 0.0)
    fill(view, prefill=prefill, decode=decode, max_sequences=max_sequences, num_blocks=4096)
    return view


def load(**fields: int | float) -> worker_pb2.WorkerLoad:
    return worker_pb2.WorkerLoad(free_blocks=4096, total_blocks=4096, **fields)  # type: ignore[arg-type]


def dispatch(view: WorkerRegistry, asked: TokenRequest) -> tuple[str, str]:
    """Places a request as the dispatcher does."""
    placement = view.place(asked)
    assert placement is not None
    assert placement.prefill is not None
    view.sent(placement.prefill, asked, len(asked.prompt))
    view.sent(placement.decode, asked, 0)
    return placement.prefill, placement.decode


def prompt(number: int, length: int = 200) -> list[int]:
    return [random.Random(number * 1000 + i).randrange(1000) for i in range(length)]


def test_a_burst_spreads_before_any_report_comes() -> None:
    view = view_of(4, 4)
    placed = [dispatch(view, request(prompt(n), str(n))) for n in range(32)]
    for side in (0, 1):
        counts = Counter(place[side] for place in placed)
        assert len(counts) == 4
        assert max(counts.values()) - min(counts.values()) <= 1


def test_a_prefix_is_sought_where_it_went_before() -> None:
    view = view_of(3, 3)
    first = request(prompt(1), "1")
    prefill, decode = dispatch(view, first)
    for worker_id in (prefill, decode):
        view.ended(worker_id, "1")
    for n in range(4):
        again = request(prompt(1) + prompt(n), f"again {n}")
        assert dispatch(view, again) == (prefill, decode)
        view.ended(prefill, again.request_id)
        view.ended(decode, again.request_id)
    salted = request(prompt(1), "salted", cache_salt=b"another tenant")
    turns = {view.place(salted) for _ in range(60)}
    assert len(turns) == 9  # to another tenant all are equal, and equals take turns


@pytest.mark.parametrize("role", [ROLE_PREFILL, ROLE_DECODE])
def test_nobody_goes_to_a_draining_or_avoided_worker(role: "worker_pb2.Role") -> None:
    names = ["p0", "p1", "p2"] if role == ROLE_PREFILL else ["d0", "d1", "d2"]
    view = view_of(3, 3)
    view.update([*view.workers(), info(names[0], role, draining=True)])
    for n in range(12):
        placement = view.place(request(prompt(n)), avoid={names[1]})
        assert placement is not None
        assert {names[0], names[1]}.isdisjoint({placement.prefill, placement.decode})


def test_without_decode_there_is_no_place_and_without_prefill_decode_does_all() -> None:
    view = view_of(1, 1)
    assert view.place(request([1]), avoid={"d0"}) is None
    placement = view.place(request([1]), avoid={"p0"})
    assert placement is not None
    assert (placement.prefill, placement.decode) == (None, "d0")
    assert WorkerRegistry().place(request([1])) is None


def test_a_new_life_of_a_worker_begins_with_nothing() -> None:
    view = view_of(1, 1, max_sequences=4)
    asked = request(prompt(1), "1")
    dispatch(view, asked)
    view.update([info("p0", ROLE_PREFILL), info("d0", ROLE_DECODE, max_sequences=4)])
    assert view._workers["d0"].sent.keys() == {"1"}
    view.update([info("p0", ROLE_PREFILL), info("d0", ROLE_DECODE, max_sequences=4, epoch=2)])
    assert view._workers["d0"].sent == {}
    room = view.room()
    assert room is not None
    assert room.sequences == 4
    view.ended("d0", "1")
    view.computed("gone", "1")
    view.report_load("gone", worker_pb2.WorkerLoad())
    assert view.room() == room


def test_a_worker_that_left_is_forgotten() -> None:
    view = view_of(1, 1)
    dispatch(view, request(prompt(1), "1"))
    view.update([])
    assert view.workers() == []
    assert view.get("p0") is None
    fill(view, prefill=2, decode=2)
    placed = {view.place(request(prompt(1))) for _ in range(60)}
    assert len(placed) == 4  # nothing draws it anywhere


def test_a_report_changes_the_next_placement() -> None:
    view = view_of(0, 2)
    view.report_load("d0", load(num_running=5))
    for _ in range(4):
        placement = view.place(request([1]))
        assert placement is not None
        assert placement.decode == "d1"


def test_computed_prompts_are_no_load_on_prefill_any_more() -> None:
    view = view_of(2, 1)
    long = request(prompt(1, 1000), "long")
    prefill, _ = dispatch(view, long)
    other = "p1" if prefill == "p0" else "p0"
    assert all(dispatch(view, request(prompt(n, 100), str(n)))[0] == other for n in range(2, 6))
    view.computed(prefill, "long")
    assert dispatch(view, request(prompt(9, 100), "9"))[0] == prefill


def test_what_workers_report_of_their_caches_draws_and_evictions_let_go() -> None:
    view = view_of(1, 3)
    asked = request(prompt(1), "1")
    chain = hash_chain(asked.prompt, 16)
    view.report_cache("d1", 1, chain, [])
    view.report_cache("d2", 7, chain, [])  # another life of it
    view.report_cache("gone", 1, chain, [])
    assert {view.place(asked) for _ in range(20)} == {dispatch_of("p0", "d1")}
    view.report_cache("d1", 1, [], chain)
    assert len({view.place(asked) for _ in range(60)}) == 3


def test_a_cache_is_unknown_without_a_session() -> None:
    view = view_of(1, 3)
    asked = request(prompt(1), "1")
    view.report_cache("d1", 1, hash_chain(asked.prompt, 16), [])
    view.lost_session("d1", 2)
    assert {view.place(asked) for _ in range(20)} == {dispatch_of("p0", "d1")}
    view.lost_session("d1", 1)
    assert len({view.place(asked) for _ in range(60)}) == 3


def dispatch_of(prefill: str | None, decode: str) -> Placement:
    return Placement(prefill=prefill, decode=decode)


def test_a_prompt_is_hashed_once_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counting(tokens: tuple[int, ...], block_size: int, salt: bytes) -> list[bytes]:
        calls.append(block_size)
        return hash_chain(tokens, block_size, salt)

    monkeypatch.setattr("tandem.router.scheduling.prefix_index.hash_chain", counting)
    view = view_of(4, 4)
    prefill, decode = dispatch(view, request(prompt(1), "1"))
    view.ended(prefill, "1")
    view.ended(decode, "1")
    assert calls == [16]


def test_measured_workers_are_preferred_by_their_speed() -> None:
    view = view_of(2, 1)
    for tokens in (100, 800, 400, 200):
        view.measured("p0", prefill_tokens=tokens, prefill_seconds=tokens * 1e-3)
        view.measured("p1", prefill_tokens=tokens, prefill_seconds=tokens * 1e-4)
        view.measured("gone", prefill_tokens=tokens, prefill_seconds=1.0)
    assert {view.place(request(prompt(n))) for n in range(20)} == {dispatch_of("p1", "d0")}
    placed = Counter(dispatch(view, request(prompt(n), str(n)))[0] for n in range(66))
    assert 2 < placed["p0"] < 12  # a tenth of the speed, a tenth of the work


def test_a_slow_way_is_avoided_until_the_fast_one_is_crowded() -> None:
    view = view_of(1, 2)
    for num_bytes in (2**20, 2**23, 2**22):
        view.transferred("p0", "d0", num_bytes, num_bytes * 1e-7)
        view.transferred("p0", "d1", num_bytes, num_bytes * 1e-9)
    placed = [dispatch(view, request(prompt(n), str(n)))[1] for n in range(120)]
    assert set(placed[:20]) == {"d1"}
    assert "d0" in placed


def test_short_rests_go_to_decode_alone_if_that_is_allowed_and_faster() -> None:
    view = view_of(1, 1, local_prefill_tokens=64)
    view.report_load("d0", load(step_seconds=0.01))
    dispatch(view, request(prompt(1, 4000), "long"))
    assert view.place(request(prompt(2, 40))) == dispatch_of(None, "d0")
    assert view.place(request(prompt(2, 90))) == dispatch_of("p0", "d0")


def test_what_others_have_is_what_reports_say_beyond_our_own() -> None:
    view = view_of(1, 2, max_sequences=10)
    first = view.room()
    assert first is not None
    assert first.sequences == 20
    _, decode = dispatch(view, request(prompt(1), "1", num_choices=3))
    view.report_load(decode, load(num_running=5))
    room = view.room()
    assert room is not None
    assert room.sequences == 20 - 5  # ours are among them
    view.ended(decode, "1")
    room = view.room()
    assert room is not None
    assert room.sequences == 20 - 2


def test_what_the_directory_only_repeats_is_older_than_what_a_session_said() -> None:
    view = view_of(1, 1, max_sequences=10)
    before = view.workers()
    view.report_load("d0", load(num_running=4))
    view.update([*before, info("d1", ROLE_DECODE, max_sequences=10)])
    room = view.room()
    assert room is not None
    assert room.sequences == 20 - 4


def test_room_is_reserved_until_it_is_used() -> None:
    view = view_of(1, 1, max_sequences=10)
    woken: list[bool] = []
    view.subscribe(lambda: woken.append(True))
    before = view.room()
    asked = request(prompt(1), "1", max_tokens=50, num_choices=2)
    view.reserve(asked)
    reserved = view.room()
    assert before is not None
    assert reserved is not None
    assert (before - reserved).sequences == 2
    assert (before - reserved).kv_tokens == 200 + 2 * 50
    assert (before - reserved).prompt_tokens == 200
    prefill, decode = dispatch(view, asked)
    assert view.room() == reserved
    woken.clear()
    view.computed(prefill, "1")
    assert woken
    woken.clear()
    view.ended(decode, "1")
    assert woken
    view.ended(prefill, "1")
    view.unreserve("1")
    assert view.room() == before


def test_room_is_that_of_workers_that_take_requests() -> None:
    view = view_of(1, 2, max_sequences=10)
    view.update([info("d0", ROLE_DECODE, max_sequences=10, draining=True), info("d1", ROLE_DECODE, max_sequences=10)])
    room = view.room()
    assert room is not None
    assert room.sequences == 10
    assert room.prompt_tokens > 0  # without a prefill worker, decode workers compute prompts
    view.update([info("d0", ROLE_DECODE, draining=True)])
    assert view.room() is None
