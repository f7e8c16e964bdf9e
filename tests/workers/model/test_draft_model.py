"""A draft model's proposals on real models: the tokens of plain decoding for every way to sample,
in fewer steps where the draft model is alike, whatever it has computed of a sequence.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.config import load_config
from tandem.cluster.store.checked import checked_folder
from tandem.proto.errors import InvalidArgument
from tandem.tests.peers import IDENTITY
from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_decoders import make_tiny_decoder
from tandem.tests.workers.model.helpers import GREEDY, load, prompt
from tandem.tests.workers.model.test_drafts import KINDS, NUM_TOKENS, Made, is_exact
from tandem.workers.engine.config import Budgets, EngineConfig, SpeculativeConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import Admitted, NewTokens, Preempted, Suspended
from tandem.workers.engine.plan import DraftRequest, Executor, SamplingParams
from tandem.workers.engine.sequence import SequenceSpec, Task
from tandem.workers.model.runner import ModelRunner
from tandem.workers.tp.draft_model import DraftingExecutor
from tandem.workers.tp.rank import RankConfig, load_rank

CONFIG = SpeculativeConfig(model="draft", max_step_tokens=256)


def make_engine(
    executor: Executor,
    speculative: SpeculativeConfig | None = CONFIG,
    num_blocks: int = 256,
    **config: Any,
) -> Engine:
    budgets = Budgets(
        chunk_tokens=48, mixed_chunk_tokens=16, speculative=speculative, growth_tokens=16
    )
    return Engine(
        executor, EngineConfig(num_blocks=num_blocks, block_size=16, budgets=budgets, **config)
    )


def generate(
    executor: Executor,
    prompts: Sequence[Sequence[int]],
    kinds: Sequence[SamplingParams],
    speculative: SpeculativeConfig | None = CONFIG,
    seen: Counter[str] | None = None,
    **config: Any,
) -> tuple[list[Made], Engine]:
    """Of all sequences together. A preempted one is submitted again with what it has made, as a
    router does it. `seen` counts preemptions and prompt tokens that were there already.
    """
    engine, seen = make_engine(executor, speculative, **config), Counter() if seen is None else seen
    made: list[Made] = [([], [], []) for _ in kinds]

    def submit(row: int, number: int) -> None:
        tokens = (*prompts[row], *made[row][0])
        rest = NUM_TOKENS - len(made[row][0])
        spec = SequenceSpec(
            id=number,
            task=Task.COLOCATED,
            tokens=tokens,
            first_index=NUM_TOKENS - rest,
            max_tokens=rest,
            sampling=kinds[row],
        )
        engine.submit(spec)

    for row in range(len(kinds)):
        submit(row, row)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, NewTokens):
                row = event.id % len(kinds)
                made[row][0].extend(event.token_ids)
                made[row][1].extend(event.logprobs)
                made[row][2].extend(event.prompt_logprobs)
            elif isinstance(event, Admitted):
                seen += Counter(cached=event.num_cached, restored=event.num_loaded)
            elif isinstance(event, Preempted):
                seen["preempted"] += 1
                submit(event.id % len(kinds), event.id + len(kinds))
    engine.check_integrity()
    assert not engine.requests.sequences
    return made, engine


def tokens_of(made: Sequence[Made]) -> list[list[int]]:
    return [tokens for tokens, _, _ in made]


def models(folder: Path, *, alike: bool, **options: Any) -> tuple[ModelRunner, ModelRunner]:
    """A model and its draft model, the same or another one."""
    sizes: dict[str, Any] = {"hidden_size": 256, "head_dim": 32} if options else {}
    model = load(make_tiny_model(folder / "model", **sizes), num_blocks=256, **options)
    other = "model" if alike else "other"
    if not alike:
        make_tiny_model(folder / other, "qwen3", num_hidden_layers=1, **sizes)
    return model, load(folder / other, num_blocks=256, **options)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_all_kinds_together_have_the_tokens_of_plain_decoding(
    tmp_path: Path, alike: bool, overlap: bool
) -> None:
    model, draft = models(tmp_path, alike=alike)
    prompts = [prompt(7 + 9 * row, row) for row in range(len(KINDS))]
    plain, _ = generate(model, prompts, KINDS, None)
    executor = DraftingExecutor(model, draft)
    guessed, engine = generate(executor, prompts, KINDS, overlap=overlap)
    assert tokens_of(guessed) == tokens_of(plain)
    requests = engine.requests
    share = requests.num_accepted_tokens / requests.num_draft_tokens
    assert share > 0.5 if alike else share < 0.2, "penalties are not followed"
    assert alike or requests.num_draft_tokens < len(KINDS) * NUM_TOKENS / 2, (
        "no more drafts than pay"
    )
    executor.launch(engine.scheduler.schedule()[0])
    assert not executor._held
    assert not draft._tables


@pytest.mark.skipif(not is_exact, reason="no product of our own with AMX")
def test_in_bfloat16_all_is_the_same_to_the_bit(tmp_path: Path) -> None:
    model, draft = models(tmp_path, alike=True, dtype="bfloat16")
    prompts = [prompt(7 + 9 * row, row) for row in range(len(KINDS))]
    plain, _ = generate(model, prompts, KINDS, None)
    assert generate(DraftingExecutor(model, draft), prompts, KINDS)[0] == plain


def test_the_same_model_is_always_right_and_takes_fewer_steps(tmp_path: Path) -> None:
    """Greedy and with noise, since a proposal is made with the noise of its place."""
    model, draft = models(tmp_path, alike=True)
    kinds = [
        GREEDY,
        SamplingParams(seed=5),
        SamplingParams(temperature=0.7, top_k=50, top_p=0.9, seed=6),
    ]
    prompts = [prompt(20, row) for row in range(3)]
    _, engine = generate(DraftingExecutor(model, draft), prompts, kinds)
    requests = engine.requests
    assert requests.num_accepted_tokens == requests.num_draft_tokens > 3 * NUM_TOKENS / 2


@pytest.mark.parametrize("num_host_blocks", [0, 64])
def test_preempted_shared_and_restored_sequences_have_the_tokens_of_plain_decoding(
    tmp_path: Path, num_host_blocks: int
) -> None:
    """The blocks do not suffice, and the prompts have a prefix in common, which the draft model
    computes anew.
    """
    folder = make_tiny_model(tmp_path)
    model = load(folder, num_blocks=20, num_host_blocks=num_host_blocks)
    executor = DraftingExecutor(model, load(folder, num_blocks=20))
    prompts = [[*prompt(40), *prompt(3 + row, row)] for row in range(8)]
    plain, _ = generate(load(folder, num_blocks=256), prompts, [GREEDY] * 8, None)
    seen: Counter[str] = Counter()
    sizes: dict[str, Any] = {"num_blocks": 20, "num_host_blocks": num_host_blocks}
    guessed, engine = generate(executor, prompts, [GREEDY] * 8, seen=seen, **sizes)
    assert tokens_of(guessed) == tokens_of(plain)
    assert engine.requests.num_accepted_tokens > 40
    assert seen["preempted"]
    assert seen["cached"] > seen["restored"]
    assert bool(seen["restored"]) == bool(num_host_blocks)


def test_suspended_and_cancelled_sequences_leave_nothing_and_go_on_alike(tmp_path: Path) -> None:
    """At every step of a draft; the sequence that takes over begins with the other one's blocks."""
    model, draft = models(tmp_path, alike=True)
    plain, _ = generate(model, [prompt(20)], [GREEDY], None)
    tokens, executor = plain[0][0], DraftingExecutor(model, draft)
    engine = make_engine(executor)

    def submit(number: int, known: Sequence[int]) -> None:
        rest = NUM_TOKENS - (len(known) - 20)
        engine.submit(
            SequenceSpec(
                id=number,
                task=Task.COLOCATED,
                tokens=tuple(known),
                max_tokens=rest,
                sampling=GREEDY,
            )
        )

    for num_steps in range(2, 8):
        for number in (1, 2, 3):
            submit(number, prompt(20))
        for _ in range(num_steps):
            engine.step()
        engine.suspend(1)
        engine.cancel(2)
        events = [
            event for _ in range(2 * NUM_TOKENS) if engine.has_work for event in engine.step()
        ]
        (moved,) = [event for event in events if isinstance(event, Suspended)]
        known = [*moved.tokens, moved.first_token]
        assert known == [*prompt(20), *tokens][: len(known)]
        engine.cancel(1)
        submit(4, known)
        events = [
            event for _ in range(2 * NUM_TOKENS) if engine.has_work for event in engine.step()
        ]
        made = [
            token for event in events if isinstance(event, NewTokens) for token in event.token_ids
        ]
        assert known[20:] + made == tokens
        engine.check_integrity()
        assert not engine.requests.sequences
        assert not executor._held
        assert not draft._tables
    assert engine.requests.num_accepted_tokens == engine.requests.num_draft_tokens > NUM_TOKENS


