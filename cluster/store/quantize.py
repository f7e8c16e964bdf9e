"""Writes a model with rounded weights as a folder of compressed-tensors, which Tandem and vLLM load."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...proto.errors import InvalidArgument
from ...workers.model.config import CheckpointError
from ...workers.model.loader import linear_weights, open_checkpoint
from .rounding import Rounded, round_by_gptq, round_to_nearest

BITS: Final = {"int8": 8, "int4": 4}
_SEQUENCE_TOKENS: Final = 1024
_MAX_SEQUENCES: Final = 16
_KEPT_SUFFIXES: Final = (".json", ".jinja", ".model", ".txt")
_INDEX_SUFFIX: Final = ".safetensors.index.json"

OnLayer = Callable[[int, int], None]
"""Is called with the number of layers that are done, and of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationScheme:
    """Says how weights are rounded, symmetrically."""

    bits: int
    group_size: int | None  # None: a scale for each output

    @property
    def is_packed(self) -> bool:
        """Returns whether numbers lie packed in words: weights of a byte with one scale an output do not (W8A8)."""
        return self.bits < 8 or self.group_size is not None

    def config(self) -> dict[str, Any]:
        """Returns the quantization_config."""
        strategy = "channel" if self.group_size is None else "group"
        weights = {"num_bits": self.bits, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": False}
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        group = {
            "targets": ["Linear"],
            "weights": weights | {"group_size": self.group_size},
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
        """Returns what a folder holds of the map `name`."""
        numbers, scales = rounded
        if not self.is_packed:
            return {f"{name}.weight": numbers, f"{name}.weight_scale": scales}
        unsigned = (numbers.short() + 2 ** (self.bits - 1)).to(torch.uint8)
        if self.bits == 4:
            unsigned = unsigned[:, 0::2] | unsigned[:, 1::2] << 4
        return {
            f"{name}.weight_packed": unsigned.contiguous().view(torch.int32),
            f"{name}.weight_scale": scales,
            f"{name}.weight_shape": torch.tensor(numbers.shape),
        }


def quantize_model(
    folder: Path,
    out: Path,
    scheme: QuantizationScheme,
    calibration: str | None = None,
    on_layer: OnLayer = lambda done, total: None,
) -> None:
    """Writes the model of `folder` to `out`, which must not exist: rounded to nearest, or with a `calibration` text by
    GPTQ. What is rounded are the linear maps of the layers; embeddings, norms and the head stay as they are.

    Raises CheckpointError for a model that cannot be rounded, InvalidArgument for an argument that does not suit it."""
    if out.exists():
        raise InvalidArgument(f"{out} exists", "OUT")
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    if config.quantization or config.experts or config.transformers:
        raise CheckpointError(
            "config.json: only plain weights of families of Tandem's own, without experts, are rounded"
        )
    names = linear_weights(config)
    for name in names:
        inputs = checkpoint.tensors[f"{name}.weight"].shape[1]
        if inputs % (scheme.group_size or 8):
            raise InvalidArgument(
                f"{scheme.group_size or 8} does not divide the {inputs} inputs of {name}", "--group-size"
            )
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted({stored.file for stored in checkpoint.tensors.values()}):
        tensors |= load_file(file)
    if calibration is None:
        for name in names:
            weight = tensors.pop(f"{name}.weight")
            rounded = round_to_nearest(weight, scheme.bits, scheme.group_size or weight.shape[1])
            tensors |= scheme.tensors(name, rounded)
    else:
        for name, rounded in _round_layers(folder, names, scheme, calibration, on_layer):
            del tensors[f"{name}.weight"]
            tensors |= scheme.tensors(name, rounded)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        _copy_others(folder, made, scheme)
        save_torch_state_dict(tensors, made)
        open_checkpoint(made)
        os.rename(made, out)


def _copy_others(folder: Path, out: Path, scheme: QuantizationScheme) -> None:
    """Copies all but the weights, with the scheme in config.json."""
    for path in folder.iterdir():
        if path.is_file() and path.name.endswith(_KEPT_SUFFIXES) and not path.name.endswith(_INDEX_SUFFIX):
            shutil.copyfile(path, out / path.name)
    path = out / "config.json"
    fields = json.loads(path.read_bytes()) | {"quantization_config": scheme.config()}
    path.write_text(json.dumps(fields, indent=2), encoding="utf-8")


def _round_layers(
    folder: Path, names: list[str], scheme: QuantizationScheme, calibration: str, on_layer: OnLayer
) -> Iterator[tuple[str, Rounded]]:
    """Yields the maps rounded by GPTQ, layer by layer: each layer sees what the rounded ones before it make of the
    calibration text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    ids = tokenizer(calibration, return_tensors="pt").input_ids[0][: _SEQUENCE_TOKENS * _MAX_SEQUENCES]
    length = min(_SEQUENCE_TOKENS, model.config.max_position_embeddings)
    if len(ids) < length:
        raise InvalidArgument(f"has {len(ids)} tokens, fewer than {length}", "--calibration")
    batch = ids[: len(ids) // length * length].view(-1, length)
    layers = model.get_decoder().layers
    wanted: dict[Any, str] = {model.get_submodule(name): name for name in names}
    found: list[tuple[str, Rounded]] = []

    def install(index: int, layer: Any) -> None:
        plain = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            maps = [module for module in layer.modules() if module in wanted]
            with _hessians(maps) as hessians:
                plain(*args, **kwargs)
            for module, hessian in zip(maps, hessians, strict=True):
                weight = module.weight.data
                size = scheme.group_size or weight.shape[1]
                numbers, scales = round_by_gptq(weight, hessian, scheme.bits, size)
                weight.copy_(numbers * scales.float().repeat_interleave(size, dim=1))
                found.append((wanted[module], (numbers, scales)))
            on_layer(index + 1, len(layers))
            return plain(*args, **kwargs)

        layer.forward = forward

    for index, layer in enumerate(layers):
        install(index, layer)
    with torch.no_grad():
        model.get_decoder()(input_ids=batch, use_cache=False)
    yield from found


@contextmanager
def _hessians(maps: list[nn.Linear]) -> Iterator[list[torch.Tensor]]:
    """Adds up x x^T of the inputs of each map, [inputs, inputs], while the context is open."""
    sums = [torch.zeros(each.in_features, each.in_features) for each in maps]

    def hook(total: torch.Tensor) -> Any:
        def add(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0].flatten(0, -2)
            total.addmm_(x.t(), x)

        return add

    handles = [each.register_forward_pre_hook(hook(total)) for each, total in zip(maps, sums, strict=True)]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()
