"""What waits for a caller that is away: nothing is lost, and its size is bounded."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto import inference_pb2, worker_pb2
from tandem.proto.errors import Cancelled
from tandem.router.dispatch.output_buffer import OutputBuffer
from tandem.router.request import TokenDelta
from tandem.tests.router.pieces import pieces

UNFINISHED = inference_pb2.FINISH_REASON_UNSPECIFIED


def delta(choice: int, first: int, count: int = 1, top: int = 0) -> TokenDelta:
    scores = tuple(
        worker_pb2.TokenScores(logprob=-i, top_ids=range(top)) for i in range(first, first + count)
    )
    ids = tuple(range(first, first + count))
    return TokenDelta(
        first_index=first, ids=ids, finish_reason=UNFINISHED, choice=choice, logprobs=scores
    )


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    takes=st.sets(st.integers(0, 40)),
)
def test_joining_changes_nothing_but_the_number_of_deltas(
    lengths: list[int], order: random.Random, takes: set[int]
) -> None:
    output_buffer = OutputBuffer()
    found: dict[int, list[int]] = {choice: [] for choice in range(len(lengths))}
    ended: set[int] = set()

    def take() -> None:
        deltas = list(output_buffer.take())
        assert len(deltas) == len({each.choice for each in deltas})
        for each in deltas:
            assert each.choice not in ended
            assert each.first_index == len(found[each.choice])
            assert [-scores.logprob for scores in each.logprobs] == list(each.ids)
            found[each.choice] += each.ids
            if each.finish_reason:
                ended.add(each.choice)

    for step, (choice, ids, is_last) in enumerate(pieces(lengths, order)):
        each = delta(choice, ids.start, len(ids))
        if is_last:
            each = replace(each, finish_reason=inference_pb2.FINISH_REASON_LENGTH)
        output_buffer.put(each)
        if step in takes:
            take()
    take()
    assert found == {choice: list(range(length)) for choice, length in enumerate(lengths)}
    assert ended == set(found)


def test_joining_hides_no_gap() -> None:
    output_buffer = OutputBuffer()
    for first in (0, 1, 3, 4):
        output_buffer.put(delta(0, first))
    assert [(each.first_index, len(each.ids)) for each in output_buffer.take()] == [(0, 2), (3, 2)]


def test_what_waits_is_bounded() -> None:
    output_buffer = OutputBuffer(max_bytes=100_000)
    for first in range(100):
        output_buffer.put(delta(0, first, top=20))
        output_buffer.check_size()
    for first in range(100, 200):
        output_buffer.put(delta(0, first, top=20))
    with pytest.raises(Cancelled, match="more than 100000 bytes of the answer were left unread"):
        output_buffer.check_size()
    list(output_buffer.take())
    output_buffer.check_size()
