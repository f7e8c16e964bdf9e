"""Tests `tandem quantize`: rounding against its definition, folders against their weights."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tandem.cluster.cli.main import app
from tandem.cluster.store import awq, rounding
from tandem.cluster.store.pooling import pooling_rules, write_mode
from tandem.cluster.store.quantize import QuantizationScheme, _Inputs, quantize_model
from tandem.cluster.store.rounding import Grid, damp, round_by_gptq, round_to_nearest
from tandem.proto.errors import InvalidArgument, Unavailable
from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_multimodal import make_tiny_multimodal
from tandem.tests.workers.model.helpers import Driver, load, prompt, reference, reference_greedy
from tandem.workers.model.config import CheckpointError
from tandem.workers.model.loader import check_checkpoint, weight_schemes

TEXT = " ".join(
    f"The {number}th river flows past {number * 7} towns; none of them is as old as it."
    for number in range(150)  # at least 2,048 tokens
)
SCHEMES = {
    "int8": QuantizationScheme(bits=8, group_size=None),
    "int8 by groups": QuantizationScheme(bits=8, group_size=32),
    "int4": QuantizationScheme(bits=4, group_size=32),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("plain"), "qwen2")


GRIDS = [
    Grid(bits=bits, group_size=32, zero_points=zero_points)
    for bits in (8, 4)
    for zero_points in (False, True)
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_nearest_is_within_half_a_step(grid: Grid) -> None:
    weight = torch.randn(24, 64) + 0.5
    weight[5, :32] = 0
    rounded = round_to_nearest(weight, grid)
    assert int(rounded.numbers.max()) == 2**grid.bits - 1
    assert (
        torch.equal(rounded.zeros == 2 ** (grid.bits - 1), torch.full_like(rounded.zeros, True))
        != grid.zero_points
    )
    steps = rounded.scales.float().repeat_interleave(32, dim=1)
    # Scales are bfloat16; a rounded zero cuts a largest weight.
    error = 0.5 + 2**grid.bits / 512 + 0.5 * grid.zero_points
    assert ((rounded.restored() - weight).abs() <= error * steps).all()
    assert not rounded.restored()[5, :32].any()


@pytest.mark.parametrize("grid", [each for each in GRIDS if each.bits == 4], ids=str)
def test_gptq_changes_the_outputs_less_than_rounding_to_nearest(grid: Grid) -> None:
    """Inputs are correlated, as in a layer; one input is always zero."""
    torch.manual_seed(0)
    x = torch.randn(2000, 16) @ torch.randn(16, 160) + 0.3 * torch.randn(2000, 160)
    x[:, 7] = 0
    weight = torch.randn(48, 160)
    errors = [
        ((rounded.restored() - weight) @ x.T).norm()
        for rounded in (round_by_gptq(weight, x.T @ x, grid), round_to_nearest(weight, grid))
    ]
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_no_other_number_next_to_one_would_change_the_outputs_less(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds after enough sweeps of coordinate descent; they change outputs less than GPTQ alone."""
    torch.manual_seed(1)
    x = torch.randn(500, 16) @ torch.randn(16, 64) + 0.3 * torch.randn(500, 64)
    weight, damped = torch.randn(12, 64), damp(x.T @ x).float()

    def errors(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        each = restored(numbers, scales, zeros.float()) - weight
        return (each @ damped * each).sum(1)  # [outputs]

    with monkeypatch.context() as patch:
        patch.setattr(rounding, "_SWEEPS", 0)
        patch.setattr(rounding, "_REFITS", 0)
        alone = round_by_gptq(weight, x.T @ x, grid)
    monkeypatch.setattr(rounding, "_SWEEPS", 50)
    rounded = round_by_gptq(weight, x.T @ x, grid)
    least = errors(rounded.numbers, rounded.scales, rounded.zeros)
    assert (least <= 1.0001 * errors(alone.numbers, alone.scales, alone.zeros)).all()
    for at in range(64):
        for step in (-1, 1):
            numbers = rounded.numbers.long()
            numbers[:, at] = (numbers[:, at] + step).clamp(0, grid.largest)
            assert (errors(numbers, rounded.scales, rounded.zeros) >= 0.9999 * least).all()


@pytest.mark.parametrize(("most", "parts"), [(1, [1] * 5), (20, [2, 2, 1]), (2**20, [5])])
def test_scales_are_the_best_for_their_numbers(
    most: int, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Least squares over all groups of an output; a group without numbers keeps its scale.

    Few equations are in memory at once: each of 5 outputs has 9 numbers of them.
    """
    solve = torch.linalg.solve
    sizes: list[int] = []

    def solve_part(systems: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        sizes.append(len(systems))
        solved: torch.Tensor = solve(systems, wanted)
        return solved

    monkeypatch.setattr(torch.linalg, "solve", solve_part)
    monkeypatch.setattr(rounding, "_MAX_NUMBERS", most)
    torch.manual_seed(0)
    x = torch.randn(300, 16) @ torch.randn(16, 96) + 0.3 * torch.randn(300, 96)
    weight, hessian = torch.randn(5, 96), x.t() @ x
    begun = round_to_nearest(weight, Grid(bits=4, group_size=32, zero_points=True))
    numbers, scales, zeros = begun.numbers.float(), begun.scales.float(), begun.zeros.float()
    numbers[3, 32:64] = zeros[3, 1]
    refitted = rounding._refit(weight, numbers, scales, zeros, hessian)
    assert sizes == parts
    assert refitted[3, 1] == scales[3, 1]
    for output, groups in enumerate(numbers.view(5, 3, 32) - zeros[..., None]):
        used = [group for group in range(3) if groups[group].any()]
        made = torch.stack(
            [x[:, 32 * group : 32 * group + 32] @ groups[group] for group in used], dim=1
        )
        best = torch.linalg.lstsq(made.double(), (x @ weight[output]).double()).solution
        # The scales are bfloat16.
        assert torch.allclose(refitted[output, used].double(), best, rtol=2**-7)


def test_weights_make_up_for_what_rounding_has_done_to_their_inputs() -> None:
    torch.manual_seed(2)
    plain, weight = torch.randn(1, 3000, 48), torch.randn(20, 48)
    rounded = plain + 0.2 * plain @ torch.randn(48, 48) / 7 + 0.05 * torch.randn(1, 3000, 48)
    inputs, x = _Inputs(), torch.cat((plain, rounded))
    assert torch.allclose(inputs.hessian(x), rounded[0].T @ rounded[0], rtol=1e-3, atol=0.5)
    corrected = weight + weight @ inputs.correction(x)
    errors = [(rounded @ each.T - plain @ weight.T).norm() for each in (corrected, weight)]
    assert errors[0] < 0.4 * errors[1]


def test_gptq_rounds_to_nearest_where_inputs_do_not_go_together() -> None:
    weight = torch.randn(8, 64)
    rounded = round_by_gptq(weight, torch.eye(64), Grid(bits=8, group_size=64, zero_points=False))
    steps = rounded.scales.float().repeat_interleave(64, dim=1)
    inside = weight.abs() < 127 * steps
    assert ((rounded.restored() - weight).abs() <= 0.51 * steps)[inside].all()


def test_zero_points_suit_weights_that_are_not_around_zero() -> None:
    weight = torch.rand(16, 128) + 0.2
    errors = [
        (round_by_gptq(weight, torch.eye(128), grid).restored() - weight).norm()
        for grid in (
            Grid(bits=4, group_size=64, zero_points=zero_points) for zero_points in (True, False)
        )
    ]
    assert errors[0] < 0.6 * errors[1]


def restored(
    numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | float
) -> torch.Tensor:
    """Returns the weights of numbers [outputs, inputs] with scales and zeros [outputs, groups]."""
    groups = numbers.float().view(*scales.shape, -1) - (
        zeros if isinstance(zeros, float) else zeros[..., None]
    )
    scaled: torch.Tensor = groups * scales.float()[..., None]
    return scaled.flatten(1)


def unpacked(words: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """Returns the numbers [rows, size] in words [rows, words] of 32 bits."""
    shifts = torch.arange(0, 32, bits)
    numbers: torch.Tensor = (words.long()[..., None] >> shifts) & (1 << bits) - 1
    return numbers.flatten(1)[:, :size]


def read_back(out: Path, plain: Path, scheme: QuantizationScheme) -> Path:
    """Returns the model with plain weights, read from the folder by its format's definition."""
    folder = out.parent / "restored"
    shutil.copytree(plain, folder)
    tensors, weights = load_file(out / "model.safetensors"), {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            outputs, inputs = tensors[f"{layer}.weight_shape"].tolist()
            zeros: torch.Tensor | float = 2.0 ** (scheme.bits - 1)
            if scheme.bits == 4:
                zeros = unpacked(
                    tensors[f"{layer}.weight_zero_point"].t(), scheme.bits, outputs
                ).t()
            numbers = unpacked(tensor, scheme.bits, inputs)
            weights[f"{layer}.weight"] = restored(numbers, tensors[f"{layer}.weight_scale"], zeros)
        elif f"{layer}.weight_scale" in tensors and kind == "weight":
            weights[name] = restored(tensor, tensors[f"{layer}.weight_scale"], 0.0)
        elif not kind.startswith("weight_"):
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_folder_has_the_tokens_of_its_numbers(
    plain: Path, tmp_path: Path, name: str, method: str
) -> None:
    out, scheme, layers = tmp_path / "out", SCHEMES[name], []
    quantize_model(
        plain,
        out,
        scheme,
        None if method == "rtn" else TEXT,
        lambda done, total: layers.append((done, total)),
        method="awq" if method == "awq" else "gptq",
    )
    assert layers == ([] if method == "rtn" else [(1, 2), (2, 2)])
    runner = load(out)
    expected = reference_greedy(reference(read_back(out, plain, scheme)), prompt(30), 12)
    assert Driver(runner).generate(1, prompt(30), 12) == expected
    form = (
        "pack-quantized W4A16"
        if name == "int4"
        else "pack-quantized W8A16"
        if "by" in name
        else "int-quantized W8A8"
    )
    assert weight_schemes(runner.config, "bfloat16")[0].startswith(f"compressed-tensors {form}, ")
    assert {path.name for path in out.iterdir()} >= {path.name for path in plain.iterdir()}


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
@pytest.mark.parametrize("prefix", ["", "model.language_model."])
def test_names_of_a_decoder_alone_or_of_a_multimodal_model_are_kept(
    plain: Path, tmp_path: Path, prefix: str, method: Literal["rtn", "gptq", "awq"]
) -> None:
    """As of Qwen3-Embedding; the rounded weights are those of the same model with usual names."""
    renamed = shutil.copytree(plain, tmp_path / "renamed")
    path = renamed / "model.safetensors"
    stored = {
        f"{prefix}{name.removeprefix('model.')}" if name.startswith("model.") else name: each
        for name, each in load_file(path).items()
    }
    save_file(stored, path, {"format": "pt"})
    made = []
    for number, folder in enumerate((plain, renamed)):
        out = tmp_path / str(number)
        calibration = None if method == "rtn" else TEXT
        how: Literal["gptq", "awq"] = "awq" if method == "awq" else "gptq"
        quantize_model(folder, out, SCHEMES["int4"], calibration, method=how)
        made.append(load_file(out / "model.safetensors"))
    assert any(name.startswith(f"{prefix}layers.") for name in made[1])
    for name, tensor in made[0].items():
        other = f"{prefix}{name.removeprefix('model.')}" if name.startswith("model.") else name
        assert torch.equal(made[1].pop(other), tensor), name
    assert not made[1]
    check_checkpoint(tmp_path / "1")


def test_a_service_of_another_user_can_read_the_folder(plain: Path, tmp_path: Path) -> None:
    quantize_model(plain, tmp_path / "out", SCHEMES["int8"])
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == dict.fromkeys(modes, 0o644)


def test_what_cannot_be_rounded_is_refused_and_leaves_nothing(plain: Path, tmp_path: Path) -> None:
    scheme, out = SCHEMES["int4"], tmp_path / "out"
    with pytest.raises(
        InvalidArgument,
        match=r"--group-size: 64 does not divide the 96 inputs of model.layers.0.mlp.down",
    ):
        quantize_model(plain, out, QuantizationScheme(bits=4, group_size=64))
    with pytest.raises(InvalidArgument, match="--calibration: has 1 tokens; the minimum is 2048"):
        quantize_model(plain, out, scheme, "a")
    with pytest.raises(
        CheckpointError, match=r"only text models of .*, without quantization or experts"
    ):
        quantize_model(make_tiny_model(tmp_path / "experts", "mixtral"), out, scheme)
    shutil.copytree(plain, tmp_path / "broken")
    weights = load_file(plain / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.weight"][3, 4] = float("nan")
    save_file(weights, tmp_path / "broken" / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError,
        match=r"model.layers.1.self_attn.q_proj.weight: contains NaN or infinite numbers",
    ):
        quantize_model(tmp_path / "broken", out, scheme)
    assert {path.name for path in tmp_path.iterdir()} == {"experts", "broken"}
    quantize_model(plain, out, scheme)
    with pytest.raises(CheckpointError, match="only text models of"):
        quantize_model(out, tmp_path / "again", scheme)
    with pytest.raises(InvalidArgument, match=r"OUT: .* exists"):
        quantize_model(plain, out, scheme)


def test_a_model_that_transformers_lacks_is_only_rounded_to_nearest(
    plain: Path, tmp_path: Path
) -> None:
    """Otherwise transformers would ask whether to run the code in its folder."""
    folder, out = tmp_path / "mimo", tmp_path / "out"
    shutil.copytree(plain, folder)
    fields = json.loads((folder / "config.json").read_text())
    own = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    (folder / "config.json").write_text(json.dumps(fields | own))
    with pytest.raises(CheckpointError, match=r"model_type: 'mimo' .*; use --method rtn"):
        quantize_model(folder, out, SCHEMES["int4"], TEXT)
    quantize_model(folder, out, SCHEMES["int4"])
    assert check_checkpoint(out).architecture == "MiMoForCausalLM"


def test_chat_templates_and_the_pooling_in_folders_of_their_own_come_along(
    plain: Path, tmp_path: Path
) -> None:
    shutil.copytree(plain, tmp_path / "plain")
    for name in ("additional_chat_templates/tool_use.jinja", "onnx/config.json"):
        (tmp_path / "plain" / name).parent.mkdir()
        (tmp_path / "plain" / name).write_text("{}")
    write_mode(tmp_path / "plain", "mean")
    quantize_model(tmp_path / "plain", tmp_path / "out", SCHEMES["int4"])
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == "{}"
    assert pooling_rules(tmp_path / "out").mode == "mean"
    assert not (tmp_path / "out" / "onnx").exists()


def test_a_text_that_cannot_be_measured_is_refused_before_anything_is_rounded(
    plain: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("a")
    result = CliRunner().invoke(
        app, ["quantize", str(plain), str(tmp_path / "out"), "--text", str(text)]
    )
    assert isinstance(result.exception, InvalidArgument), result.output
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_refused_before_the_first_measurement(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("tandem.cluster.cli.model._perplexity")
    multimodal = make_tiny_multimodal(tmp_path / "gemma3", "gemma3")
    text = tmp_path / "text"
    text.write_text("a")
    for folder, options, reason in (
        (plain, ["--group-size", "1000"], "--group-size: 1000 does not divide the"),
        (
            plain,
            ["--group-size", "32", "--method", "gptq", "--calibration", str(text)],
            "--calibration: has 1 tokens; the minimum is 2048",
        ),
        (multimodal, ["--group-size", "32"], "config.json: only text models of"),
    ):
        result = CliRunner().invoke(app, ["quantize", str(folder), str(tmp_path / "out"), *options])
        assert isinstance(result.exception, InvalidArgument | CheckpointError), result.output
        assert reason in str(result.exception)


def test_a_disk_without_room_is_refused_before_the_first_measurement(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("tandem.cluster.cli.model._perplexity")
    free = SimpleNamespace(free=1_000)
    monkeypatch.setattr("tandem.cluster.cli.model.shutil.disk_usage", lambda _: free)
    options = ["quantize", str(plain), str(tmp_path / "new" / "out"), "--group-size", "32"]
    result = CliRunner().invoke(app, options)
    assert isinstance(result.exception, Unavailable), result.output
    assert str(result.exception).startswith(f"OUT: {tmp_path} has no room for ")


def test_the_command_says_what_it_costs(plain: Path, tmp_path: Path) -> None:
    text, calibration, out = tmp_path / "text", tmp_path / "calibration", tmp_path / "out"
    text.write_text("Rivers are old. " * 20)
    calibration.write_text(TEXT)
    options = [
        "--group-size",
        "32",
        "--method",
        "gptq",
        "--calibration",
        str(calibration),
        "--text",
        str(text),
    ]
    result = CliRunner().invoke(app, ["quantize", str(plain), str(out), *options])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"{out}: int4, gptq: perplexity ")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 32
    check_checkpoint(out)


def outliers(folder: Path, like: Path) -> Path:
    """Copies a tiny model, and makes the third input of the attention layers 20 times as large."""
    shutil.copytree(like, folder)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("input_layernorm.weight"):
            offset = 1 if "gemma" in (folder / "config.json").read_text() else 0
            tensor[2] = 20 * (tensor[2] + offset) - offset
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere2", "phi3"])
def test_awq_loses_less_than_rounding_to_nearest_where_some_inputs_are_large(
    family: str, tmp_path: Path
) -> None:
    """Compares the hidden states of the folders' weights, as their format defines them."""
    plain = outliers(tmp_path / "plain", make_tiny_model(tmp_path / "tiny", family))
    ids = torch.tensor([prompt(200)])
    errors = []
    for method in ("awq", "rtn"):
        out = tmp_path / method / "out"
        quantize_model(plain, out, SCHEMES["int4"], TEXT if method == "awq" else None, method="awq")
        outputs = []
        for folder in (plain, read_back(out, plain, SCHEMES["int4"])):
            with torch.no_grad():
                outputs.append(reference(folder)(input_ids=ids).logits)
        errors.append(float((outputs[1] - outputs[0]).norm()))
    assert errors[0] < 0.9 * errors[1]


def test_awq_refuses_a_model_that_scaling_would_change(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awq._Layers, "_shrink_norm", lambda self, name, scales: scales)
    with pytest.raises(CheckpointError, match="do not compute the same"):
        quantize_model(
            outliers(tmp_path / "plain", plain),
            tmp_path / "out",
            SCHEMES["int4"],
            TEXT,
            method="awq",
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--scheme", "int3"], "--scheme: must be one of int8, int4, got 'int3'"),
        (["--method", "smooth"], "--method: must be one of rtn, gptq, awq, got 'smooth'"),
        (["--calibration", "text"], "--calibration: needs --method gptq or awq"),
        (["--group-size", "12"], "--group-size: must be a multiple of 8, got 12"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: list[str], reason: str) -> None:
    result = CliRunner().invoke(app, ["quantize", "nothing", str(tmp_path / "out"), *options])
    assert isinstance(result.exception, InvalidArgument)
    assert str(result.exception) == reason
