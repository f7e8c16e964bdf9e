"""Builds a model's tree, checks a checkpoint against it, and loads a rank's weights.

One file because the check and the loading walk the same tree and read the same slices.
"""

import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ..host.malloc import use_huge_pages
from .checkpoint import (
    Checkpoint,
    StoredTensor,
    check_tokenizer,
    read_tensors,
    unstack_experts,
    weights_file,
)
from .config import CheckpointError, ModelConfig, plain_name
from .device import DTYPES, enter_device
from .layers.linear import BuildOptions
from .models.family import CausalLM
from .module import Module, Parameter, WeightSlice, all_parameters
from .parallel import Group, TensorParallel
from .quant.base import LinearMethod, PlainLinearMethod
from .registry import (
    check_dense,
    family_of,
    find_linear_method,
    load_model_config,
    with_context,
    with_head,
    with_quantization,
    with_stored_quantization,
)

ReadWeight = Callable[[WeightSlice, torch.Tensor], None]
"""Copies a slice of a weight into a tensor of the slice's shape; dtypes may differ."""

_TORCH_DTYPES: Final = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_FLOATS: Final = ("F32", "BF16", "F16")  # converted to each other
_QUANTIZED: Final = ("weight_packed", "qweight")
_OTHER_QUANTIZATION: Final = (
    "the weights are quantized in another way than quantization_config in config.json says"
)
_NOT_A_LINEAR: Final = (
    "the weight is quantized, but transformers' code of this model supports that only for linear "
    "layers: not for stacked experts, latent projections and weights that it multiplies by itself"
)
_COMPARED_BYTES: Final = 2**24  # bytes of two tensors that are compared at once


def build_model(
    config: ModelConfig,
    dtype: torch.dtype,
    tp: TensorParallel | None = None,
    *,
    batch_invariant: bool = False,
    device_type: str = "cpu",
) -> CausalLM:
    """Builds a rank's tree with parameters on `meta`.

    Without `tp`, the tree has the whole model. `batch_invariant` as in `ModelRunner.load`;
    `device_type` as in `LinearMethod`. Raises ValueError if the heads cannot be split over the
    ranks, CheckpointError if no family has the architecture.
    """
    options = BuildOptions(
        dtype=dtype,
        tp=tp or TensorParallel(),
        linear_method=find_linear_method(
            config, batch_invariant=batch_invariant, device_type=device_type
        ),
        batch_invariant=batch_invariant,
    )
    return family_of(config).build(config, options)


def open_checkpoint(
    folder: Path,
    model_impl: str = "auto",
    *,
    quantization: str | None = None,
    context_tokens: int | None = None,
) -> Checkpoint:
    """Checks that a folder holds a model that can be served; reads only headers of weights.

    `model_impl` as in `find_model`. `quantization` is the linear method to which unquantized
    weights are converted. `context_tokens` is the longest sequence that is served, by default the
    model's. Raises CheckpointError, one line naming file and tensor or field, if something is
    missing, truncated or does not fit config.json.
    """
    config = load_model_config(folder, model_impl)
    stored = read_tensors(folder)
    # A text model alone may have names of the multimodal model: transformers writes them for a
    # Qwen3_5ForCausalLM that it made of a Qwen3_5ForConditionalGeneration.
    plain = {plain_name(name): tensor for name, tensor in stored.items()}
    stored = plain if config.transformers is None else plain | stored
    if config.experts and config.experts.may_be_stacked:
        stored = unstack_experts(stored, config.experts.num_experts)
    config = with_stored_quantization(config, folder, stored)
    if quantization is not None:
        config = with_quantization(config, quantization)
    if context_tokens is not None:
        config = with_context(config, context_tokens)
    check_dense(config, config.context_tokens)
    config, stored = _with_stored_head(config, stored)
    is_linear_only = bool(config.transformers and config.quantization)
    reason = _NOT_A_LINEAR if is_linear_only else _OTHER_QUANTIZATION
    tensors: dict[str, StoredTensor] = {}
    for part, dtype in _weight_slices(config):
        found = _find(part, stored)
        if found is None:
            raise _missing(folder, part.name, stored, reason)
        _check_tensor(found, part, dtype, reason)
        tensors[part.name] = found
    check_tokenizer(folder, config)
    return Checkpoint(folder=folder, config=config, tensors=tensors)


