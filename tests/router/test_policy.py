"""Placement is a pure function; these are the properties it is relied on for."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from tandem.router.policy import Candidate, Placement, place


def candidates(prefix: str) -> st.SearchStrategy[list[Candidate]]:
    one = st.builds(
        Candidate,
        worker_id=st.just(""),
        pending_tokens=st.integers(0, 9999),
        num_requests=st.integers(0, 99),
        free_blocks=st.integers(0, 999),
        block_size=st.sampled_from([1, 16, 64]),
        matched_tokens=st.integers(0, 4096),
    )
    return st.lists(one, max_size=5).map(
        lambda found: [
            Candidate(**{field: getattr(c, field) for field in FIELDS} | {"worker_id": f"{prefix}{i}"})
            for i, c in enumerate(found)
        ]
    )


FIELDS = ("pending_tokens", "num_requests", "free_blocks", "block_size", "matched_tokens")


def idle(worker_id: str, **fields: int) -> Candidate:
    base = {"pending_tokens": 0, "num_requests": 0, "free_blocks": 100, "block_size": 16}
    return Candidate(worker_id=worker_id, **base | fields)


@given(st.integers(1, 4096), candidates("p"), candidates("d"))
def test_it_is_pure_and_chooses_among_what_it_is_given(
    tokens: int, prefill: list[Candidate], decode: list[Candidate]
) -> None:
    before = copy.deepcopy((prefill, decode))
    placement = place(tokens, prefill, decode)
    assert placement == place(tokens, prefill, decode)
    assert (prefill, decode) == before
    if not decode:
        assert placement is None
        return
    assert placement is not None
    assert placement.decode in {c.worker_id for c in decode}
    assert (placement.prefill is None) == (not prefill)
    assert placement.prefill is None or placement.prefill in {c.worker_id for c in prefill}


@given(st.integers(1, 4096), candidates("p"), candidates("d").filter(bool))
def test_nobody_is_chosen_whom_another_beats_in_everything(
    tokens: int, prefill: list[Candidate], decode: list[Candidate]
) -> None:
    placement = place(tokens, prefill, decode)
    assert placement is not None
    for pool, chosen_id in ((prefill, placement.prefill), (decode, placement.decode)):
        for chosen in (c for c in pool if c.worker_id == chosen_id):
            for other in pool:
                assert not (
                    other.pending_tokens < chosen.pending_tokens
                    and other.num_requests < chosen.num_requests
                    and other.free_tokens >= chosen.free_tokens
                    and other.matched_tokens >= chosen.matched_tokens
                )


def test_a_cached_prefix_decides_between_equals_and_does_not_outweigh_load() -> None:
    cold, warm = idle("cold"), idle("warm", matched_tokens=512)
    assert place(600, [cold, warm], [cold, warm]) == Placement(prefill="warm", decode="warm")
    busy = idle("busy", matched_tokens=512, pending_tokens=2000, num_requests=4)
    assert place(600, [cold, busy], [cold, busy]) == Placement(prefill="cold", decode="cold")


def test_decode_goes_where_the_prompt_fits() -> None:
    full, busy = idle("full", free_blocks=3), idle("busy", num_requests=9)
    assert place(100, [], [full, busy]) == Placement(prefill=None, decode="busy")
    assert place(40, [], [full, busy]) == Placement(prefill=None, decode="full")


def test_ties_go_to_the_first() -> None:
    assert place(9, [idle("b"), idle("a")], [idle("d"), idle("c")]) == Placement(prefill="b", decode="d")
