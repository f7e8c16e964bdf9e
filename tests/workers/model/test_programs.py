"""Whole steps as one native call: the very logits of the same kernels called one by one."""

import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies

from tandem.tests.tiny import DENSE, make_tiny_model
from tandem.tests.workers.model.helpers import Driver, load, prompt, recorded_logits
from tandem.workers.model.kernels.c import cpu
from tandem.workers.model.kernels.c.calls import Recorder, _Buffer, _distance, _place
from tandem.workers.model.runner import ModelRunner

BATCHES = (1, 2, 7, 40)

pytestmark = pytest.mark.skipif(
    not cpu.can_multiply(torch.zeros(32, 32, dtype=torch.bfloat16)),
    reason="no product of our own with AMX",
)


@pytest.fixture(params=DENSE)
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> ModelRunner:
    """Heads of 64, for which there are kernels of chunks; so many layers that memory is used
    again.
    """
    sizes: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 6} | (
        {} if request.param == "qwen2" else {"head_dim": 64}
    )
    return load(make_tiny_model(tmp_path, request.param, **sizes), dtype="bfloat16")


@pytest.fixture(params=[1, 2, 9])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Nine are more than most machines have cores: then most of a team is preempted, often within a
    chunk.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def step_logits(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, *, recorded: bool
) -> list[torch.Tensor]:
    """Prefills and decodes batches of several sizes for some steps; returns the logits of each."""
    driver = Driver(runner)
    with recorded_logits(monkeypatch) as logits, monkeypatch.context() as patch:
        if not recorded:
            patch.setattr(runner, "_decode_program", None)
            patch.setattr(runner, "_token_program", None)
        for batch in BATCHES:
            prompts = [prompt(1 + 7 * (index % 3), index) for index in range(batch)]
            tokens = driver.run(
                *(driver.step(index, each, 0) for index, each in enumerate(prompts))
            )
            for position in range(6):
                rows = enumerate(tokens)
                steps = [
                    driver.step(index, [token], len(prompts[index]) + position)
                    for index, token in rows
                ]
                tokens = driver.run(*steps)
            for index in range(batch):
                driver.drop(index)
    return logits


def test_logits_are_those_of_single_calls(
    runner: ModelRunner, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runner._decode_program is not None
    assert runner._token_program is not None
    expected = step_logits(runner, monkeypatch, recorded=False)
    for ours, theirs in zip(step_logits(runner, monkeypatch, recorded=True), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_they_are_so_from_any_thread_and_beside_busy_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every caller gets a team of its own; busy threads take its members off their cores."""
    runner = load(make_tiny_model(tmp_path), dtype="bfloat16")
    expected = step_logits(runner, monkeypatch, recorded=False)
    stop = threading.Event()

    def burn() -> None:
        x = torch.randn(256, 256)
        while not stop.is_set():
            x @ x  # without the interpreter's lock

    busy = [threading.Thread(target=burn) for _ in range(3)]
    results: list[list[torch.Tensor]] = []
    for thread in busy:
        thread.start()
    try:
        for _ in range(4):
            caller = threading.Thread(
                target=lambda: results.append(step_logits(runner, monkeypatch, recorded=True))
            )
            caller.start()
            caller.join()
    finally:
        stop.set()
        for thread in busy:
            thread.join()
    assert len(results) == 4
    for result in results:
        assert all(map(torch.equal, result, expected))


def test_a_model_with_other_operations_is_not_recorded(tmp_path: Path) -> None:
    """In float32 torch multiplies."""
    assert load(make_tiny_model(tmp_path))._decode_program is None


def test_nothing_that_computes_is_left_out() -> None:
    x, weight = torch.ones(2, 32), torch.ones(32)
    with pytest.raises(NotImplementedError, match=r"aten\.add"), Recorder():
        x + x
    with Recorder() as recorder:
        y = cpu.rms_norm(x.view(2, 32), weight, 0.0)
    program = recorder.program(y, 2)
    program.run(2)
    assert torch.equal(program.result, x)


def test_a_program_is_freed_with_its_last_name() -> None:
    x = torch.ones(2, 32)
    with Recorder() as recorder:
        y = cpu.silu_mul(x)
    program = recorder.program(y, 2)
    gone = weakref.ref(program)
    program.run(1)
    assert torch.isclose(program.result[0, 0], torch.nn.functional.silu(x[0, 0]))
    del program
    gc.collect()
    assert gone() is None


def test_an_id_outside_of_the_table_reads_nothing_else() -> None:
    table = torch.arange(6.0).view(3, 2)
    assert cpu.gather(
        table, torch.tensor([0, 2, 3, -1, 2**31 - 1], dtype=torch.int32)
    ).tolist() == [
        [0, 1],
        *[[4, 5]] * 4,
    ]


@given(data=strategies.data())
def test_memory_is_used_again_only_after_the_distance(data: strategies.DataObject) -> None:
    num_calls = data.draw(strategies.integers(1, 30))
    buffers: list[_Buffer] = []
    for first in range(num_calls):
        for _ in range(data.draw(strategies.integers(0, 2))):
            last = data.draw(strategies.integers(first, num_calls - 1))
            buffers.append((data.draw(strategies.integers(1, 5)) * 64, first, last))
    distance = data.draw(strategies.integers(1, num_calls))
    placed = list(zip(_place(buffers, distance), buffers, strict=True))
    for (offset, one), (start, other) in itertools.combinations(placed, 2):
        if offset < start + other[0] and start < offset + one[0]:
            assert other[1] - one[2] >= distance, "the one allocated later comes later"
            assert 0 < _distance(other[1], placed, num_calls) <= other[1] - one[2]
    for _, (_, first, last) in placed:
        assert 0 < _distance(first, placed, num_calls) <= num_calls - last + first