def _find(part: WeightSlice, stored: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """Returns the stored tensor of a slice; None without one.

    A decoder that was saved without its head, such as Qwen3-Embedding and GPT-2, has names without
    their first part: layers.0 instead of model.layers.0.
    """
    names = (part.name, *part.other_names)
    bare = (name.partition(".")[2] for name in names)
    return next((stored[name] for name in (*names, *bare) if name in stored), None)


def _weight_slices(config: ModelConfig) -> list[tuple[WeightSlice, torch.dtype]]:
    """Returns the slices that the model loads, and the dtypes in which it keeps them."""
    parameters = all_parameters(build_model(config, DTYPES[config.dtype]))
    return [(part, parameter.data.dtype) for parameter in parameters for part in parameter.slices]


def _with_stored_head(
    config: ModelConfig, stored: dict[str, StoredTensor]
) -> tuple[ModelConfig, dict[str, StoredTensor]]:
    """Adapts config and tensors to the head that the checkpoint really has.

    As in transformers 5, a stored head that is not a copy of the embedding is used in spite of
    tie_word_embeddings: a training tool has untied them. If only the head is stored, it also
    serves as the embedding. If neither a head nor names of a model with a head are stored, as in
    Qwen3-Embedding-8B, the head is tied: embeddings do not need it.
    """
    if not config.tie_word_embeddings and not any(name.startswith("layers.") for name in stored):
        return config, stored
    with_none = config if config.tie_word_embeddings else with_head(config, is_tied=True)
    tied = {part.name: part for part, _ in _weight_slices(with_none)}
    if stored.keys() <= tied.keys():
        return with_none, stored
    untied = with_head(config, is_tied=False)
    head = [part for part, _ in _weight_slices(untied) if part.name not in tied]
    names = [name for part in head for name in (part.name, *part.other_names)]
    prefixes = tuple({f"{name.rpartition('.')[0]}." for name in names})
    own = [each for name, each in stored.items() if name not in tied and name.startswith(prefixes)]
    if not config.tie_word_embeddings:
        return (config if own else with_none), stored
    embeddings = [part for part in tied.values() if part.shape in {each.shape for each in head}]
    if not own or not embeddings:
        return config, stored
    embedding = _find(embeddings[0], stored)
    if embedding is None:
        return config, {**stored, embeddings[0].name: own[0]}
    return (config if all(_is_equal(each, embedding) for each in own) else untied), stored


def _is_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Returns True if two tensors are equal, bit by bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.begin)
        second.seek(other.begin)
        left = one.end - one.begin
        while left > 0:
            size = min(left, _COMPARED_BYTES)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True


def _missing(
    folder: Path, name: str, stored: Mapping[str, StoredTensor], reason: str
) -> CheckpointError:
    """Returns the error for a missing weight; it mentions a quantized one of that name.

    `reason` says why a quantized weight is not used.
    """
    prefix = f"{name.rpartition('.')[0]}."
    signs = [f"{prefix}{suffix}" for suffix in _QUANTIZED if f"{prefix}{suffix}" in stored]
    text = f"{weights_file(folder)}: {name}: missing"
    if not signs or not name.endswith(".weight"):
        return CheckpointError(text)
    return CheckpointError(f"{text}, but {signs[0]} exists: {reason}")


