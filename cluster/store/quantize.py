"""Writes a model with rounded weights in compressed-tensors format, which Tandem and vLLM load."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer

from ...proto.errors import InvalidArgument
from ...proto.home import TOKENIZER_FILE, tokenizer_file
from ...workers.model.config import CheckpointError, read_fields
from ...workers.model.loader import linear_weights, open_checkpoint
from . import pooling
from .awq import round_by_awq
from .folders import publish
from .rounding import Grid, Rounded, damp, round_by_gptq, round_to_nearest

BITS: Final = {"int8": 8, "int4": 4}
_SEQUENCE_TOKENS: Final = 2048
_MAX_SEQUENCES: Final = 16
_WORD_BITS: Final = 32  # numbers are packed into words of this size
_KEPT_SUFFIXES: Final = (".json", ".jinja", ".model", ".txt")
_INDEX_SUFFIX: Final = ".safetensors.index.json"

OnLayer = Callable[[int, int], None]
"""A callback; its arguments are the number of finished layers and of all layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationScheme:
    """Describes how weights are rounded; 4-bit weights have zero points."""

    bits: int
    group_size: int | None  # None: one scale for each output

    @property
    def zero_points(self) -> bool:
        return self.bits == 4

    @property
    def is_packed(self) -> bool:
        """Returns True if numbers are packed into words.

        Bytes with one scale for each output (W8A8) are not.
        """
        return self.bits < 8 or self.group_size is not None

    def grid(self, inputs: int) -> Grid:
        """Returns the grid for weights with this number of inputs."""
        return Grid(
            bits=self.bits, group_size=self.group_size or inputs, zero_points=self.zero_points
        )

    def config(self) -> dict[str, Any]:
        """Returns the quantization_config of config.json."""
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": not self.zero_points,
            "strategy": "channel" if self.group_size is None else "group",
            "dynamic": False,
            "group_size": self.group_size,
        }
        inputs = {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": None if self.is_packed else inputs,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized" if self.is_packed else "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        }

    def tensors(self, name: str, rounded: Rounded) -> dict[str, torch.Tensor]:
        """Returns the stored tensors of the linear map `name`."""
        if not self.is_packed:
            centred = (rounded.numbers ^ 0x80).view(torch.int8)
            return {f"{name}.weight": centred, f"{name}.weight_scale": rounded.scales}
        tensors = {
            f"{name}.weight_packed": self._packed(rounded.numbers),
            f"{name}.weight_scale": rounded.scales,
            f"{name}.weight_shape": torch.tensor(rounded.numbers.shape),
        }
        if self.zero_points:
            zeros = functional.pad(
                rounded.zeros, (0, 0, 0, -len(rounded.zeros) % (_WORD_BITS // self.bits))
            )
            tensors[f"{name}.weight_zero_point"] = self._packed(zeros.t()).t().contiguous()
        return tensors

    def _packed(self, numbers: torch.Tensor) -> torch.Tensor:
        """Packs numbers [rows, columns] uint8 into [rows, words] int32, lowest bits first."""
        if self.bits == 4:
            numbers = numbers[:, 0::2] | numbers[:, 1::2] << 4
        return numbers.contiguous().view(torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundableModel:
    """Describes a checked model."""

    files: list[Path]  # of weights
    stored_names: dict[str, str]  # by the name of a tensor in the model, its name in the files
    names: list[str]  # of the linear maps of the layers, which are rounded
    sequences: torch.Tensor | None  # [sequences, tokens] of the calibration text
    num_bytes: int  # of the rounded model, without scales


def check_roundable(
    folder: Path, scheme: QuantizationScheme, calibration: str | None
) -> RoundableModel:
    """Checks that a model can be rounded, with a calibration text if there is one.

    Reads no weights. Raises CheckpointError for a model that cannot be rounded, InvalidArgument for
    a group size that does not divide the inputs of a map, or a text that is too short.
    """
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    if config.quantization or config.experts or config.transformers or config.text_model_of:
        raise CheckpointError(
            "config.json: only text models of Tandem's families, without quantization or experts, "
            "can be rounded"
        )
    kind = read_fields(folder).text("model_type", "")
    if calibration is not None and kind not in CONFIG_MAPPING:
        raise CheckpointError(
            f"config.json: model_type: {kind!r:.60} is not known to transformers, which computes "
            "the activations of the calibration text; use --method rtn"
        )
    names = linear_weights(config)
    num_bytes = sum(stored.end - stored.begin for stored in checkpoint.tensors.values())
    for name in names:
        weight = checkpoint.tensors[f"{name}.weight"]
        outputs, inputs = weight.shape
        if inputs % (scheme.group_size or 8):
            raise InvalidArgument(
                f"{scheme.group_size or 8} does not divide the {inputs} inputs of {name}",
                "--group-size",
            )
        num_bytes += outputs * inputs * scheme.bits // 8 - (weight.end - weight.begin)
    return RoundableModel(
        stored_names={name: stored.name for name, stored in checkpoint.tensors.items()},
        files=sorted({stored.file for stored in checkpoint.tensors.values()}),
        names=names,
        sequences=None
        if calibration is None
        else _sequences(folder, calibration, config.max_position_embeddings),
        num_bytes=num_bytes,
    )


def quantize_model(
    folder: Path,
    out: Path,
    scheme: QuantizationScheme,
    calibration: str | None = None,
    on_layer: OnLayer = lambda done, total: None,
    *,
    method: Literal["gptq", "awq"] = "gptq",
) -> None:
    """Writes the model of `folder` to `out`, rounded to nearest or, with a text, by a `method`.

    `calibration`: the text for GPTQ or AWQ. `out` must not exist. Rounds the linear maps of the
    layers; embeddings and the head stay unchanged, and norms except by AWQ. Raises as
    `check_roundable`.
    """
    if out.exists():
        raise InvalidArgument(f"{out} exists", "OUT")
    model = check_roundable(folder, scheme, calibration)
    tensors = _rounded_tensors(folder, model, scheme, method, on_layer)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        _copy_others(folder, made, scheme)
        save_torch_state_dict(tensors, made)
        open_checkpoint(made)
        publish(made, out)


def _copy_others(folder: Path, out: Path, scheme: QuantizationScheme) -> None:
    """Copies all files but the weights, and adds the scheme to config.json.

    Copies only chat templates and the pooling of embeddings from subfolders, which may hold the
    model in other formats.
    """
    kept = [path for path in folder.iterdir() if path.name.endswith(_KEPT_SUFFIXES)]
    for path in (*kept, *folder.glob("*/*.jinja"), *folder.glob(pooling.CONFIGS)):
        if path.is_file() and not path.name.endswith(_INDEX_SUFFIX):
            target = out / path.relative_to(folder)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
    shutil.copyfile(tokenizer_file(folder), out / TOKENIZER_FILE)  # it may be in the cache
    path = out / "config.json"
    fields = json.loads(path.read_bytes()) | {"quantization_config": scheme.config()}
    path.write_text(json.dumps(fields, indent=2), encoding="utf-8")


def _rounded_tensors(
    folder: Path, model: RoundableModel, scheme: QuantizationScheme, method: str, on_layer: OnLayer
) -> dict[str, torch.Tensor]:
    """Returns the tensors to write.

    Their names begin as in the files of `folder`, which may name a decoder without its head, or a
    part of a multimodal model.
    """
    stored: dict[str, torch.Tensor] = {}
    for file in model.files:
        stored |= load_file(file)
    tensors = {name: stored[each] for name, each in model.stored_names.items()}
    for name in model.names:
        if not tensors[f"{name}.weight"].isfinite().all():
            raise CheckpointError(f"{name}.weight: contains NaN or infinite numbers")
    rounded = _rounded(folder, tensors, model, scheme, method, on_layer)
    stored |= {model.stored_names[name]: tensor for name, tensor in tensors.items()}
    for name in model.names:
        weight = model.stored_names[f"{name}.weight"]
        del stored[weight]
        stored |= scheme.tensors(weight.removesuffix(".weight"), rounded[name])
    return stored


def _rounded(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    model: RoundableModel,
    scheme: QuantizationScheme,
    method: str,
    on_layer: OnLayer,
) -> dict[str, Rounded]:
    """Returns the rounded weights by name. AWQ also replaces norms and biases in `tensors`."""
    names = model.names
    if model.sequences is None:
        return {
            name: round_to_nearest(weight, scheme.grid(weight.shape[1]))
            for name in names
            for weight in (tensors[f"{name}.weight"],)
        }
    # Not from the files: transformers gives random weights to names that it does not find there.
    config = AutoConfig.from_pretrained(folder)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    plain = model_class.from_pretrained(
        None, config=config, state_dict=tensors, dtype=torch.float32
    )
    plain.eval()
    if method == "gptq":
        return _round_by_gptq(plain, model.sequences, names, scheme, on_layer)
    dtype = tensors[f"{names[0]}.weight"].dtype
    found = round_by_awq(plain, model.sequences, names, scheme.grid, dtype, on_layer)
    tensors |= found.changed
    return found.rounded


def _sequences(folder: Path, calibration: str, context_tokens: int) -> torch.Tensor:
    """Returns the tokens of a calibration text, [sequences, tokens]."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: torch.Tensor = tokenizer(calibration, return_tensors="pt").input_ids[0][
        : _SEQUENCE_TOKENS * _MAX_SEQUENCES
    ]
    length = min(_SEQUENCE_TOKENS, context_tokens)
    if len(ids) < length:
        raise InvalidArgument(f"has {len(ids)} tokens; the minimum is {length}", "--calibration")
    return ids[: len(ids) // length * length].view(-1, length)


def _round_by_gptq(
    model: Any,
    sequences: torch.Tensor,  # [sequences, tokens]
    names: list[str],
    scheme: QuantizationScheme,
    on_layer: OnLayer,
) -> dict[str, Rounded]:
    """Returns the linear maps rounded by GPTQ.

    The inputs of a map are the activations of the sequences after the rounded maps before it, also
    of its own layer.
    """
    found: dict[str, Rounded] = {}
    inputs = _Inputs()
    for name in names:
        _round_when_called(model.get_submodule(name), name, inputs, scheme, found)
    layers = model.get_decoder().layers
    for index, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, done=index + 1: on_layer(done, len(layers)))
    with torch.no_grad():
        model.get_decoder()(input_ids=torch.cat((sequences, sequences)), use_cache=False)
    return found


def _round_when_called(
    module: nn.Linear,
    name: str,
    inputs: "_Inputs",
    scheme: QuantizationScheme,
    found: dict[str, Rounded],
) -> None:
    """Rounds a map when it is called.

    The map multiplies the first half of its inputs by the plain weight, the second half by the
    rounded weight.
    """

    def forward(x: torch.Tensor) -> torch.Tensor:
        target = module.weight + module.weight @ inputs.correction(x)
        found[name] = round_by_gptq(target, inputs.hessian(x), scheme.grid(module.in_features))
        pairs = zip(x.chunk(2), (module.weight, found[name].restored()), strict=True)
        return torch.cat([functional.linear(half, weight, module.bias) for half, weight in pairs])

    module.forward = forward  # type: ignore[method-assign,assignment]


class _Inputs:
    """Computes sums over inputs x [2 * sequences, tokens, inputs], once for maps with equal x.

    The first half of x comes from plain weights, the second half from rounded weights.
    """

    def __init__(self) -> None:
        self._x: torch.Tensor | None = None  # the inputs of the sums
        self._hessian = torch.empty(0)
        self._correction = torch.empty(0)

    def hessian(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of r r^T, [inputs, inputs], over the rounded inputs r."""
        self._sum(x)
        return self._hessian

    def correction(self, x: torch.Tensor) -> torch.Tensor:
        """Returns C [inputs, inputs] that compensates for the rounding errors of the inputs.

        W + W C applied to the rounded inputs equals, in the mean, W applied to the plain inputs
        (GPTAQ, arXiv 2504.02692).
        """
        self._sum(x)
        return self._correction

    def _sum(self, x: torch.Tensor) -> None:
        if x is self._x:
            return
        plain, rounded = (half.flatten(0, -2) for half in x.chunk(2))
        self._x = x
        self._hessian = rounded.t() @ rounded
        moved = (plain - rounded).t() @ rounded
        self._correction = torch.linalg.solve(damp(self._hessian), moved.t().double()).t().float()
