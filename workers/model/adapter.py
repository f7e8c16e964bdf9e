"""Loads LoRA adapters of a model: checks their weights against its layers, and makes the maps of a
rank.
"""

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as save_safetensors

from ..engine.plan import StepPlan
from .adapter_folder import CONFIG_FILE, WEIGHTS_FILE, AdapterFolder
from .config import CheckpointError, ModelConfig
from .device import DTYPES, indices
from .layers.lora import AdapterRows, Factors, LoraStep, LowRankMap
from .loader import build_model

_PREFIX: Final = "base_model.model."
_SUFFIXES: Final = (".lora_A.weight", ".lora_B.weight")
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

Adapter = Mapping[int, LowRankMap]
"""What an adapter changes, by the numbers of the layers in `LoraStep.layers`."""


def load_adapter(
    folder: AdapterFolder,
    step: LoraStep | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool,
) -> Adapter:
    """Loads a rank's part of an adapter of the model whose layers have joined `step`. Raises
    CheckpointError, one line naming file and tensor, if the weights are not those of such an
    adapter.
    """
    factors = _read_factors(folder, _sizes(step))
    make = partial(LowRankMap, dtype=dtype, device=device, batch_invariant=batch_invariant)
    return {
        number: make(part, factors.get, folder.scale, alternates=method.fuses_gate)
        for number, (part, method) in enumerate(step.layers if step else ())
        if any(name in factors for name, *_ in part.outputs)
    }


def _sizes(step: LoraStep | None) -> dict[str, tuple[int, int]]:
    """Returns the numbers of outputs and inputs of the maps that adapters may change, by their
    names.
    """
    if step is None:
        raise CheckpointError(
            f"{CONFIG_FILE}: peft_type: this model runs by code that takes no adapters"
        )
    return {
        name: (size, part.num_inputs) for part, _ in step.layers for name, size, _ in part.outputs
    }


