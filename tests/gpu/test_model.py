"""What only a GPU can show: the model on real kernels, CUDA graphs, streams. Skipped where there is
none.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.tests.bench.engine import __main__
from tandem.tests.peers import IDENTITY
from tandem.tests.tiny import FAMILIES, STATEFUL, make_tiny_model
from tandem.tests.watermarks import WATERMARK
from tandem.tests.workers.model.helpers import Driver, load, mixed_steps, prompt, recorded_logits
from tandem.tests.workers.model.test_exact import NUM_TOKENS, cut, logits_by_position
from tandem.tests.workers.model.test_generation import ALL_KINDS, generate
from tandem.tests.workers.model.test_host_blocks import check_blocks_come_back
from tandem.tests.workers.model.test_kv import check_kv_moves
from tandem.tests.workers.spans import as_table, span
from tandem.workers.engine.config import Budgets, EngineConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import NewTokens
from tandem.workers.engine.plan import PENDING_TOKEN, SamplingParams, SequenceStep, StepPlan
from tandem.workers.engine.sequence import SequenceSpec, Task
from tandem.workers.kv_cache.layout import GPU_QUANTIZED, KvLayout
from tandem.workers.model.graphs import no_waiting
from tandem.workers.model.kv.store import PagedKv
from tandem.workers.model.runner import ModelRunner
from tandem.workers.model.sampling.gumbel import sample
from tandem.workers.tp.rank import RankConfig, load_rank

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture(scope="module", params=sorted(set(FAMILIES) - set(STATEFUL)))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


def engine_tokens(runner: ModelRunner, *, overlap: bool) -> dict[int, list[int]]:
    """What 12 sequences generate that come one by one, greedy and sampled, in chunks beside
    decodes.
    """
    config = EngineConfig(
        num_blocks=128,
        tables=runner.kv.tables,
        overlap=overlap,
        budgets=Budgets(chunk_tokens=48, mixed_chunk_tokens=20, max_sequences=8),
    )
    engine = Engine(runner, config)
    numbers = random.Random(3)
    tokens: dict[int, list[int]] = {number: [] for number in range(12)}
    pending = [
        SequenceSpec(
            id=number,
            task=Task.COLOCATED,
            tokens=tuple(prompt(numbers.randint(1, 90), number)),
            max_tokens=numbers.randint(1, 30),
            sampling=SamplingParams(
                temperature=number % 3 / 2, top_p=1 - number % 2 / 5, seed=number
            ),
            stop_ids=frozenset({5, 77}),
        )
        for number in tokens
    ]
    while pending or engine.has_work:
        if pending:
            engine.submit(pending.pop())
        for event in engine.step():
            if isinstance(event, NewTokens):
                tokens[event.id] += event.token_ids
    engine.check_integrity()
    return tokens


def test_tokens_are_those_of_the_cpu(folder: Path) -> None:
    expected = mixed_steps(load(folder, block_size=8))
    runner = load(folder, block_size=8, device="cuda")
    assert mixed_steps(runner) == expected
    runner.warmup()  # captures
    for each in runner.kv.tensors:
        each.fill_(torch.nan)
    runner.execute(StepPlan(sequences=(), dropped=(1, 2, 3)))
    assert mixed_steps(runner) == expected
    assert runner.num_graph_replays() > 0


@pytest.mark.parametrize("cache_dtype", GPU_QUANTIZED)
def test_tokens_over_a_quantized_cache_are_those_of_the_cpu(folder: Path, cache_dtype: str) -> None:
    expected = mixed_steps(load(folder, cache_dtype=cache_dtype))
    runner = load(folder, cache_dtype=cache_dtype, device="cuda")
    runner.warmup()
    assert mixed_steps(runner) == expected
    assert runner.num_graph_replays() > 0


def test_weights_in_fp8_give_logits_near_those_of_bfloat16(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for quantization in (None, "fp8"):
        runner = load(folder, dtype="bfloat16", device="cuda", quantization=quantization)
        driver = Driver(runner)
        with recorded_logits(monkeypatch) as recorded:
            driver.run(driver.step(0, prompt(100), 0))
        found.append(recorded[0][0].float())
        runner.warmup()  # captures
        step = driver.step(0, [5], 100)
        with no_waiting():
            runner.launch(StepPlan(sequences=(step,), dropped=()))
        assert runner.num_graph_replays() == 1
    plain, rounded = (logits - logits.mean() for logits in found)
    assert 0 < (rounded - plain).norm() <= 0.2 * plain.norm()


def test_an_engine_that_overlaps_gives_the_tokens_of_one_that_does_not(folder: Path) -> None:
    runner = load(folder, device="cuda")
    runner.warmup()
    expected = engine_tokens(load(folder), overlap=False)
    assert engine_tokens(runner, overlap=True) == expected
    assert engine_tokens(runner, overlap=False) == expected
    assert runner.num_graph_replays() > 0


EVERYTHING = SamplingParams(
    top_k=9,
    typical_p=0.9,
    repetition_penalty=1.3,
    frequency_penalty=0.5,
    logit_bias=((3, 2.0),),
    bad_words=((4,), (5, 6)),
    watermark=WATERMARK,
    stop_ids=(1,),
    min_length=35,
    logprobs=3,
    prompt_logprobs=2,
)


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(temperature=0.0), SamplingParams(top_k=9, top_p=0.8, seed=1), EVERYTHING],
)
def test_a_launch_waits_for_nothing(folder: Path, sampling: SamplingParams) -> None:
    runner = load(folder, device="cuda")
    runner.warmup()
    driver = Driver(runner)
    driver.generate(9, prompt(20), 3, sampling)  # whatever is done at first use

    def launch(*steps: SequenceStep) -> None:
        with no_waiting():
            collects.append(runner.launch(StepPlan(sequences=steps, dropped=())))

    collects: list[object] = []
    launch(driver.step(1, prompt(30), 0, sampling))
    launch(driver.step(1, [PENDING_TOKEN], 30), driver.step(2, prompt(40), 0, sampling))
    for at in range(31, 40):
        launch(driver.step(1, [PENDING_TOKEN], at), driver.step(2, [PENDING_TOKEN], at + 9))
    assert len(collects) == 11
    assert runner.num_graph_replays() > 0


def test_every_feature_gives_the_tokens_of_the_cpu(folder: Path) -> None:
    prompts = [prompt(7 + 9 * row, row) for row in range(len(ALL_KINDS))]
    expected = generate(Driver(load(folder, num_blocks=256)), prompts, ALL_KINDS, 24)
    runner = load(folder, num_blocks=256, device="cuda")
    runner.warmup()
    for ours, theirs in zip(
        generate(Driver(runner), prompts, ALL_KINDS, 24), expected, strict=True
    ):
        assert ours[0] == theirs[0]
        for place in (1, 2):
            values = [one.logprob for one in theirs[place]]
            assert [one.logprob for one in ours[place]] == pytest.approx(values, abs=1e-2)
    assert runner.num_graph_replays() > 0


def test_the_sampler_draws_the_tokens_of_the_cpu() -> None:
    """256 rows of a large vocabulary, of each kind, without a wait; near ties may differ."""
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=50, top_p=0.95, min_p=0.01, temperature=1.3),
    ]
    params = [replace(kinds[row % 4], seed=row) for row in range(256)]
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(256, 128_256, generator=generator)).bfloat16()
    on_gpu = logits.cuda()
    sample(on_gpu, params, range(256))  # compiles
    with no_waiting():
        tokens = sample(on_gpu, params, range(256))
        again = sample(on_gpu, params, range(256))
    assert torch.equal(tokens, again)
    assert int((tokens.cpu() != sample(logits, params, range(256))).sum()) <= 2


def test_whoever_collects_a_step_without_tokens_has_waited_for_it(folder: Path) -> None:
    """Others hear then that its KV cache may be read."""
    runner = load(folder, device="cuda")
    driver = Driver(runner)
    driver.generate(9, prompt(20), 3)
    chunks = [driver.step(1, prompt(600)[at : at + 150], at) for at in range(0, 600, 150)]
    collects = [
        runner.launch(StepPlan(sequences=(replace(step, num_samples=0),), dropped=()))
        for step in chunks
    ]
    for collect in collects:
        assert collect().tokens == []
    assert torch.cuda.current_stream().query()


@pytest.mark.parametrize("cache_dtype", ["auto", *GPU_QUANTIZED])
async def test_kv_cache_moves_to_and_from_a_gpu_unchanged(folder: Path, cache_dtype: str) -> None:
    gpu = load(folder, device="cuda", block_size=16, cache_dtype=cache_dtype)
    cpu = load(folder, block_size=4, cache_dtype=cache_dtype)
    whole = Driver(load(folder, cache_dtype=cache_dtype)).generate(1, prompt(37), 10)
    for source, target in ((gpu, cpu), (cpu, gpu)):
        await check_kv_moves(source, target, whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_kv_slots_of_a_gpu_are_those_of_the_cpu(dtype: str) -> None:
    layout = KvLayout.uniform(
        num_layers=2, num_heads=8, num_kv_heads=4, head_dim=16, dtype=dtype, model="m"
    )
    gpu, cpu = (
        PagedKv(layout, num_blocks=9, block_size=5, device=torch.device(name), tp=2, rank=1)
        for name in ("cuda", "cpu")
    )
    cpu.data.view(torch.uint8).random_(0, 256)
    gpu.data.copy_(cpu.data)
    table = as_table((7, 0, 3))
    for slots in (range(1), range(1, 2), range(2)):
        part = replace(span(cpu, 3, 11, 1, 1), first_slot=slots.start, num_slots=len(slots))
        data = await cpu.read(table, part)
        assert await gpu.read(table, part) == data
        for kv in (gpu, cpu):
            kv.write(as_table((4, 8, 6)), part, data)
            torch.cuda.synchronize()  # a copy outside of steps has no order with writes
            kv.copy(((4, 1), (6, 5)))
        assert gpu.data.cpu().view(torch.uint8).equal(cpu.data.view(torch.uint8))


@pytest.mark.parametrize("captured", [False, True])
def test_logits_depend_on_the_tokens_alone_if_that_is_asked_for(
    folder: Path, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(folder, dtype="bfloat16", device="cuda", batch_invariant=True)
    if captured:
        runner.warmup()
    decoded = logits_by_position(runner, list(range(NUM_TOKENS + 1)), 0, monkeypatch)
    for seed, num_mates in enumerate((0, 3, 20)):
        mixed = logits_by_position(
            runner, cut(NUM_TOKENS, random.Random(seed)), num_mates, monkeypatch
        )
        for end, logits in mixed.items():
            assert torch.equal(logits, decoded[end]), (seed, end)
    assert (runner.num_graph_replays() > 0) == captured


def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "--shape tiny --random-weights --device cuda --batches 1,3,16 --prompts 40,600 --context "
        "300"
    )
    assert __main__.main(arguments.split()) == 0
    assert "roofline" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_come_back_from_host_memory(dtype: str) -> None:
    check_blocks_come_back("cuda", dtype)


def test_the_kv_cache_takes_the_rest_of_a_part_of_the_gpu(tmp_path: Path) -> None:
    """Half of half of the memory, all of which is taken after the largest steps ran again."""
    config = RankConfig(
        model=str(make_tiny_model(tmp_path)),
        identity=IDENTITY,
        device="cuda",
        kv_cache_bytes=None,
        memory_share=0.5,
        memory_utilization=0.5,
    )
    try:
        rank = load_rank(config)
        _, total = torch.cuda.mem_get_info()
        assert rank.num_blocks > 0
        assert 0.9 * total / 4 - 2**30 < torch.cuda.memory_reserved() <= total / 4
        with pytest.raises(ValueError, match="kv_cache_gb: must be at most"):
            load_rank(replace(config, kv_cache_bytes=total))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
