"""Tests the prompts of traces; pure."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.traces.prompts import describe_trace, prompt_ids
from tandem.cluster.traces.read import TracedRequest


def traced(length: int, *hashes: int, block: int = 16) -> TracedRequest:
    return TracedRequest(
        time=0.0, input_length=length, output_length=1, block_hashes=hashes, block_tokens=block
    )


Chain = st.lists(st.integers(0, 2**53), min_size=1, max_size=6)


@given(Chain, Chain, Chain, st.integers(1, 40), st.data())
def test_equal_first_hashes_are_equal_prefixes(
    common: list[int], one: list[int], other: list[int], block: int, data: st.DataObject
) -> None:
    lengths, prompts = [], []
    for own in (one, other):
        hashes = [*common, *own]
        last = data.draw(st.integers(1, block))
        lengths.append(block * (len(hashes) - 1) + last)
        prompts.append(prompt_ids(traced(lengths[-1], *hashes, block=block), 1000, (3,)))
    assert [len(prompt) for prompt in prompts] == lengths
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)
    shared = block * len(common)
    assert prompts[0][:shared] == prompts[1][:shared]


def test_other_hashes_seeds_and_requests_give_other_ids() -> None:
    whole = prompt_ids(traced(64, 1, 2, 3, 4), 50_000, (0,))
    assert len({tuple(whole[at : at + 16]) for at in range(0, 64, 16)}) == 4
    assert prompt_ids(traced(64, 1, 2, 3, 4), 50_000, (0,)) == whole
    assert prompt_ids(traced(40, 1, 2, 3), 50_000, (0,)) == whole[:40]
    assert prompt_ids(traced(64, 1, 2, 3, 4), 50_000, (1,)) != whole
    unknown = traced(64)
    assert len(prompt_ids(unknown, 50_000, (0, 1))) == 64
    assert prompt_ids(unknown, 50_000, (0, 1)) != prompt_ids(unknown, 50_000, (0, 2))
    # The prompt of request 5 has nothing in common with block 5 of other requests.
    assert prompt_ids(unknown, 50_000, (0, 5)) != prompt_ids(traced(64, 5, block=64), 50_000, (0,))


def test_the_description_of_a_trace() -> None:
    assert describe_trace([traced(32, 1, 2), traced(32, 1, 3)]) == (
        "2 requests in 0 s, mean 32 tokens in and 1 out, 25% of the blocks repeat an earlier one"
    )
    assert describe_trace([traced(9)]).endswith("so no two prompts share a prefix")
