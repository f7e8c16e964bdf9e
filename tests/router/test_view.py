"""What the router believes of its workers, and what follows from it for the next request."""

import random
from collections import Counter

import pytest

from tandem.proto import worker_pb2
from tandem.proto.worker_pb2 import ROLE_DECODE, ROLE_PREFILL
from tandem.router.prefix_index import PrefixIndex
from tandem.router.request import TokenRequest
from tandem.router.view import DirectoryView
from tandem.tests.fleet import token_request


def info(worker_id: str, role: "worker_pb2.Role", epoch: int = 1, draining: bool = False) -> worker_pb2.WorkerInfo:
    load = worker_pb2.Load(free_blocks=256, total_blocks=256)
    return worker_pb2.WorkerInfo(
        worker_id=worker_id, epoch=epoch, role=role, block_size=16, load=load, draining=draining
    )


def view_of(prefill: int, decode: int) -> DirectoryView:
    view = DirectoryView()
    view.update(
        [info(f"p{n}", ROLE_PREFILL) for n in range(prefill)] + [info(f"d{n}", ROLE_DECODE) for n in range(decode)]
    )
    return view


def dispatch(view: DirectoryView, request: TokenRequest) -> tuple[str, str]:
    """Places a request as the dispatcher does."""
    placement = view.place(request)
    assert placement is not None
    assert placement.prefill is not None
    view.sent(placement.prefill, request, len(request.prompt))
    view.sent(placement.decode, request, 0)
    return placement.prefill, placement.decode


def prompt(number: int, length: int = 200) -> list[int]:
    return [random.Random(number * 1000 + i).randrange(1000) for i in range(length)]


def test_a_burst_spreads_before_any_report_comes() -> None:
    view = view_of(4, 4)
    placed = [dispatch(view, token_request(prompt(n), name=str(n))) for n in range(32)]
    for side in (0, 1):
        counts = Counter(place[side] for place in placed)
        assert len(counts) == 4
        assert max(counts.values()) - min(counts.values()) <= 1


def test_a_prefix_is_sought_where_it_went_before() -> None:
    view = view_of(3, 3)
    first = token_request(prompt(1), name="1")
    prefill, decode = dispatch(view, first)
    for worker_id in (prefill, decode):
        view.ended(worker_id, "1")
    for n in range(4):
        again = token_request(prompt(1) + prompt(n), name=f"again {n}")
        assert dispatch(view, again) == (prefill, decode)
        view.ended(prefill, again.request_id)
        view.ended(decode, again.request_id)
    salted = token_request(prompt(1), name="salted", cache_salt=b"another tenant")
    turns = {view.place(salted) for _ in range(3)}
    assert len(turns) == 3  # to another tenant all are equal, and ties rotate


@pytest.mark.parametrize("role", [ROLE_PREFILL, ROLE_DECODE])
def test_nobody_goes_to_a_draining_or_avoided_worker(role: "worker_pb2.Role") -> None:
    names = ["p0", "p1", "p2"] if role == ROLE_PREFILL else ["d0", "d1", "d2"]
    view = view_of(3, 3)
    view.update([*view.workers(), info(names[0], role, draining=True)])
    for n in range(12):
        placement = view.place(token_request(prompt(n)), avoid={names[1]})
        assert placement is not None
        assert {names[0], names[1]}.isdisjoint({placement.prefill, placement.decode})


def test_without_decode_there_is_no_place_and_without_prefill_decode_does_all() -> None:
    view = view_of(1, 1)
    assert view.place(token_request([1]), avoid={"d0"}) is None
    placement = view.place(token_request([1]), avoid={"p0"})
    assert placement is not None
    assert (placement.prefill, placement.decode) == (None, "d0")
    assert DirectoryView().place(token_request([1])) is None


def test_a_new_life_of_a_worker_begins_with_nothing() -> None:
    view = view_of(1, 2)
    request = token_request(prompt(1), name="1")
    _, decode = dispatch(view, request)
    other = "d1" if decode == "d0" else "d0"
    view.update([info("p0", ROLE_PREFILL), info("d0", ROLE_DECODE, epoch=2), info("d1", ROLE_DECODE)])
    if decode == "d0":
        assert view._workers["d0"].sent_tokens == {}
    view.ended(decode, "1")
    view.ended(decode, "1")
    view.computed("gone", "1")
    view.report_load("gone", worker_pb2.Load())
    assert {decode, other} == {"d0", "d1"}


def test_a_worker_that_left_is_forgotten() -> None:
    view = view_of(1, 1)
    dispatch(view, token_request(prompt(1), name="1"))
    view.update([])
    assert view.workers() == []
    assert view.get("p0") is None
    assert view._prefixes.match(tuple(prompt(1)), b"") == {}


def test_a_report_changes_the_next_placement() -> None:
    view = view_of(0, 2)
    view.report_load("d0", worker_pb2.Load(num_running=5, free_blocks=256))
    for _ in range(4):
        placement = view.place(token_request([1]))
        assert placement is not None
        assert placement.decode == "d1"


def test_computed_prompts_are_no_load_on_prefill_any_more() -> None:
    view = view_of(2, 1)
    long = token_request(prompt(1, 1000), name="long")
    prefill, _ = dispatch(view, long)
    other = "p1" if prefill == "p0" else "p0"
    assert all(dispatch(view, token_request(prompt(n, 100), name=str(n)))[0] == other for n in range(2, 6))
    view.computed(prefill, "long")
    assert dispatch(view, token_request(prompt(9, 100), name="9"))[0] == prefill


def test_the_index_finds_the_longest_prefix_in_steps() -> None:
    index = PrefixIndex()
    index.record("a", tuple(range(130)), b"")
    index.record("b", tuple(range(300)), b"")
    assert index.match(tuple(range(400)), b"") == {"a": 128, "b": 256}
    assert index.match(tuple(range(127)), b"") == {"a": 64, "b": 64}
    assert index.match(tuple(range(63)), b"") == {}
    assert index.match(tuple(range(400)), b"salt") == {}
    index.forget("b")
    assert index.match(tuple(range(400)), b"") == {"a": 128}
    index.forget("a")
    assert not index._workers


def test_the_index_is_bounded_and_forgets_ends_before_beginnings() -> None:
    index = PrefixIndex(capacity=3)
    index.record("a", tuple(range(64 * 5)), b"")
    assert len(index._workers) == 3
    assert index.match(tuple(range(64 * 5)), b"") == {"a": 64 * 3}
    index.record("b", tuple(range(1000, 1064)), b"")
    assert index.match(tuple(range(64 * 5)), b"") == {"a": 64 * 2}
