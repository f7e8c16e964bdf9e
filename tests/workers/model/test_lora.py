"""LoRA adapters against transformers and peft, float32: logits within 1e-4, equal greedy tokens;
several in a batch with the base model, over ranks, in chunks; and which folders are refused.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from tandem.tests.adapters import ATTENTION, FUSED, LINEAR, make_adapter, peft_reference
from tandem.tests.tiny import FAMILIES, ROUTED, make_tiny_model
from tandem.tests.workers.model.helpers import (
    Driver,
    load,
    prompt,
    recorded_logits,
    reference_greedy,
    reference_logits,
)
from tandem.tests.workers.model.test_families import TOLERANCE, needs_kernels
from tandem.tests.workers.model.test_parallel import on_ranks
from tandem.workers.model.adapter_folder import read_adapter
from tandem.workers.model.config import CheckpointError
from tandem.workers.model.programs import Programs
from tandem.workers.model.runner import ModelRunner

TARGETS = {
    "phi3": FUSED,
    "lfm2": ("q_proj", "in_proj", "out_proj", "w1", "w2"),
    "lfm2_moe": ("q_proj", "in_proj", "out_proj", "w1", "w2"),
    "granite_hybrid": ("q_proj", "in_proj", "out_proj", "input_linear", "output_linear"),
    "granite_moe_hybrid": ("q_proj", "in_proj", "out_proj", "input_linear", "output_linear"),
    "nemotron_h": ("q_proj", "in_proj", "up_proj", "down_proj"),
    "nemotron_3": ("q_proj", "in_proj", "up_proj", "down_proj"),
    "qwen3_5": ("q_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "up_proj"),
    "qwen3_5_moe": ("q_proj", "in_proj_qkv", "in_proj_b", "out_proj"),
    "qwen3_next": ("q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"),
}
"""The layers that adapters change, by family, if they have names of their own."""
RANKS = {"one": 1, "four": 4, "eight": 8, "many": 40}
NUMBERS = {"base": 0, "one": 1, "four": 2, "eight": 3, "many": 4}
"""The names of adapters, and under which numbers they are loaded."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four adapters, which differ in rank, scale and what they change."""
    root = tmp_path_factory.mktemp("adapters")
    options: dict[str, dict[str, Any]] = {
        "one": {"targets": ("q_proj", "down_proj")},
        "four": {"targets": ("up_proj", "v_proj"), "use_rslora": True},
        "eight": {},
        "many": {"targets": ATTENTION, "lora_alpha": 17},
    }
    return {
        name: make_adapter(root / name, model, rank=rank, seed=rank, **options[name])
        for name, rank in RANKS.items()
    }


@pytest.fixture(scope="module")
def peft_model(model: Path, folders: dict[str, Path]) -> PeftModel:
    return peft_reference(model, folders)


def chosen(peft_model: PeftModel, name: str) -> Any:
    """The context in which the reference computes with this adapter, or as the base model."""
    if name == "base":
        return peft_model.disable_adapter()
    peft_model.set_adapter(name)
    return nullcontext()


def load_all(runner: ModelRunner, folders: dict[str, Path]) -> ModelRunner:
    for name, folder in folders.items():
        runner.adapters.load(NUMBERS[name], read_adapter(folder, 64))
    return runner


@pytest.fixture(scope="module")
def runner(model: Path, folders: dict[str, Path]) -> ModelRunner:
    return load_all(load(model), folders)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path / "model", family)
    targets = TARGETS.get(family, ATTENTION if family in ROUTED else LINEAR)
    adapter = make_adapter(tmp_path / "adapter", folder, targets=targets)
    peft_model, runner = peft_reference(folder, {"one": adapter}), load(folder)
    runner.adapters.load(1, read_adapter(adapter, 64))
    driver, ids = Driver(runner), prompt(70)
    with recorded_logits(monkeypatch) as logits:
        driver.run(driver.step(1, ids[:33], 0, adapter=1), driver.step(2, ids[:33], 0))
        tokens = driver.run(driver.step(1, ids[33:], 33), driver.step(2, ids[33:], 33))[:1]
    while len(tokens) < 8:
        tokens += driver.run(driver.step(1, tokens[-1:], 69 + len(tokens)))
    assert (logits[1][0] - reference_logits(peft_model, ids)[-1]).abs().max() <= TOLERANCE
    assert tokens == reference_greedy(peft_model, ids, 8)
    with peft_model.disable_adapter():
        expected = reference_logits(peft_model, ids)[-1]
    assert (logits[1][1] - expected).abs().max() <= TOLERANCE
    assert (logits[1][0] - expected).abs().max() > 0.1, (
        "an adapter that changes nothing tests nothing"
    )


