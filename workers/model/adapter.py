"""Loads LoRA adapters: checks their weights against the model's layers and keeps a rank's part."""

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Final, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors

from ..engine.plan import StepPlan
from .adapter_folder import CONFIG_FILE, WEIGHTS_FILE, AdapterFolder
from .config import CheckpointError, ModelConfig, plain_name
from .device import DTYPES, indices
from .kernels.c.low_rank import PANEL, LowRankPairs, can_multiply
from .layers.lora import (
    AdapterRows,
    Factors,
    LoraStep,
    LowRankMap,
    LowRankShape,
    combine_factors,
)
from .loader import build_model

_PREFIX: Final = "base_model.model."
_SUFFIXES: Final = (".lora_A.weight", ".lora_B.weight")
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class Adapter(NamedTuple):
    """Holds a rank's part of an adapter, by the numbers of the layers in `LoraStep.layers`."""

    pairs: LowRankPairs | None  # for the kernels; None: they do not support it
    shape: LowRankShape  # of a step whose rows use the pairs
    maps: Mapping[int, LowRankMap]  # without pairs


def load_adapter(
    folder: AdapterFolder,
    step: LoraStep | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool,
) -> Adapter:
    """Loads a rank's part of an adapter for the model whose layers are registered in `step`.

    Raises CheckpointError, one line naming file and tensor, if the weights do not fit the model.
    """
    factors = _read_factors(folder, _sizes(step))
    layers = step.layers if step else []
    combined = {
        number: combine_factors(part, factors.get, folder.scale, alternates=method.fuses_gate)
        for number, (part, method) in enumerate(layers)
        if any(name in factors for name, *_ in part.outputs)
    }
    # By all layers of the rank, so that all adapters of a step have the same form.
    if device.type == "cpu" and all(can_multiply(dtype, part.local_shape[1]) for part, _ in layers):
        pairs = LowRankPairs(len(layers))
        for number, (down, up) in combined.items():
            pairs.add(number, down.to(dtype), up.to(dtype))
        width = max((len(down) for down, _ in combined.values()), default=0)
        return Adapter(pairs, LowRankShape(frozenset(combined), -(-width // PANEL) * PANEL), {})
    make = partial(LowRankMap, dtype=dtype, device=device, batch_invariant=batch_invariant)
    return Adapter(None, LowRankShape(), {number: make(each) for number, each in combined.items()})


def _sizes(step: LoraStep | None) -> dict[str, tuple[int, int]]:
    """Returns the numbers of outputs and inputs of each adaptable weight, by its name."""
    if step is None:
        raise CheckpointError(
            f"{CONFIG_FILE}: peft_type: the implementation of this model does not support adapters"
        )
    return {
        name: (size, part.num_inputs) for part, _ in step.layers for name, size, _ in part.outputs
    }


def _read_factors(
    folder: AdapterFolder, sizes: Mapping[str, tuple[int, int]]
) -> dict[str, Factors]:
    """Returns the factors by the weights' names; `sizes` has the outputs and inputs of each."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in sorted(_parse(folder.weights).items()):
        suffix = next(filter(name.endswith, _SUFFIXES), "")
        layer = _checkpoint_name(name.removeprefix(_PREFIX).removesuffix(suffix), sizes)
        if not suffix or layer not in sizes:
            raise CheckpointError(
                f"{WEIGHTS_FILE}: {name[:160]}: this model has no such linear layer to adapt"
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
        raise CheckpointError(f"{WEIGHTS_FILE}: has no tensors")
    return {layer: (pair[_SUFFIXES[0]], pair[_SUFFIXES[1]]) for layer, pair in found.items()}


def _checkpoint_name(layer: str, sizes: Mapping[str, tuple[int, int]]) -> str:
    """Returns the name that a layer of an adapter has in the model's checkpoint.

    Checkpoints of Nemotron-H call the decoder backbone; transformers and peft call it model. An
    adapter that was trained on a decoder without a head, for embeddings, has names without this
    first part. An adapter may also have the names of the multimodal model of which the text model
    is served.
    """
    bare = f"model.{layer}"
    decoder = f"backbone.{layer.removeprefix('model.')}"
    names = (layer, bare, decoder, plain_name(layer), plain_name(bare))
    return next((name for name in names if name in sizes), layer)


def _parse(weights: bytes) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = parse_safetensors(weights)
    except (SafetensorError, KeyError, ValueError, RuntimeError, struct.error) as error:
        raise CheckpointError(f"{WEIGHTS_FILE}: truncated, or not in safetensors format") from error
    return tensors


def _check(name: str, tensor: torch.Tensor, expected: tuple[int, int]) -> None:
    where = f"{WEIGHTS_FILE}: {name}"
    if tensor.shape != expected:
        raise CheckpointError(
            f"{where}: shape is {list(tensor.shape)}, the model and r in {CONFIG_FILE} require "
            f"{list(expected)}"
        )
    if tensor.dtype not in _DTYPES:
        raise CheckpointError(
            f"{where}: dtype {str(tensor.dtype).removeprefix('torch.')} is not supported"
        )
    if not tensor.isfinite().all():
        raise CheckpointError(f"{where}: contains NaN or infinity")


def check_adapter(folder: AdapterFolder, config: ModelConfig) -> None:
    """Raises CheckpointError as `load_adapter` would for the model without tensor parallelism."""
    _read_factors(folder, _sizes(build_model(config, DTYPES[config.dtype]).lora))


class AdapterTable:
    """Holds the adapters that a rank has loaded, and the adapter of each sequence.

    `load` may be called from any thread, the other methods only from the runner's thread. An
    unloaded adapter stays in memory until the sequences that use it have ended.
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
        """Loads an adapter under a number that was never used. Raises CheckpointError."""
        self._loaded[number] = self._load(folder)

    def unload(self, number: int) -> None:
        """Drops an adapter. Ignores an unknown number."""
        self._loaded.pop(number, None)

    def admit(self, sequence_id: int, number: int) -> None:
        """Assigns an adapter to a sequence; 0 is none. Raises KeyError if it is not loaded."""
        self._of_sequence.pop(sequence_id, None)
        if number:
            self._of_sequence[sequence_id] = self._loaded[number]

    def release(self, sequence_id: int) -> None:
        """Removes a sequence. Ignores an unknown one."""
        self._of_sequence.pop(sequence_id, None)

    @contextmanager
    def applied(self, plan: StepPlan) -> Iterator[bool]:
        """Applies the adapters of a plan's sequences within the context.

        Yields whether any sequence has an adapter.
        """
        if self._lora is None or not self._of_sequence:
            yield False
            return
        runs: list[tuple[int, int, Adapter | None]] = []  # adjacent rows of the same adapter
        end = 0
        for step in plan.sequences:
            begin = end
            end += len(step.token_ids)
            adapter = self._of_sequence.get(step.sequence_id)
            if runs and runs[-1][2] is adapter:
                begin = runs.pop()[0]
            runs.append((begin, end - begin, adapter))
        found = list({id(each): each for *_, each in runs if each is not None}.values())
        if found and all(each.pairs is not None for each in found):
            self._lora.rows.fill(
                [(first, count, each.pairs if each else None) for first, count, each in runs]
            )
            self._lora.shape = reduce(LowRankShape.joined, (each.shape for each in found))
        else:
            self._lora.adapters = tuple(
                AdapterRows(_rows_of(adapter, runs, self._device), adapter.maps)
                for adapter in found
            )
        try:
            yield bool(found)
        finally:
            self._lora.adapters = ()
            self._lora.shape = None


def _rows_of(
    adapter: Adapter, runs: Sequence[tuple[int, int, Adapter | None]], device: torch.device
) -> slice | torch.Tensor:
    """Returns the rows of an adapter: a slice if they are adjacent, else an index tensor."""
    numbers = [
        row for begin, count, each in runs if each is adapter for row in range(begin, begin + count)
    ]
    first = numbers[0]
    last = numbers[-1]
    return slice(first, last + 1) if last - first + 1 == len(numbers) else indices(numbers, device)
