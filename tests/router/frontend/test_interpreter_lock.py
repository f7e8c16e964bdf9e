"""Tests that work on long texts does not hold the interpreter's lock for long.

A thread ticks beside the work. The longest pause of its ticks counts as a share of the whole time
of the work, so the speed of the machine does not matter. A busy machine can stop the ticks as
well, so the best of several runs counts.
"""

import json
import re
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from tandem.router.api.openai.parsing import json_list
from tandem.router.frontend.spelled_tokens import SpecialTokenEscaper, Spellings
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.router.frontend.test_spelled_tokens import END, START, chatml_tokenizer

MOST = 0.5  # of the time of the work
RUNS = 10

TEXT = ("The quick brown fox, 1234567890, jumps over the lazy dog. " * 20_000)[:1_000_000]
TOKENS = [f"<SPECIAL_{number}>" for number in range(1_000)]


def longest_pause(work: Callable[[], object]) -> float:
    """Returns the longest pause of a thread that ticks beside the work, as a share of its time."""
    ended, times = threading.Event(), [0.0, 0.0]

    def run() -> None:
        times[0] = time.monotonic()
        work()
        times[1] = time.monotonic()
        ended.set()

    running, ticks = threading.Thread(target=run), list[float]()
    running.start()
    while not ended.is_set():
        ticks.append(time.monotonic())
        time.sleep(1e-4)
    running.join()
    began, end = times
    points = [began, *(tick for tick in ticks if began < tick < end), end]
    return max(later - earlier for earlier, later in pairwise(points)) / (end - began)


def holds_the_lock(work: Callable[[], object]) -> bool:
    return all(longest_pause(work) > MOST for _ in range(RUNS))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = chatml_tokenizer()
    made._spelled[2].prepare()
    return made


def test_control_one_long_call_holds_the_lock(tokenizer: Tokenizer) -> None:
    alternatives = re.compile("|".join(map(re.escape, TOKENS)))
    numbers = list(range(1_000_000))  # made before, since another thread may run between two calls
    assert holds_the_lock(lambda: alternatives.search("<" * 20_000))
    assert holds_the_lock(lambda: json.dumps(numbers))


def test_encoding_leaves_the_lock_to_others(tokenizer: Tokenizer) -> None:
    assert not holds_the_lock(lambda: tokenizer._encode(TEXT, True))


def test_decoding_leaves_the_lock_to_others(tokenizer: Tokenizer) -> None:
    ids = tokenizer._encode(TEXT, True)
    assert not holds_the_lock(lambda: tokenizer.decode(ids))


@pytest.mark.parametrize("unit", ["<", "<SPECIAL_", "x", "<SPECIAL_7>"])
def test_the_search_for_special_tokens_leaves_the_lock_to_others(unit: str) -> None:
    spellings, text = Spellings(TOKENS), (unit * 1_000_000)[:1_000_000]
    assert not holds_the_lock(lambda: spellings.positions(text))


@pytest.mark.parametrize("unit", ["a" * 200 + START, END, "\ue000\uf8ff" + START])
def test_texts_that_spell_special_tokens_leave_the_lock_to_others(
    tokenizer: Tokenizer, unit: str
) -> None:
    text = (unit * 1_000_000)[:200_000]
    _, control, encoder = tokenizer._spelled

    def encode() -> None:
        escaper = SpecialTokenEscaper(text)
        encoder.encode(f"{START}user\n{escaper.escape(text, control)}{END}\n", escaper)

    assert not holds_the_lock(encode)


def test_long_lists_are_written_piece_by_piece() -> None:
    ids = list(range(1_000_000))
    assert not holds_the_lock(lambda: json_list(ids))
    assert json_list(ids[:10_000]) == json.dumps(ids[:10_000])
    assert json_list(["é", '"']) == json.dumps(["é", '"'])
    assert json_list([]) == "[]"
