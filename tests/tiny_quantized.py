"""Writes tiny models in quantised formats of checkpoints, each beside the same model with the
weights that its numbers stand for. Both are made from the formats' definitions, without the code
under test.
"""

import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_decoders import make_tiny_decoder

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
}
FLOAT8: Final = torch.float8_e4m3fn

Array = np.ndarray[Any, Any]
Tensors = dict[str, torch.Tensor]


class Numbers(NamedTuple):
    """A weight as integers: number - zero, times scale."""

    numbers: Array  # [outputs, inputs] of 0..2**bits-1
    scales: torch.Tensor  # [outputs, groups]
    zeros: Array  # [outputs, groups]
    groups: Array  # [inputs], the group of each

    def restored(self) -> torch.Tensor:
        centred = torch.from_numpy(self.numbers - self.zeros[:, self.groups]).double()
        return (centred * self.scales.double()[:, self.groups]).float()


def rounded(
    weight: torch.Tensor, bits: int, group_size: int, symmetric: bool, act_order: bool = False
) -> Numbers:
    """Rounds to nearest, with scales that float16 and bfloat16 have both; `act_order` shuffles the
    groups.
    """
    data = weight.double().numpy()
    outputs, inputs = data.shape
    groups = np.arange(inputs) // group_size
    if act_order:
        groups = np.random.default_rng(inputs).permutation(groups)
    scales, zeros = np.empty((2, outputs, groups.max() + 1))
    for group in range(groups.max() + 1):
        part = data[:, groups == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            high = np.maximum(high, -low)
            low = -high
        scale = torch.from_numpy((high - low) / (2**bits - 1)).bfloat16().half().double().numpy()
        scales[:, group] = scale
        zeros[:, group] = (
            2 ** (bits - 1) if symmetric else np.clip(np.rint(-low / scale), 0, 2**bits - 1)
        )
    numbers = np.clip(np.rint(data / scales[:, groups]) + zeros[:, groups], 0, 2**bits - 1)
    return Numbers(
        numbers.astype(np.int64), torch.from_numpy(scales).float(), zeros.astype(np.int64), groups
    )


def pack(
    numbers: Array, bits: int, axis: int, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Packs numbers along an axis into words of 32 bits, number order[j] of each word in its jth
    lowest bits.
    """
    per_word = 32 // bits
    moved = np.moveaxis(numbers, axis, -1)
    moved = np.pad(moved, [(0, 0), (0, -moved.shape[-1] % per_word)])
    words = np.zeros((moved.shape[0], moved.shape[-1] // per_word), dtype=np.int64)
    for place, number in enumerate(order or range(per_word)):
        words |= moved[:, number::per_word] << bits * place
    return torch.from_numpy(np.moveaxis(words, -1, axis).astype(np.uint32).view(np.int32).copy())


def gptq(name: str, weight: torch.Tensor, config: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    bits, size = config["bits"], config["group_size"]
    made = rounded(
        weight, bits, weight.shape[1] if size < 0 else size, config["sym"], config["desc_act"]
    )
    stored_zeros = made.zeros - (config["checkpoint_format"] == "gptq") & 2**bits - 1
    return {
        f"{name}.qweight": pack(made.numbers.T, bits, 0),
        f"{name}.qzeros": pack(stored_zeros.T, bits, 1),
        f"{name}.scales": made.scales.T.half().contiguous(),
        f"{name}.g_idx": torch.from_numpy(made.groups).int(),
    }, made.restored()


def awq(name: str, weight: torch.Tensor, config: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    made = rounded(weight, 4, config["group_size"], symmetric=not config["zero_point"])
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        f"{name}.qweight": pack(made.numbers.T, 4, 1, order),
        f"{name}.qzeros": pack(made.zeros.T, 4, 1, order),
        f"{name}.scales": made.scales.T.half().contiguous(),
    }, made.restored()


def compressed(
    name: str, weight: torch.Tensor, config: dict[str, Any]
) -> tuple[Tensors, torch.Tensor]:
    (group,) = config["config_groups"].values()
    args = group["weights"]
    if args["type"] == "float":
        blocks = {"channel": (1, None), "tensor": (None, None), "group": (1, args["group_size"])}
        block = (blocks | {"block": args.get("block_structure")})[args["strategy"]]
        stored, scales, restored = float8(weight, *block)
        scales = scales.flatten() if args["strategy"] == "tensor" else scales
        return {f"{name}.weight": stored, f"{name}.weight_scale": scales}, restored
    bits, size, act_order = (
        args["num_bits"],
        args["group_size"] or weight.shape[1],
        args["actorder"] == "group",
    )
    made = rounded(weight, bits, size, args["symmetric"], act_order)
    tensors = {f"{name}.weight_scale": made.scales.bfloat16()}
    if config["format"] == "int-quantized":
        tensors[f"{name}.weight"] = torch.from_numpy(made.numbers - 2 ** (bits - 1)).to(torch.int8)
        zeros = torch.from_numpy(made.zeros - 2 ** (bits - 1)).to(torch.int8)
    else:
        tensors[f"{name}.weight_packed"] = pack(made.numbers, bits, 1)
        tensors[f"{name}.weight_shape"] = torch.tensor(weight.shape)
        zeros = pack(made.zeros, bits, 0)
    if not args["symmetric"]:
        tensors[f"{name}.weight_zero_point"] = zeros
    if act_order:
        tensors[f"{name}.weight_g_idx"] = torch.from_numpy(made.groups).int()
    return tensors, made.restored()


def float8(
    weight: torch.Tensor, outputs: int | None, inputs: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns numbers, scales of blocks, and what they stand for."""
    rows, columns = (
        np.arange(size) // (block or size)
        for size, block in zip(weight.shape, (outputs, inputs), strict=True)
    )
    scales = torch.zeros(rows.max() + 1, columns.max() + 1)
    for row in range(len(scales)):
        for column in range(scales.shape[1]):
            scales[row, column] = weight[rows == row][:, columns == column].abs().max() / 448
    expanded = scales[rows][:, columns]
    stored = (weight / expanded).to(FLOAT8)
    return stored, scales, stored.float() * expanded


def block_float8(
    name: str, weight: torch.Tensor, config: dict[str, Any]
) -> tuple[Tensors, torch.Tensor]:
    stored, scales, restored = float8(weight, *config["weight_block_size"])
    return {f"{name}.weight": stored, f"{name}.weight_scale_inv": scales}, restored


def gptq_config(
    bits: int = 4, size: int = 64, *, sym: bool = True, order: bool = False, v: str = ""
) -> dict[str, Any]:
    fields = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "sym": sym,
        "desc_act": order,
    }
    return fields | {"checkpoint_format": f"gptq{v}", "lm_head": False, "damp_percent": 0.01}


def compressed_config(
    form: str,
    bits: int,
    strategy: str,
    size: int | None = None,
    *,
    sym: bool = True,
    order: str | None = None,
    kind: str = "int",
    activations: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "group_size": size,
        "symmetric": sym,
    }
    weights |= {"actorder": order, "dynamic": False, "observer": "minmax"} | more
    inputs = {
        "num_bits": activations,
        "type": kind,
        "strategy": "token",
        "dynamic": True,
        "symmetric": True,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs if activations else None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


AWQ: Final = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 64,
    "zero_point": True,
    "version": "gemm",
}
FP8: Final = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [48, 32],
}

