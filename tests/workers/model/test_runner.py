from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.tests.imported import imported
from tandem.tests.peers import IDENTITY
from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_decoders import make_tiny_decoder
from tandem.tests.workers.model.helpers import GREEDY, Driver, load, prompt
from tandem.tests.workers.spans import as_table, read_now, span
from tandem.workers.engine.plan import SamplingParams, SequenceStep, StepPlan
from tandem.workers.kv_cache.tables import TableBlocks, TableSpec
from tandem.workers.model.device import enter_device
from tandem.workers.model.footprint import kv_bytes_per_token
from tandem.workers.model.loader import open_checkpoint
from tandem.workers.model.runner import ModelRunner
from tandem.workers.model.sampling.filters import has_filter
from tandem.workers.model.warmup import StepLimits, largest_steps
from tandem.workers.tp.rank import RankConfig, enter_engine_thread

SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=2**64 - 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


def test_only_sequences_with_sample_answer_in_order(folder: Path) -> None:
    runner = load(folder)
    alone = [
        Driver(runner, seed=index).generate(index, prompt(20, index), 1)[0] for index in range(3)
    ]

    def step(index: int, sample: bool) -> SequenceStep:
        return SequenceStep(
            sequence_id=index,
            token_ids=tuple(prompt(20, index)),
            start=0,
            new_blocks=(TableBlocks((2 * index, 2 * index + 1)),),
            sampling=SamplingParams(temperature=0.0),
            num_samples=int(sample),
        )

    def run(*steps: SequenceStep) -> list[int]:
        return runner.execute(StepPlan(sequences=steps, dropped=()))

    assert run(step(2, True), step(0, False), step(1, True)) == [alone[2], alone[1]]
    assert run(step(0, False)) == []
    assert run() == []


def test_same_seed_same_tokens_alone_and_in_a_batch(folder: Path) -> None:
    runner = load(folder, num_blocks=256)
    driver = Driver(runner)
    prompts = [prompt(5 + 7 * index, index) for index in range(16)]
    params = [
        SamplingParams(temperature=0.5 + 0.1 * index, seed=2**64 - 1 - index) for index in range(16)
    ]
    alone = [
        driver.generate(100 + i, ids, 12, p)
        for i, (ids, p) in enumerate(zip(prompts, params, strict=True))
    ]

    driver = Driver(runner, seed=1)
    tokens = [
        [token]
        for token in driver.run(*(driver.step(i, prompts[i], 0, params[i]) for i in range(16)))
    ]
    for _ in range(11):
        starts = [len(ids) + len(new) - 1 for ids, new in zip(prompts, tokens, strict=True)]
        sampled = driver.run(*(driver.step(i, tokens[i][-1:], starts[i]) for i in range(16)))
        for new, token in zip(tokens, sampled, strict=True):
            new.append(token)
    assert tokens == alone


def test_a_dropped_id_starts_afresh(folder: Path) -> None:
    driver = Driver(load(folder))
    first = driver.generate(1, prompt(40), 8)
    driver.drop(1)
    other = driver.generate(1, prompt(23, seed=9), 8, SAMPLED)
    driver.drop(1)
    assert driver.generate(1, prompt(40), 8) == first
    assert other != first
    driver.drop(1)
    with pytest.raises(KeyError):
        driver.run(
            SequenceStep(
                sequence_id=1, token_ids=(5,), start=48, new_blocks=(), sampling=None, num_samples=1
            )
        )
    assert driver.run(dropped=[1, 2, 3]) == []


def test_a_sequence_can_move_to_another_runner(folder: Path) -> None:
    """What disaggregation does: prefill here, copy the KV cache to other blocks of another size,
    decode there.
    """
    whole = Driver(load(folder)).generate(1, prompt(37), 10, SAMPLED)

    prefill, decode = (
        Driver(load(folder, block_size=16)),
        Driver(load(folder, block_size=4), seed=4),
    )
    tokens = prefill.run(prefill.step(1, prompt(37), 0, SAMPLED))
    step = decode.step(1, [*prompt(37), tokens[0]], 0, SAMPLED)
    part = span(prefill.runner.kv, 0, 37)
    decode.runner.kv.write(
        as_table(decode.tables[1]), part, read_now(prefill.runner.kv, prefill.tables[1], part)
    )
    joined = SequenceStep(
        sequence_id=1,
        token_ids=(tokens[0],),
        start=37,
        new_blocks=step.new_blocks,
        sampling=SAMPLED,
        num_samples=1,
    )
    tokens += decode.run(joined)
    while len(tokens) < 10:
        tokens += decode.run(decode.step(1, tokens[-1:], 37 + len(tokens) - 1))
    assert tokens == whole


def test_what_the_last_owner_of_a_block_left_does_not_matter(folder: Path) -> None:
    clean, poisoned = Driver(load(folder, block_size=8)), Driver(load(folder, block_size=8))
    poisoned.runner.kv.data.fill_(torch.nan)
    for index, num_tokens in enumerate((1, 7, 8, 21)):
        expected = clean.generate(index, prompt(num_tokens), 12)
        assert poisoned.generate(index, prompt(num_tokens), 12) == expected

    # A sequence whose first tokens were computed elsewhere, up to the middle of a block.
    expected = clean.run(clean.step(8, prompt(21), 0))
    blocks = tuple(poisoned.free[:3])
    part = span(clean.runner.kv, 0, 20)
    poisoned.runner.kv.write(
        as_table(blocks), part, read_now(clean.runner.kv, clean.tables[8], part)
    )
    joined = SequenceStep(
        sequence_id=8,
        token_ids=(prompt(21)[20],),
        start=20,
        new_blocks=(TableBlocks(blocks),),
        sampling=GREEDY,
        num_samples=1,
    )
    assert poisoned.run(joined) == expected


