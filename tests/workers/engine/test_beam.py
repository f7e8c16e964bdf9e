"""Beam search without a model equals transformers' on a model without weights."""

import importlib
import itertools
import random
from array import array
from typing import Any

import pytest
import torch

from tandem.workers.engine.beam import Beams, Candidate

transformers: Any = importlib.import_module("transformers")

VOCAB_SIZE, PERIOD = 24, 7


class TableConfig(transformers.PretrainedConfig):  # type: ignore[misc]
    model_type = "tandem-table"
    num_hidden_layers = 1


class TableModel(transformers.PreTrainedModel, transformers.GenerationMixin):  # type: ignore[misc]
    """The next token's logits are looked up by the last token and its position."""

    config_class = TableConfig
    main_input_name = "input_ids"
    _supports_cache_class = False

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__(TableConfig(vocab_size=VOCAB_SIZE))
        self.table = table  # [period, vocab_size, vocab_size]
        self.anchor = torch.nn.Parameter(torch.zeros(1))

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **_: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        places = torch.arange(input_ids.shape[1]) % PERIOD
        return transformers.modeling_outputs.CausalLMOutput(logits=self.table[places, input_ids])


def theirs(
    table: torch.Tensor, prompt: list[int], options: dict[str, Any], stop_ids: list[int]
) -> list[Any]:
    """Generated tokens, cut after the stop token, and score of each hypothesis."""
    done = TableModel(table).generate(
        torch.tensor([prompt]),
        generation_config=transformers.GenerationConfig(
            do_sample=False,
            num_return_sequences=options["num_beams"],
            eos_token_id=stop_ids or None,
            pad_token_id=VOCAB_SIZE - 1,
            use_cache=False,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        ),
    )
    found = []
    for row, score in zip(done.sequences.tolist(), done.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :][: options["max_new_tokens"]]
        end = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
        found.append((tuple(tokens[:end]), score))
    return found


def candidates(table: torch.Tensor, tokens: list[int], count: int) -> list[Candidate]:
    logprobs = torch.log_softmax(table[(len(tokens) - 1) % PERIOD, tokens[-1]], dim=-1)
    top = torch.topk(logprobs, count)
    return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def search(beams: Beams, table: torch.Tensor, prompt: list[int], count: int) -> list[Any]:
    rows = [list(prompt)]
    while moves := beams.advance([candidates(table, row, beams.num_candidates) for row in rows]):
        rows = [[*rows[place], token] for place, token in moves]
    return beams.best(count)


def ours(
    table: torch.Tensor, prompt: list[int], options: dict[str, Any], stop_ids: list[int]
) -> list[Any]:
    beams = Beams(
        width=options["num_beams"],
        max_tokens=options["max_new_tokens"],
        stop_ids=frozenset(stop_ids),
        length_penalty=options["length_penalty"],
        early_stopping=options["early_stopping"],
    )
    return search(beams, table, prompt, options["num_beams"])


@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("early_stopping", [False, True])
def test_hypotheses_and_scores_are_those_of_transformers(width: int, early_stopping: bool) -> None:
    ended: set[bool] = set()
    for seed, length_penalty in itertools.product(range(3), (1.0, 0.0, -0.7, 2.5)):
        rng = random.Random(f"{width} {length_penalty} {early_stopping} {seed}")
        table = torch.randn(
            PERIOD, VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)
        )
        table *= rng.choice([0.5, 1.0, 3.0])
        stop_ids = rng.sample(range(VOCAB_SIZE - 1), rng.choice([0, 1, 1, 2, 3]))
        table[:, :, stop_ids] += rng.choice([0.0, 2.0])
        options = {
            "num_beams": width,
            "max_new_tokens": rng.choice([1, 3, 12, 25]),
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
        }
        prompt = rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 5))
        want = theirs(table, prompt, options, stop_ids)
        assert ours(table, prompt, options, stop_ids) == want, (seed, options, stop_ids)
        ended |= {len(tokens) < options["max_new_tokens"] for tokens, _ in want}
    assert ended == {False, True}, "some end with a stop token, some with the last"


def test_late_tokens_are_no_candidates_before_their_time() -> None:
    table = torch.randn(PERIOD, VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    table[:, :, 5] += 5
    options = {"num_beams": 3, "max_new_tokens": 9, "length_penalty": 1.0, "early_stopping": False}
    want = theirs(table, [1, 2], options | {"min_new_tokens": 4}, [5])
    beams = Beams(
        width=3, max_tokens=9, stop_ids=frozenset({5}), min_tokens=4, late_ids=frozenset({5})
    )
    assert search(beams, table, [1, 2], 3) == want
    assert {len(tokens) for tokens, _ in want} == {5}
    assert {len(tokens) for tokens, _ in theirs(table, [1, 2], options, [5])} != {5}


def test_extreme_penalties_give_scores_and_no_errors() -> None:
    for penalty in (10.0, -10.0, 30.0, -30.0):
        beams = Beams(width=2, max_tokens=20, length_penalty=penalty)
        rows = 1
        while moves := beams.advance([[(1, -0.5), (2, -1.5), (3, -2.5)]] * rows):
            rows = len(moves)
        assert len(beams.best(2)) == 2
        assert all(len(tokens) == 20 for tokens, _ in beams.best(2))


def test_fewer_tokens_than_beams_are_fewer_beams_for_good() -> None:
    beams = Beams(width=4, max_tokens=3)
    row = [(0, -0.5), (1, -1.5)]
    assert beams.advance([row]) == [(0, 0), (0, 1)]
    assert len(beams.advance([row] * 2)) == 2
    assert beams.advance([row] * 2) == []
    assert beams.best(4)[0][0] == (0, 0, 0)


def test_scores_are_summed_in_float32() -> None:
    beams = Beams(width=1, max_tokens=3, length_penalty=0.0)
    total = 0.0
    for logprob in array("f", [-0.1, -0.7, -12345.678]):
        beams.advance([[(1, logprob)]])
        total = array("f", [total + logprob])[0]
    assert beams.best(1)[0][1] == total != sum(array("f", [-0.1, -0.7, -12345.678]))