def check_checkpoint(folder: Path, model_impl: str = "auto") -> ModelConfig:
    """Checks a folder as `open_checkpoint` and returns its config."""
    return open_checkpoint(folder, model_impl).config


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every tensor that the model loads."""
    parameters = all_parameters(build_model(config, DTYPES[config.dtype]))
    return {part.name: part.shape for parameter in parameters for part in parameter.slices}


def linear_weights(config: ModelConfig) -> list[str]:
    """Returns the names of the layers' unquantized linear weights, without the head."""
    modules = build_model(config, DTYPES[config.dtype]).modules()
    methods = [each for each in modules if isinstance(each, PlainLinearMethod)]
    found = dict.fromkeys(part.name for each in methods for part in each.weight.slices)
    return [name.removesuffix(".weight") for name in found if name.startswith("model.layers.")]


def weight_schemes(
    config: ModelConfig, dtype: str, device_type: str = "cpu", *, batch_invariant: bool = False
) -> list[str]:
    """Describes the formats of quantized linear weights and how a device multiplies them."""
    tree = build_model(
        config, DTYPES[dtype], batch_invariant=batch_invariant, device_type=device_type
    )
    modules = tree.modules()
    return sorted({each.scheme() for each in modules if isinstance(each, LinearMethod)} - {""})


def rank_weight_bytes(
    config: ModelConfig,
    dtype: str,
    tp: int,
    rank: int,
    device_type: str = "cpu",
    *,
    batch_invariant: bool = False,
) -> int:
    """Returns the bytes of the weights that a rank keeps. Raises ValueError as `check_split`.

    Quantized weights without a kernel for the device, cpu or cuda, count in `dtype`, because they
    are converted when they are loaded. With `batch_invariant` fewer weights have a kernel on GPUs.
    Does not count the packed copy of a head that is tied to the embedding, in bfloat16 on CPUs.
    """
    ranks = TensorParallel(rank=rank, size=tp)
    tree = build_model(
        config, DTYPES[dtype], ranks, batch_invariant=batch_invariant, device_type=device_type
    )
    saved = sum(module.saved_bytes() for module in tree.modules())
    return sum(parameter.num_bytes for parameter in all_parameters(tree)) - saved


def weight_bytes(
    config: ModelConfig,
    tp: int,
    dtype: str,
    device_type: str = "cpu",
    *,
    batch_invariant: bool = False,
) -> int:
    """Returns the bytes of weights on the largest rank, as `rank_weight_bytes`.

    Parts of a size that is not divisible by `tp` differ by one.
    """
    return max(
        rank_weight_bytes(config, dtype, tp, rank, device_type, batch_invariant=batch_invariant)
        for rank in range(tp)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Holds a rank's part of a model on its device, without a KV cache."""

    checkpoint: Checkpoint
    model: CausalLM
    dtype: str
    device: torch.device
    group: Group | None
    batch_invariant: bool


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: str,
    device: str,
    group: Group | None = None,
    batch_invariant: bool = False,
) -> LoadedModel:
    """Loads a checked model folder; with a group, only this rank's part.

    `dtype` as in `KvLayout`. `device` is an argument of torch.device, and becomes the calling
    thread's device. With `batch_invariant`, on GPUs a token's logits do not depend on batch and
    chunks, bit by bit, at some cost. On CPUs they never do where Tandem's kernels are used. Raises
    ValueError if the model's heads cannot be split over the group.
    """
    enter_device(device)
    target = torch.device(device)
    model = build_model(
        checkpoint.config,
        DTYPES[dtype],
        TensorParallel(group),
        batch_invariant=batch_invariant,
        device_type=target.type,
    )
    load_weights(model, checkpoint_reader(checkpoint), target)
    return LoadedModel(
        checkpoint=checkpoint,
        model=model,
        dtype=dtype,
        device=target,
        group=group,
        batch_invariant=batch_invariant,
    )


def load_weights(model: CausalLM, read: ReadWeight, device: torch.device) -> None:
    """Loads the tree's parameters to `device`, module by module, and processes them."""
    for module in model.modules():
        _fill(module, read, device)
        module.process_after_load()
    if device.type == "cpu":
        use_huge_pages(tensor for module in model.modules() for tensor in module.tensors())