def test_a_long_prompt_is_caught_up_with_in_parts(tmp_path: Path) -> None:
    model, draft = models(tmp_path, alike=True)
    executor = DraftingExecutor(model, draft)
    tokens = prompt(600)
    request = DraftRequest(sequence_id=1, tokens=tokens, blocks=range(40), sampling=GREEDY, count=3)
    assert [executor.propose([request]) for _ in range(2)] == [{}, {}]
    whole = executor.propose([request])[1]
    assert len(whole) == 3
    other = replace(
        request, sequence_id=2, tokens=[*tokens, whole[0]], blocks=range(40, 80), count=2
    )
    assert [executor.propose([other]) for _ in range(3)][-1] == {2: whole[1:]}
    longer = replace(request, tokens=[*tokens, *whole[:2], (whole[2] + 1) % 512])
    assert executor.propose([longer])[1] != whole


def test_a_draft_model_with_a_shorter_context_proposes_nothing_beyond_it(tmp_path: Path) -> None:
    model = load(make_tiny_model(tmp_path / "model"))
    draft = load(make_tiny_model(tmp_path / "draft", max_position_embeddings=48))
    plain, _ = generate(model, [prompt(30)], [GREEDY], None)
    guessed, _ = generate(
        DraftingExecutor(model, draft), [prompt(30)], [GREEDY], draft_context_tokens=48
    )
    assert tokens_of(guessed) == tokens_of(plain)


