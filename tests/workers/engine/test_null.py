"""An engine on an executor that computes nothing."""

import time

import pytest

from tandem.tests.workers.engine.drive import PROMPT, spec
from tandem.tests.workers.engine.null import NullExecutor
from tandem.tests.workers.spans import read_now, span
from tandem.workers.engine.config import EngineConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import NewTokens


def test_tokens_roll_over_all_sequences() -> None:
    engine = Engine(NullExecutor(vocab_size=5), EngineConfig(num_blocks=16, block_size=4))
    engine.submit(spec(1, max_tokens=4))
    engine.submit(spec(2, max_tokens=3, num_choices=2))
    tokens = []
    while engine.has_work:
        tokens += [
            token
            for event in engine.step()
            if isinstance(event, NewTokens)
            for token in event.token_ids
        ]
    assert tokens == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    engine.check_integrity()


def test_a_step_takes_its_step_seconds() -> None:
    engine = Engine(NullExecutor(step_seconds=0.05), EngineConfig(num_blocks=16, block_size=4))
    engine.submit(spec(1, PROMPT, max_tokens=3))
    begin = time.perf_counter()
    while engine.has_work:
        engine.step()
    assert time.perf_counter() - begin >= 0.15
    assert 0.05 <= engine.step_seconds < 60  # a stalled machine adds seconds


def test_its_cache_is_zeros_of_the_right_size() -> None:
    kv = NullExecutor().kv
    part = span(kv, 3, 5)
    data = read_now(kv, (0, 1), part)
    assert bytes(data) == bytes(part.size(kv.layout))
    assert len(data) > 0
    kv.write((0, 1), part, data)
    with pytest.raises(ValueError, match="bytes"):
        kv.write((0, 1), part, data[1:])
    with pytest.raises(ValueError, match="layers"):
        read_now(kv, (0, 1), span(kv, 3, 5, 0, 2))