def checkpoint_reader(checkpoint: Checkpoint) -> ReadWeight:
    """Returns a function that reads weights of a checkpoint; it maps each file once.

    Does not use `safetensors.safe_open`, which cannot release the pages that were read: they would
    count as memory of the process until the file is unmapped. Reading raises KeyError if the
    checkpoint has no such tensor, OSError if its file is gone, and CheckpointError if its numbers
    are not finite or out of range.
    """
    maps: dict[Path, mmap.mmap] = {}

    def read(part: WeightSlice, target: torch.Tensor) -> None:
        stored = checkpoint.tensors[part.name]
        if stored.file not in maps:
            # Copy-on-write, since torch requires writable buffers.
            with stored.file.open("rb") as file:
                maps[stored.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        dtype = _TORCH_DTYPES[stored.dtype]
        size = math.prod(stored.shape)
        whole = torch.frombuffer(maps[stored.file], dtype=dtype, count=size, offset=stored.begin)
        target.copy_(whole.view(part.shape)[part.slices])
        if not _is_finite(target):
            raise CheckpointError(
                f"{stored.file.name}: {part.name}: has NaN or infinite numbers in {target.dtype}"
            )
        if part.below is not None and not _is_below(target, part.below):
            raise CheckpointError(
                f"{stored.file.name}: {part.name}: must have numbers from 0 to {part.below - 1}"
            )
        maps[stored.file].madvise(mmap.MADV_DONTNEED)

    return read


def _is_finite(data: torch.Tensor) -> bool:
    """Returns True if all numbers are finite; needs less memory than torch.isfinite."""
    if data.dtype is torch.float8_e4m3fn:  # has NaN but no infinity
        return not bool(((data.view(torch.uint8) & 0x7F) == 0x7F).any())
    if data.dtype not in DTYPES.values() or not data.numel():
        return True
    return all(bool(bound.isfinite()) for bound in data.aminmax())


def _is_below(data: torch.Tensor, bound: int) -> bool:
    low, high = data.aminmax()
    return int(low) >= 0 and int(high) < bound


def _check_tensor(stored: StoredTensor, part: WeightSlice, dtype: torch.dtype, reason: str) -> None:
    where = f"{stored.file.name}: {part.name}"
    # A single number, such as a scale, with or without dimensions.
    is_number = math.prod(stored.shape) == math.prod(part.shape) == 1
    if stored.shape != part.shape and not is_number:
        raise CheckpointError(
            f"{where}: shape is {list(stored.shape)}, config.json requires {list(part.shape)}"
        )
    allowed = tuple(name for name, same in _TORCH_DTYPES.items() if same == dtype)
    allowed = _FLOATS if set(allowed) <= set(_FLOATS) else allowed
    if stored.dtype not in allowed:
        why = f"; {reason}" if allowed == _FLOATS else ""
        raise CheckpointError(
            f"{where}: dtype {stored.dtype[:32]} is not supported, only {', '.join(allowed)}{why}"
        )


def _fill(module: Module, read: ReadWeight, device: torch.device) -> None:
    """Loads a module's parameters, and holds no reference to them afterwards."""
    for parameter in module.parameters():
        if parameter.data.is_meta:
            parameter.data = _read(parameter, read, device)


def _read(parameter: Parameter, read: ReadWeight, device: torch.device) -> torch.Tensor:
    # A copy, even if nothing changes: a tensor over the mapped file would crash the process if the
    # file were truncated.
    data = _empty(tuple(parameter.data.shape), parameter.data.dtype, device)
    for part, target in zip(parameter.slices, parameter.parts(data), strict=True):
        read(part, target)
    return data


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocates a tensor, on CPUs in memory that returns to the system with the tensor.

    Many weights are packed and then dropped. In the heap they left holes of up to a third of a
    rank's memory.
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes].view(dtype).view(shape)