def test_warmup_leaves_nothing_behind(folder: Path) -> None:
    runner = load(folder)
    expected = Driver(runner).generate(1, prompt(30), 4)
    warm = load(folder)
    warm.warmup()
    assert Driver(warm).generate(1, prompt(30), 4) == expected
    with pytest.raises(KeyError):
        warm.execute(
            StepPlan(
                sequences=(
                    SequenceStep(
                        sequence_id=-1,
                        token_ids=(1,),
                        start=1,
                        new_blocks=(),
                        sampling=None,
                        num_samples=1,
                    ),
                ),
                dropped=(),
            )
        )


def warmup_of_a_gpu(
    runner: ModelRunner, limits: StepLimits, monkeypatch: pytest.MonkeyPatch
) -> list[StepPlan]:
    """Warms up as on a GPU; returns the steps that had sequences."""
    monkeypatch.setattr(ModelRunner, "launches_ahead", property(lambda _: True))
    launched: list[StepPlan] = []
    launch = runner.launch

    def record(plan: StepPlan, *rest: Any) -> Any:
        launched.append(plan)
        return launch(plan, *rest)

    monkeypatch.setattr(runner, "launch", record)
    runner.warmup(limits)
    return [plan for plan in launched if plan.sequences]


def test_warmup_on_a_gpu_takes_the_largest_steps_and_every_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk, single tokens, and greedy, random and filtered sampling; then all rows at once."""
    runner = load(folder, num_blocks=200)
    launched = warmup_of_a_gpu(runner, StepLimits(num_tokens=512, num_rows=9), monkeypatch)
    assert {(plan.num_tokens, len(plan.sequences)) for plan in launched} == {
        (512, 1),
        (1, 1),
        (512, 9),
        (9, 9),
    }
    kinds = [plan.sequences[0].sampling for plan in launched if plan.num_tokens == 512]
    assert {(kind.temperature > 0, has_filter(kind)) for kind in kinds if kind} == {
        *((False, False), (True, False), (True, True))
    }
    assert any(kind.needs_history and kind.logprobs and kind.top_p < 1 for kind in kinds if kind)
    small = load(folder, num_blocks=3)
    small.warmup()  # no more than its memory holds


@pytest.mark.parametrize(("of_model", "of_service"), [(24, None), (200, 24)])
def test_warmup_on_a_gpu_stays_within_the_context(
    tmp_path: Path, of_model: int, of_service: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A position that the model has not learned raises here; on a GPU it ends the process."""
    folder = make_tiny_decoder(tmp_path, "gpt2", max_position_embeddings=of_model)
    runner = load(folder, num_blocks=200, context_tokens=of_service)
    launched = warmup_of_a_gpu(runner, StepLimits(num_tokens=64, num_rows=9), monkeypatch)
    assert {(plan.num_tokens, len(plan.sequences)) for plan in launched} == {
        (24, 1),
        (1, 1),
        (64, 9),
        (9, 9),
    }


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 100))
def test_the_largest_step_has_all_tokens_in_prompts_within_the_context(
    num_tokens: int, num_rows: int, context: int
) -> None:
    limits = StepLimits(num_tokens=num_tokens, num_rows=num_rows)
    first = next(largest_steps(limits, context, (TableSpec(block_size=16),)))
    lengths = [len(step.token_ids) for step in first.sequences]
    assert len(lengths) == num_rows
    assert 1 <= min(lengths) <= max(lengths) <= context
    assert sum(lengths) == max(num_rows, min(num_tokens, num_rows * context))


def test_each_thread_that_uses_a_gpu_makes_it_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", entered.append)
    for name in ("cpu", "cuda", "cuda:1"):
        enter_device(name)
        enter_engine_thread(RankConfig(model="m", identity=IDENTITY, device=name))
    assert entered == [torch.device("cuda:1")] * 2


def test_loading_makes_the_gpu_the_thread_s_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[object] = []
    monkeypatch.setattr("tandem.workers.model.loader.enter_device", entered.append)
    load(folder)
    assert entered == ["cpu"]


def test_kv_bytes_per_token_are_what_the_pool_takes(folder: Path) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        runner = ModelRunner.load(
            open_checkpoint(folder), dtype=dtype, device="cpu", num_blocks=9, block_size=5
        )
        assert 9 * 5 * kv_bytes_per_token(runner.config, 1, dtype) == runner.kv.data.nbytes
        assert runner.kv.layout.dtype == dtype


def test_import_needs_neither_ray_nor_grpc() -> None:
    found = imported("import tandem.workers.model.runner")
    assert not {"grpc", "ray", "transformers"} & found


def test_loading_imports_no_compiler_of_torch(folder: Path) -> None:
    """That import takes more than a second of each start."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tandem.workers.model.loader import open_checkpoint\n"
        "from tandem.workers.model.runner import ModelRunner\n"
        "checkpoint = open_checkpoint(Path(sys.argv[1]))\n"
        "ModelRunner.load(checkpoint, dtype='float32', device='cpu', num_blocks=9, block_size=5)\n"
    )
    assert "torch._dynamo" not in imported(code, str(folder))


def test_the_folder_checks_import_no_torch() -> None:
    assert "torch" not in imported("import tandem.workers.model.checkpoint")