def _read_factors(
    folder: AdapterFolder, sizes: Mapping[str, tuple[int, int]]
) -> dict[str, Factors]:
    """Returns the factors by the names of the maps, whose numbers of outputs and inputs are
    `sizes`.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in sorted(_parse(folder.weights).items()):
        suffix = next(filter(name.endswith, _SUFFIXES), "")
        layer = name.removeprefix(_PREFIX).removesuffix(suffix)
        if not suffix or layer not in sizes:
            raise CheckpointError(
                f"{WEIGHTS_FILE}: {name[:160]}: adapts no linear layer of this model's layers"
            )
        outputs, inputs = sizes[layer]
        expected = (folder.rank, inputs) if suffix == _SUFFIXES[0] else (outputs, folder.rank)
        _check(name, tensor, expected)
        found.setdefault(layer, {})[suffix] = tensor
    for layer, pair in found.items():
        for suffix in _SUFFIXES:
            if suffix not in pair:
                raise CheckpointError(f"{WEIGHTS_FILE}: {_PREFIX}{layer}{suffix}: missing")
    if not found:
        raise CheckpointError(f"{WEIGHTS_FILE}: has no tensor")
    return {layer: (pair[_SUFFIXES[0]], pair[_SUFFIXES[1]]) for layer, pair in found.items()}


def _parse(weights: bytes) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = parse_safetensors(weights)
    except (SafetensorError, KeyError, ValueError, RuntimeError, struct.error) as error:
        raise CheckpointError(f"{WEIGHTS_FILE}: truncated, or not in safetensors format") from error
    return tensors


def _check(name: str, tensor: torch.Tensor, expected: tuple[int, int]) -> None:
    where = f"{WEIGHTS_FILE}: {name}"
    if tensor.shape != expected:
        problem = f"shape is {list(tensor.shape)}, the model and r in {CONFIG_FILE} ask for {list(expected)}"
        raise CheckpointError(f"{where}: {problem}")
    if tensor.dtype not in _DTYPES:
        raise CheckpointError(
            f"{where}: dtype {str(tensor.dtype).removeprefix('torch.')} is not supported"
        )
    if not tensor.isfinite().all():
        raise CheckpointError(f"{where}: has a number that is not finite")


def check_adapter(folder: AdapterFolder, config: ModelConfig) -> None:
    """Raises CheckpointError as `load_adapter` would for the whole model."""
    _read_factors(folder, _sizes(build_model(config, DTYPES[config.dtype]).lora))


def random_adapter(config: ModelConfig, rank: int) -> AdapterFolder:
    """Returns an adapter of all linear layers that changes next to nothing, for benchmarks."""
    tensors = {}
    for name, (outputs, inputs) in _sizes(build_model(config, DTYPES[config.dtype]).lora).items():
        tensors[f"{_PREFIX}{name}{_SUFFIXES[0]}"] = (
            torch.randn(rank, inputs, dtype=torch.bfloat16) * inputs**-0.5
        )
        tensors[f"{_PREFIX}{name}{_SUFFIXES[1]}"] = (
            torch.randn(outputs, rank, dtype=torch.bfloat16) * 1e-3
        )
    return AdapterFolder(
        rank=rank, scale=1.0, weights=save_safetensors(tensors), fingerprint=bytes(16)
    )


class AdapterTable:
    """Keeps the adapters that a rank has loaded, and which of its sequences use which.

    `load` may be called from any thread, the others from the runner's. An adapter that is unloaded
    goes on for the sequences that use it.
    """

    def __init__(
        self,
        lora: LoraStep | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self._lora = lora
        self._device = device or torch.device("cpu")
        self._load = partial(
            load_adapter,
            step=lora,
            dtype=dtype,
            device=self._device,
            batch_invariant=batch_invariant,
        )
        self._loaded: dict[int, Adapter] = {}  # by number
        self._of_sequence: dict[int, Adapter] = {}

    def load(self, number: int, folder: AdapterFolder) -> None:
        """Takes an adapter, under a number that none had before. Raises CheckpointError as
        `load_adapter`.
        """
        self._loaded[number] = self._load(folder)

    def unload(self, number: int) -> None:
        """Lets go of an adapter. Ignores an unknown one."""
        self._loaded.pop(number, None)

    def admit(self, sequence_id: int, number: int) -> None:
        """Has a sequence use the adapter of this number, none if it is 0. Raises KeyError if it is
        not loaded.
        """
        self._of_sequence.pop(sequence_id, None)
        if number:
            self._of_sequence[sequence_id] = self._loaded[number]

    def release(self, sequence_id: int) -> None:
        """Forgets a sequence. Ignores an unknown one."""
        self._of_sequence.pop(sequence_id, None)

    @contextmanager
    def applied(self, plan: StepPlan) -> Iterator[bool]:
        """Has the model's layers apply the adapters of a plan's sequences to their tokens, and
        yields whether there are any.
        """
        if self._lora is None or not self._of_sequence:
            yield False
            return
        rows: dict[int, list[int]] = {}  # by identity of the adapter
        adapters: dict[int, Adapter] = {}
        end = 0
        for step in plan.sequences:
            begin, end = end, end + len(step.token_ids)
            if (adapter := self._of_sequence.get(step.sequence_id)) is not None:
                adapters[id(adapter)] = adapter
                rows.setdefault(id(adapter), []).extend(range(begin, end))
        found = [
            AdapterRows(_rows(rows[key], self._device), adapter)
            for key, adapter in adapters.items()
        ]
        self._lora.adapters = tuple(found)
        try:
            yield bool(found)
        finally:
            self._lora.adapters = ()


def _rows(numbers: list[int], device: torch.device) -> slice | torch.Tensor:
    """Returns ascending numbers as what takes these rows of a tensor, without a copy where it can."""
    first, last = numbers[0], numbers[-1]
    return slice(first, last + 1) if last - first + 1 == len(numbers) else indices(numbers, device)