FORMATS: Final[dict[str, dict[str, Any]]] = {
    "W8A8 channels": compressed_config("int-quantized", 8, "channel", activations=8),
    "W8A8 groups": compressed_config("int-quantized", 8, "group", 64, activations=8),
    "W8A8 asymmetric": compressed_config("int-quantized", 8, "channel", sym=False, activations=8),
    "W4A8": compressed_config("int-quantized", 4, "group", 32, activations=8),
    "W8A16 channels": compressed_config("pack-quantized", 8, "channel"),
    "W8A16 groups": compressed_config("pack-quantized", 8, "group", 128),
    **{
        f"W4A16 {size}": compressed_config("pack-quantized", 4, "group", size)
        for size in (32, 64, 128)
    },
    "W4A16 channels": compressed_config("pack-quantized", 4, "channel"),
    "W4A16 asymmetric": compressed_config("pack-quantized", 4, "group", 64, sym=False),
    "W4A16 act-order": compressed_config("pack-quantized", 4, "group", 32, order="group"),
    "W4A16 static order": compressed_config("pack-quantized", 4, "group", 32, order="static"),
    "FP8 channels": compressed_config("float-quantized", 8, "channel", kind="float", activations=8),
    "FP8 tensor": compressed_config("float-quantized", 8, "tensor", kind="float", activations=8),
    "FP8 groups": compressed_config("float-quantized", 8, "group", 64, kind="float", activations=8),
    "FP8 blocks": compressed_config(
        "float-quantized", 8, "block", kind="float", block_structure=[32, 48]
    ),
    "fp8": FP8,
    "GPTQ": gptq_config(),
    "GPTQ asymmetric": gptq_config(size=32, sym=False),
    "GPTQ v2": gptq_config(sym=False, v="_v2"),
    "GPTQ channels": gptq_config(size=-1),
    "GPTQ 8": gptq_config(8, 128),
    "GPTQ 8 asymmetric": gptq_config(8, 32, sym=False),
    "GPTQ act-order": gptq_config(size=32, sym=False, order=True),
    "AWQ": AWQ,
    "AWQ symmetric": AWQ | {"zero_point": False},
}
DEQUANTISED: Final = {name for name in FORMATS if "act-order" in name}
"""Those that no kernel takes."""
FLOATS: Final = {name for name in FORMATS if "FP8" in name or name == "fp8"}

