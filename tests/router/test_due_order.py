"""Tests the order of due times against a sorted list."""

import random

from hypothesis import given
from hypothesis import strategies as st

from tandem.router import due_order
from tandem.router.due_order import DueOrder, QueueEntry


def entry(due: float, num_tokens: int) -> QueueEntry:
    return QueueEntry(tenant="a", priority=0, num_tokens=num_tokens, due=due)


@given(st.integers(0, 2**32), st.integers(1, 300), st.integers(2, 40))
def test_it_equals_a_sorted_list(seed: int, size: int, num_dues: int) -> None:
    """A list that sorts stably, because equal due times go by arrival."""
    drawn = random.Random(seed)
    order: DueOrder[QueueEntry] = DueOrder()
    model: list[QueueEntry] = []
    for _ in range(size):
        if model and drawn.random() < 0.3:
            gone = drawn.choice(model)
            order.remove(gone)
            model.remove(gone)
            assert gone not in order
        else:
            added = entry(drawn.randrange(num_dues), drawn.randrange(1, 9))
            order.add(added)
            model.append(added)
            model.sort(key=lambda each: each.due)
        due = drawn.randrange(-1, num_dues + 1)
        until = sum(each.num_tokens for each in model if each.due <= due)
        assert order.tokens_until(due) == until
    assert list(order) == model
    assert list(reversed(order)) == model[::-1]
    assert (len(order), order.num_tokens) == (len(model), sum(each.num_tokens for each in model))


def test_chunks_are_split() -> None:
    """As many entries as a chunk holds, several times, added from the middle outwards."""
    order: DueOrder[QueueEntry] = DueOrder()
    size = 5 * due_order._MAX_CHUNK
    dues = list(range(size))
    random.Random(1).shuffle(dues)
    entries = [entry(due, due % 7 + 1) for due in dues]
    for each in entries:
        order.add(each)
    assert [each.due for each in order] == list(range(size))
    for due in (-1, 0, 700, 1_500, size - 1):
        assert order.tokens_until(due) == sum(each % 7 + 1 for each in range(due + 1))
    for each in entries:
        order.remove(each)
    assert (list(order), order.num_tokens, order.tokens_until(size)) == ([], 0, 0)