@pytest.mark.parametrize("name", NUMBERS)
def test_alone(
    runner: ModelRunner, peft_model: PeftModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, ids = Driver(runner), prompt(60, 4)
    with recorded_logits(monkeypatch) as logits, chosen(peft_model, name):
        tokens = driver.run(driver.step(1, ids, 0, adapter=NUMBERS[name]))
        while len(tokens) < 16:
            tokens += driver.run(driver.step(1, tokens[-1:], 59 + len(tokens)))
        assert (logits[0][0] - reference_logits(peft_model, ids)[-1]).abs().max() <= TOLERANCE
        assert tokens == reference_greedy(peft_model, ids, 16)
    driver.drop(1)


@pytest.mark.parametrize(
    "decoder", ["model.language_model.", "language_model.model.", "", "language_model."]
)
def test_an_adapter_may_have_the_names_of_a_multimodal_model_or_of_one_without_a_head(
    model: Path,
    folders: dict[str, Path],
    decoder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As adapters of Gemma 3 and Qwen3.5 that were trained with images, and of embedding models."""
    renamed = shutil.copytree(folders["eight"], tmp_path / "renamed")
    path = renamed / "adapter_model.safetensors"
    prefix = "base_model.model."
    stored = {
        name.replace(f"{prefix}model.", f"{prefix}{decoder}"): each
        for name, each in load_file(path).items()
    }
    assert all(name.startswith(f"{prefix}{decoder}layers.") for name in stored)
    save_file(stored, path)
    found = []
    for folder in (folders["eight"], renamed):
        driver = Driver(load_all(load(model), {"one": folder}))
        with recorded_logits(monkeypatch) as logits:
            driver.run(driver.step(1, prompt(20), 0, adapter=NUMBERS["one"]))
        found.append(logits[0])
    assert torch.equal(*found)


def advance(
    driver: Driver,
    prompts: dict[str, list[int]],
    choose: random.Random,
    numbers: dict[str, int] = NUMBERS,
) -> Iterator[dict[str, int]]:
    """Computes random chunks of all these prompts; yields after each step the tokens that are done,
    in the plan's order.
    """
    done = dict.fromkeys(prompts, 0)
    while unfinished := [name for name in prompts if done[name] < len(prompts[name])]:
        names = choose.sample(unfinished, choose.randint(1, len(unfinished)))
        steps = []
        for name in names:
            begin = done[name]
            done[name] = min(begin + choose.choice((1, 1, 7, 20)), len(prompts[name]))
            number = numbers[name.partition(" ")[0]]
            key = list(prompts).index(name)
            steps.append(
                driver.step(
                    key, prompts[name][begin : done[name]], begin, adapter=0 if begin else number
                )
            )
        driver.run(*steps)
        yield {name: done[name] for name in names}


def test_four_adapters_and_the_base_model_in_one_batch(
    runner: ModelRunner, peft_model: PeftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(runner)
    prompts = {
        f"{name} {mate}": prompt(30 + 9 * mate, mate) for name in NUMBERS for mate in range(2)
    }
    expected = {}
    for name, ids in prompts.items():
        with chosen(peft_model, name.partition(" ")[0]):
            expected[name] = reference_logits(peft_model, ids)
    with recorded_logits(monkeypatch) as logits:
        for done in advance(driver, prompts, random.Random(3)):
            for row, (name, end) in enumerate(done.items()):
                assert (logits[-1][row] - expected[name][end - 1]).abs().max() <= TOLERANCE, (
                    name,
                    end,
                )
    for key in range(len(prompts)):
        driver.drop(key)


def test_over_ranks(model: Path, folders: dict[str, Path], peft_model: PeftModel) -> None:
    """Four ranks share two KV heads."""
    ids = prompt(50, 2)
    expected = []
    for name in NUMBERS:
        with chosen(peft_model, name):
            expected.append(reference_greedy(peft_model, ids, 6))

    def work(rank: ModelRunner) -> list[list[int]]:
        driver = Driver(load_all(rank, folders))
        steps = [driver.step(number, ids, 0, adapter=number) for number in NUMBERS.values()]
        found = [driver.run(*steps)]
        while len(found) < 6:
            at = 49 + len(found)
            found.append(
                driver.run(
                    *(driver.step(number, [token], at) for number, token in enumerate(found[-1]))
                )
            )
        return [list(each) for each in zip(*found, strict=True)]

    for size in (2, 4):
        assert on_ranks(model, size, work) == [expected] * size


def test_an_adapter_is_unloaded_under_its_sequences_and_loaded_again(
    model: Path, folders: dict[str, Path], peft_model: PeftModel
) -> None:
    runner, ids = load_all(load(model), folders), prompt(40, 1)
    driver = Driver(runner)
    tokens = driver.run(driver.step(1, ids, 0, adapter=NUMBERS["eight"]))
    step = driver.step(1, tokens, 40)
    tokens += driver.sample(step, unloaded=(NUMBERS["eight"],)).tokens
    tokens += driver.run(driver.step(1, tokens[-1:], 41))
    with pytest.raises(KeyError):
        driver.run(driver.step(2, ids, 0, adapter=NUMBERS["eight"]))
    runner.adapters.load(9, read_adapter(folders["eight"], 64))
    again = driver.run(driver.step(3, ids, 0, adapter=9))
    with chosen(peft_model, "eight"):
        assert tokens == reference_greedy(peft_model, ids, 3)
    assert again == tokens[:1]


@needs_kernels
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_in_bfloat16_no_row_depends_on_the_others(
    quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: of the base model with and without adapters beside it, and of an adapter
    alone, beside others, in chunks and decoded.
    """
    folder = make_tiny_model(
        tmp_path / "model", hidden_size=256, head_dim=32, intermediate_size=256
    )
    adapters = {
        "one": make_adapter(tmp_path / "one", folder, rank=3, targets=("gate_proj", "o_proj")),
        "four": make_adapter(tmp_path / "four", folder, rank=16),
    }
    runner = load_all(load(folder, dtype="bfloat16", quantization=quantization), adapters)
    ids = prompt(48, 6)

    def decoded(number: int) -> torch.Tensor:
        driver = Driver(runner)
        with recorded_logits(monkeypatch) as logits:
            for index, token in enumerate(ids):
                driver.run(driver.step(1, [token], index, adapter=0 if index else number))
        driver.drop(1)
        return torch.cat(logits)

    expected = {name: decoded(NUMBERS[name]) for name in ("base", "one", "four")}
    driver = Driver(runner)
    prompts = {f"{name} {mate}": ids for name in expected for mate in range(2)}
    with recorded_logits(monkeypatch) as logits:
        for done in advance(driver, prompts, random.Random(5)):
            for row, (name, end) in enumerate(done.items()):
                assert torch.equal(logits[-1][row], expected[name.partition(" ")[0]][end - 1]), (
                    name,
                    end,
                )
    assert not torch.equal(expected["base"], expected["one"])


@needs_kernels
def test_adapters_of_layers_with_even_and_odd_inputs_share_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a rank whose part of 8,192 inputs is 2,731; the kernels support even numbers only."""
    folder = make_tiny_model(tmp_path / "model", intermediate_size=95)
    adapters = {
        "one": make_adapter(tmp_path / "one", folder, targets=("q_proj",)),
        "four": make_adapter(tmp_path / "four", folder, targets=("down_proj",)),
    }
    runner, ids = load_all(load(folder, dtype="bfloat16"), adapters), prompt(20)
    driver = Driver(runner)
    with recorded_logits(monkeypatch) as logits:
        for key, name in enumerate(("base", *adapters)):
            driver.run(driver.step(key, ids, 0, adapter=NUMBERS[name]))
        driver.run(
            *(driver.step(9 + NUMBERS[name], ids, 0, adapter=NUMBERS[name]) for name in adapters)
        )
    base, *alone = (each[0] for each in logits[:3])
    for row, expected in enumerate(alone):
        assert (expected - base).abs().max() > 0.1, "an adapter that changes nothing tests nothing"
        assert (logits[3][row] - expected).abs().max() <= 0.05


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_5"])
def test_steps_with_adapters_are_recorded(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And have the bits of single calls, and without an adapter those of a model without any.

    The second adapter has a higher rank and changes more layers, so the steps are recorded again.
    """
    sizes: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
    folder = make_tiny_model(tmp_path / "model", family, **sizes)
    targets = TARGETS.get(family, LINEAR)
    adapters = {
        "one": make_adapter(tmp_path / "one", folder, rank=3, targets=targets[-1:]),
        "many": make_adapter(tmp_path / "many", folder, rank=40, targets=targets),
    }
    names = [f"{name} {mate}" for name in ("base", *adapters) for mate in (1, 2)]
    prompts = {name: prompt(30, seed) for seed, name in enumerate(names)}

    def logits_of(runner: ModelRunner, numbers: dict[str, int]) -> dict[str, torch.Tensor]:
        """Chunks and decodes in random mixtures: after a step with one adapter, with both."""
        driver = Driver(runner)
        found: dict[str, torch.Tensor] = {}
        with recorded_logits(monkeypatch) as logits:
            driver.run(driver.step(9, prompt(5), 0, adapter=numbers["one"]))
            for done in advance(driver, prompts, random.Random(1), numbers):
                for row, (name, end) in enumerate(done.items()):
                    found[f"{name} {end}"] = logits[-1][row]
        return found

    runner = load_all(load(folder, dtype="bfloat16"), adapters)
    assert runner._adapted_programs is not None
    record = runner._adapted_programs._record
    recordings: list[Programs] = []

    def count() -> Programs:
        recordings.append(record())
        return recordings[-1]

    monkeypatch.setattr(runner._adapted_programs, "_record", count)
    found = logits_of(runner, NUMBERS)
    assert [programs for programs in recordings if None not in programs] == recordings
    assert len(recordings) == 2
    runner._decode_program = runner._token_program = None
    expected = logits_of(runner, NUMBERS)
    assert len(recordings) == 2
    base = logits_of(load(folder, dtype="bfloat16"), dict.fromkeys(NUMBERS, 0))
    for name, logits in found.items():
        assert torch.equal(logits, expected[name]), name
        assert torch.equal(logits, base[name]) == name.startswith("base"), name


@needs_kernels
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize(
    "targets", [("gate_proj", "up_proj"), ("up_proj",), ("down_proj",), ATTENTION]
)
def test_in_bfloat16_an_adapter_changes_what_it_changes_in_float32(
    targets: tuple[str, ...],
    quantization: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the order in which a kernel has a layer's outputs."""
    folder = make_tiny_model(
        tmp_path / "model", hidden_size=256, head_dim=32, intermediate_size=256
    )
    adapter, ids = (
        make_adapter(tmp_path / "adapter", folder, rank=16, targets=targets),
        prompt(40, 6),
    )

    def change(**options: Any) -> torch.Tensor:
        """What the adapter adds to the logits of each step, alone and beside the base model."""
        driver = Driver(load_all(load(folder, **options), {"one": adapter}))
        with recorded_logits(monkeypatch) as logits:
            driver.run(driver.step(0, ids, 0))
            driver.run(driver.step(1, ids, 0, adapter=NUMBERS["one"]))
            driver.run(driver.step(2, ids, 0, adapter=NUMBERS["one"]), driver.step(3, ids, 0))
        base, alone, (beside, base_beside) = logits[0][0], logits[1][0], logits[2]
        assert (base_beside - base).abs().max() <= TOLERANCE
        assert (beside - alone).abs().max() <= TOLERANCE
        return (alone - base).float()

    expected = change()
    assert expected.abs().max() > 0.1, "an adapter that changes nothing tests nothing"
    found = change(dtype="bfloat16", quantization=quantization)
    assert (found - expected).norm() < 0.2 * expected.norm()


def settings(**values: Any) -> Callable[[Path], None]:
    """Changes fields of adapter_config.json."""

    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Changes the tensors."""

    def rewrite(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return rewrite


def written(name: str, data: bytes | None) -> Callable[[Path], None]:
    """Overwrites a file, or removes it."""

    def write(folder: Path) -> None:
        (folder / name).unlink()
        if data is not None:
            (folder / name).write_bytes(data)

    return write


def truncated(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def linked(folder: Path) -> None:
    file, outside = folder / "adapter_model.safetensors", folder.parent / "outside.safetensors"
    outside.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(outside)


PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
A = f"{PREFIX}.lora_A.weight"
FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no settings": (written("adapter_config.json", None), "adapter_config.json: cannot be read"),
    "no object": (written("adapter_config.json", b"[1]"), "adapter_config.json: not a JSON object"),
    "no JSON": (written("adapter_config.json", b"{"), "adapter_config.json: not valid JSON"),
    "not LoRA": (
        settings(peft_type="LOHA"),
        "adapter_config.json: peft_type: 'LOHA' is not supported",
    ),
    "kind of a number": (settings(peft_type=3), "adapter_config.json: peft_type: must be a string"),
    "rank": (settings(r=65), "adapter_config.json: r: 65 is above the maximum of 64"),
    "no rank": (settings(r="8"), "adapter_config.json: r: must be an integer"),
    "other rank": (settings(r=4), f"adapter_model.safetensors: {FIRST}: shape is [8, 96], the"),
    "alpha": (settings(lora_alpha=-1), "adapter_config.json: lora_alpha: must be a number above 0"),
    "huge alpha": (
        settings(lora_alpha=10**400),
        "adapter_config.json: lora_alpha: must be a number above 0",
    ),
    "DoRA": (settings(use_dora=True), "adapter_config.json: use_dora: is not supported"),
    "modules to save": (
        settings(modules_to_save=["lm_head"]),
        "adapter_config.json: modules_to_save: is not",
    ),
    "rank pattern": (
        settings(rank_pattern={"q_proj": 4}),
        "adapter_config.json: rank_pattern: is not supported",
    ),
    "bias": (settings(bias="all"), "adapter_config.json: bias: is not supported"),
    "PiSSA": (
        settings(init_lora_weights="pissa_niter_4"),
        "adapter_config.json: init_lora_weights: 'pissa_niter_4'",
    ),
    "LoRA-GA": (
        settings(init_lora_weights="lora_ga"),
        "adapter_config.json: init_lora_weights: 'lora_ga'",
    ),
    "no weights": (
        written("adapter_model.safetensors", None),
        "adapter_model.safetensors: not found",
    ),
    "empty": (written("adapter_model.safetensors", b""), "adapter_model.safetensors: truncated"),
    "garbage": (
        written("adapter_model.safetensors", b"\xff" * 400),
        "adapter_model.safetensors: truncated",
    ),
    "truncated": (truncated, "adapter_model.safetensors: truncated"),
    "a link": (linked, "adapter_model.safetensors: is a link that leads out of the"),
    "NaN": (
        weights(lambda tensors: tensors[A].view(-1)[5].fill_(torch.nan)),
        f"adapter_model.safetensors: {A}: contains NaN or infinity",
    ),
    "half": (weights(lambda tensors: tensors.pop(A)), f"adapter_model.safetensors: {A}: missing"),
    "nothing": (
        weights(lambda tensors: tensors.clear()),
        "adapter_model.safetensors: has no tensors",
    ),
    "shape": (
        weights(lambda tensors: tensors.update({A: torch.zeros(8, 63)})),
        f"adapter_model.safetensors: {A}: shape is [8, 63], the model and r in adapter_config.json "
        "require [8, 64]",
    ),
    "dtype": (
        weights(lambda tensors: tensors.update({A: torch.zeros(8, 64, dtype=torch.int8)})),
        f"adapter_model.safetensors: {A}: dtype int8 is not supported",
    ),
    "head": (
        weights(
            lambda tensors: tensors.update(
                {"base_model.model.lm_head.lora_A.weight": torch.zeros(8, 64)}
            )
        ),
        "adapter_model.safetensors: base_model.model.lm_head.lora_A.weight: this model has no such",
    ),
    "embedding": (
        weights(lambda tensors: tensors.update({f"{PREFIX}.lora_embedding_A": torch.zeros(8, 64)})),
        f"adapter_model.safetensors: {PREFIX}.lora_embedding_A: this model has no such linear",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_folders_are_refused_by_file_and_field(
    kind: str, runner: ModelRunner, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for file in folders["eight"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    runner.adapters.load(50, read_adapter(folder, 64))
    break_it, expected = BROKEN[kind]
    break_it(folder)
    with pytest.raises(CheckpointError) as caught:
        runner.adapters.load(51, read_adapter(folder, 64))
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_a_model_of_transformers_code_takes_no_adapter(
    model: Path, folders: dict[str, Path]
) -> None:
    generic = load(model, model_impl="transformers")
    with pytest.raises(
        CheckpointError,
        match="peft_type: the implementation of this model does not support adapters",
    ):
        load_all(generic, folders)


def test_settings_and_weights_make_the_fingerprint(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    prints = {read_adapter(folder, 64).fingerprint for folder in folders.values()}
    assert len(prints) == len(folders)
    for file in folders["eight"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert read_adapter(tmp_path, 64).fingerprint == read_adapter(folders["eight"], 64).fingerprint
    settings(lora_alpha=3)(tmp_path)
    assert read_adapter(tmp_path, 64).fingerprint not in prints