_WRITERS: Final[
    dict[str, Callable[[str, torch.Tensor, dict[str, Any]], tuple[Tensors, torch.Tensor]]]
] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed,
    "fp8": block_float8,
}


def make_quantized_model(
    folder: Path, config: dict[str, Any], **overrides: Any
) -> tuple[Path, Path]:
    """Writes a tiny model in the format of a quantization_config. Returns its folder and that of
    the same model with the plain weights that its numbers stand for.
    """
    quantized, plain = (
        make_tiny_model(folder / name, **(SIZES | overrides)) for name in ("quantized", "plain")
    )
    quantize(quantized, plain, config, [name for name in _weights(plain) if "_proj.weight" in name])
    return quantized, plain


def make_quantized_decoder(
    folder: Path,
    kind: str,
    config: dict[str, Any],
    *,
    names: str = r"layers\.",
    make: Callable[..., Path] = make_tiny_decoder,
    **overrides: Any,
) -> tuple[Path, Path]:
    """Does the same for a `model_type` of transformers, whose weights with these `names`, as a
    pattern, are quantised. The config excludes all other linear layers of the decoder from it.
    """
    quantized, plain = (
        make(folder / name, kind, **(SIZES | overrides)) for name in ("quantized", "plain")
    )
    linears = [name for name, each in _weights(plain).items() if _is_linear(name, each)]
    chosen = [name for name in linears if re.search(names, name)]
    left_out = [name.removesuffix(".weight") for name in linears if name not in chosen]
    field = "ignore" if "ignore" in config else "modules_to_not_convert"
    quantize(quantized, plain, config | {field: left_out}, chosen)
    return quantized, plain


def _is_linear(name: str, weight: torch.Tensor) -> bool:
    return name.endswith(".weight") and weight.ndim == 2 and not re.search(r"embed_(tok|in)", name)


def _weights(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def quantize(quantized: Path, plain: Path, config: dict[str, Any], names: Collection[str]) -> None:
    """Quantises the weights `names` of two folders of the same model: one keeps the numbers, the
    other the weights that they stand for.
    """
    stored: Tensors = {}
    restored: Tensors = {}
    for name, weight in _weights(plain).items():
        if name in names:
            tensors, restored[name] = _WRITERS[config["quant_method"]](
                name.removesuffix(".weight"), weight, config
            )
            stored |= tensors
        else:
            stored[name] = restored[name] = weight
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    save_file(restored, plain / "model.safetensors", {"format": "pt"})
    set_quantization(quantized, config)


def set_quantization(folder: Path, config: dict[str, Any]) -> None:
    """Writes the quantization_config of a folder."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
