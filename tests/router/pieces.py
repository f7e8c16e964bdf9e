"""Cuts the tokens of several choices into pieces that come in any order."""

import random
from collections.abc import Iterator, Sequence


def pieces(lengths: Sequence[int], order: random.Random) -> Iterator[tuple[int, range, bool]]:
    """Yields for each piece its choice, the indices of its tokens, and whether it is the choice's
    last; until all choices have their lengths.
    """
    sent = [0] * len(lengths)
    while open_choices := [
        choice for choice, length in enumerate(lengths) if sent[choice] < length
    ]:
        choice = order.choice(open_choices)
        first = sent[choice]
        sent[choice] += order.randint(1, lengths[choice] - first)
        yield choice, range(first, sent[choice]), sent[choice] == lengths[choice]
