"""The model on the kernels of the GPU path, which Triton interprets here: the same plans, the same
tokens.
"""

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.tests.tiny import DENSE, make_tiny_model
from tandem.tests.tiny_decoders import make_tiny_decoder
from tandem.tests.workers.model.helpers import (
    Driver,
    load,
    mixed_steps,
    multiply_row_by_row,
    prompt,
)
from tandem.tests.workers.model.test_exact import cut, logits_by_position
from tandem.tests.workers.model.test_generation import ALL_KINDS, generate
from tandem.workers.engine.plan import (
    PENDING_TOKEN,
    Samples,
    SamplingParams,
    SequenceStep,
    StepPlan,
)
from tandem.workers.model import graphs, kernels
from tandem.workers.model.attention import triton_backend
from tandem.workers.model.kernels.triton import elementwise as gpu
from tandem.workers.model.runner import ModelRunner
from tandem.workers.model.warmup import StepLimits

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu does it on the GPU itself"
)

SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=7)
ONE_LAYER: dict[str, Any] = {
    "num_hidden_layers": 1
}  # where it is about what comes before and after the layers


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "of", lambda tensor: gpu)


@pytest.fixture(params=[*DENSE, "olmo2", "gemma2", "gpt_oss"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Of the families those that differ in what their kernels are asked for.

    One layer, but for those whose layers differ.
    """
    layer_types = ["sliding_attention", "full_attention"]
    alternating: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": layer_types}
    sizes = alternating if request.param in ("gemma2", "gpt_oss") else ONE_LAYER
    return make_tiny_model(tmp_path, request.param, **sizes)


def record(launch: graphs.Launch) -> tuple[Callable[[], object], torch.Tensor]:
    """Stands for a CUDA graph: a replay writes what it computes from the same addresses to the same
    address.
    """
    logits = launch()
    return lambda: logits.copy_(launch()), logits


def test_tokens_are_those_of_the_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = mixed_steps(load(folder, block_size=8))
    monkeypatch.setattr(kernels, "of", lambda tensor: gpu)
    runner = load(folder, block_size=8)
    for each in runner.kv.tensors:
        each.fill_(torch.nan)  # what the last owner of a block left
    assert mixed_steps(runner) == expected


def test_replayed_steps_give_the_same_tokens(tmp_path: Path, on_gpu: None) -> None:
    """Padded batches of 2 and 4, a batch of 5 that has no graph, and mixed steps between them."""
    folder = make_tiny_model(tmp_path, **ONE_LAYER)
    expected = mixed_steps(load(folder))
    runner = load(folder)
    replays = 0
    buffers = set()

    def counting(launch: graphs.Launch) -> tuple[Callable[[], object], torch.Tensor]:
        replay, logits = record(launch)
        buffers.add(logits.data_ptr())

        def count() -> None:
            nonlocal replays
            replays += 1
            replay()

        return count, logits

    runner.capture_graphs(counting, (4, 2))
    assert mixed_steps(runner) == expected
    assert replays == 3
    assert len(buffers) == 1  # all sizes share the logits of the largest


def test_a_graph_of_learned_positions_takes_rows_without_a_sequence(
    tmp_path: Path, on_gpu: None
) -> None:
    """An embedding on a GPU ends the process at an index outside its table."""
    folder = make_tiny_decoder(tmp_path, "gpt2")
    expected = Driver(load(folder)).generate(1, prompt(9), 4)
    runner = load(folder)
    runner.capture_graphs(record, (2,))
    assert Driver(runner).generate(1, prompt(9), 4) == expected


def test_a_step_without_room_in_the_graph_runs_without(
    tmp_path: Path, on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path)
    expected = Driver(load(folder)).generate(1, prompt(30), 4)
    monkeypatch.setattr(triton_backend, "graph_capacity", lambda *sizes: (8, 1))
    runner = load(folder)
    runner.capture_graphs(record, (1,))
    assert Driver(runner).generate(1, prompt(30), 4) == expected


def test_a_failed_capture_leaves_eager_steps(
    tmp_path: Path,
    on_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in code that waits for the device: the start goes on with one warning."""
    folder = make_tiny_model(tmp_path, **ONE_LAYER)
    expected = Driver(load(folder)).generate(1, prompt(9), 4)
    captured: list[torch.Tensor] = []

    def fail(launch: graphs.Launch) -> tuple[Callable[[], object], torch.Tensor]:
        if len(captured) == 2:
            raise RuntimeError("CUDA error: operation not permitted\nCompile with ...")
        captured.append(launch())
        return (lambda: None), captured[-1]

    monkeypatch.setattr(ModelRunner, "launches_ahead", property(lambda _: True))
    monkeypatch.setattr(graphs, "cuda_capture", lambda: fail)
    runner = load(folder, num_blocks=8)
    runner.warmup(StepLimits(num_tokens=16, num_rows=4))
    (line,) = caplog.messages
    assert line == "CUDA graphs are off and steps run eagerly: CUDA error: operation not permitted"
    assert Driver(runner).generate(1, prompt(9), 4) == expected
    assert len(captured) == 2
    assert runner.num_graph_replays() == 0


def test_code_that_waits_for_the_device_is_found_before_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A capture that fails leaves torch's allocator capturing for the life of the process."""
    modes = ["default"]
    captures: list[object] = []

    class Graph:
        def replay(self) -> None: ...

    def begin(graph: object, pool: object, capture_error_mode: str) -> nullcontext[None]:
        assert (modes[-1], capture_error_mode) == ("default", "thread_local")
        captures.append(graph)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", begin)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    capture = graphs.cuda_capture()

    def wait() -> torch.Tensor:
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="synchronizing"):
        capture(wait)
    assert (modes[-1], captures) == ("default", [])
    _, result = capture(lambda: torch.ones(1))
    assert result.item() == 1
    assert len(captures) == 1


@pytest.mark.parametrize("captured", [False, True])
def test_pending_tokens_never_leave_the_device(
    tmp_path: Path, on_gpu: None, captured: bool
) -> None:
    """The next step is launched before the tokens of the last are collected; one more sequence
    joins meanwhile.
    """
    folder = make_tiny_model(tmp_path, **ONE_LAYER)
    driver = Driver(load(folder))
    expected = [driver.generate(1, prompt(20), 6), driver.generate(2, prompt(9), 5, SAMPLED)]

    runner = load(folder)
    if captured:
        runner.capture_graphs(record, (2, 1))
    driver = Driver(runner)

    def launch(*steps: SequenceStep) -> Callable[[], Samples]:
        return runner.launch(StepPlan(sequences=steps, dropped=()))

    collects = [launch(driver.step(1, prompt(20), 0))]
    collects.append(
        launch(driver.step(2, prompt(9), 0, SAMPLED), driver.step(1, [PENDING_TOKEN], 20))
    )
    for index in range(4):
        steps = (
            driver.step(1, [PENDING_TOKEN], 21 + index),
            driver.step(2, [PENDING_TOKEN], 9 + index),
        )
        collects.append(launch(*(steps if index % 2 else steps[::-1])))
    tokens = [collect().tokens for collect in collects]
    assert [
        tokens[0][0],
        tokens[1][1],
        *(step[index % 2 == 0] for index, step in enumerate(tokens[2:])),
    ] == expected[0]
    assert [tokens[1][0], *(step[index % 2] for index, step in enumerate(tokens[2:]))] == expected[
        1
    ]


@pytest.mark.parametrize("captured", [False, True])
def test_every_feature_gives_the_tokens_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    folder = make_tiny_model(tmp_path, **ONE_LAYER)
    prompts = [prompt(3 + 2 * row, row) for row in range(len(ALL_KINDS))]
    expected = generate(Driver(load(folder)), prompts, ALL_KINDS, 4)
    monkeypatch.setattr(kernels, "of", lambda tensor: gpu)
    runner = load(folder)
    if captured:
        runner.capture_graphs(record, (8, 4))
    for ours, theirs in zip(generate(Driver(runner), prompts, ALL_KINDS, 4), expected, strict=True):
        assert ours[0] == theirs[0]
        for place in (1, 2):
            values = [one.logprob for one in theirs[place]]
            assert [one.logprob for one in ours[place]] == pytest.approx(values, abs=1e-3)
    assert (runner.num_graph_replays() > 0) == captured


def test_logits_depend_on_the_tokens_alone_if_that_is_asked_for(
    tmp_path: Path, on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In replayed steps and in others. Otherwise single tokens differ from chunks."""
    multiply_row_by_row(monkeypatch)
    folder = make_tiny_model(tmp_path, **ONE_LAYER)
    are_equal = []
    for batch_invariant in (True, False):
        runner = load(folder, batch_invariant=batch_invariant)
        runner.capture_graphs(record, (2,))
        decoded = logits_by_position(runner, list(range(19)), 0, monkeypatch)
        mixed = logits_by_position(runner, cut(18, random.Random(1)), 2, monkeypatch)
        are_equal.append(all(torch.equal(logits, decoded[end]) for end, logits in mixed.items()))
        assert runner.num_graph_replays() > 0
    assert are_equal == [True, False]