def test_a_rank_counts_the_draft_models_kv_cache(tmp_path: Path) -> None:
    folder, small = (
        make_tiny_model(tmp_path / "model"),
        make_tiny_model(tmp_path / "draft", num_hidden_layers=1),
    )
    config = RankConfig(model=str(folder), identity=IDENTITY, dtype="float32", kv_cache_bytes=2**20)
    plain, drafting = load_rank(config), load_rank(replace(config, draft_model=str(small)))
    assert isinstance(drafting.executor, DraftingExecutor)
    assert drafting.engine_config(Budgets()).draft_context_tokens == 2_048
    assert plain.engine_config(Budgets()).draft_context_tokens is None
    assert plain.num_blocks == 2**20 // (16 * 2 * 2 * 2 * 16 * 4)
    assert (
        drafting.num_blocks == drafting.executor._model.kv.num_blocks == plain.num_blocks * 2 // 3
    )
    with pytest.raises(
        ValueError, match=r"kv_cache_bytes: 10000 is below \d+, the size of a block"
    ):
        load_rank(replace(config, draft_model=str(small), kv_cache_bytes=10_000))
    load_rank(replace(config, kv_cache_bytes=10_000))


def test_a_draft_model_of_other_tokens_is_refused(tmp_path: Path) -> None:
    folder, other = (
        make_tiny_model(tmp_path / "model"),
        make_tiny_model(tmp_path / "other", vocab_size=600),
    )
    config = RankConfig(model=str(folder), identity=IDENTITY, dtype="float32")
    text = (
        "draft_model: the draft model has 600 tokens in its vocabulary and the model 512; they "
        "must be the same"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        load_rank(replace(config, draft_model=str(other)))
    with pytest.raises(ValueError, match=r"draft_model: config\.json: not found"):
        load_rank(replace(config, draft_model=str(tmp_path)))


@pytest.mark.parametrize("kind", ["lfm2", "mamba2", "mistral"])
def test_a_draft_model_with_states_or_windows_is_refused(tmp_path: Path, kind: str) -> None:
    """A wrong guess takes back tokens of its KV cache, but cannot take back a state."""
    folder = make_tiny_decoder(tmp_path / "model", "llama")
    fields = {"sliding_window": 24} if kind == "mistral" else {}
    draft = make_tiny_decoder(tmp_path / "draft", kind, **fields)
    config = RankConfig(
        model=str(folder), identity=IDENTITY, dtype="float32", draft_model=str(draft)
    )
    refused = "^draft_model: keeps state or windows beside full KV cache$"
    with pytest.raises(ValueError, match=refused):
        load_rank(config)
    service = load_config(
        None, {"model": str(folder), "speculative": {"method": "draft_model", "model": str(draft)}}
    )
    refused = r"^speculative\.model: keeps state or windows beside full KV cache$"
    with pytest.raises(InvalidArgument, match=refused):
        checked_folder(service)
