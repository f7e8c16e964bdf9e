"""Computes gated delta nets (arXiv 2412.06464), which keep a state instead of keys and values."""

from typing import Final

import torch

from ...kv_cache.layout import StatePart
from ...kv_cache.sharding import kv_heads
from ..config import DeltaConfig
from ..module import Module, Parameter, WeightSlice
from ..parallel import TensorParallel
from ..states import mixers
from ..states.steps import StepStates
from .causal_conv import CausalConv
from .linear import BuildOptions, ColumnParallelLinear, Outputs, RowParallelLinear
from .norm import GatedRMSNorm

_KEYS: Final = "conv_key"
_VALUES: Final = "conv_value"
_MATRIX: Final = "matrix"


def delta_states(config: DeltaConfig) -> tuple[StatePart, ...]:
    """Returns the parts of a layer's state: the last inputs of the convolution, and the matrix.

    Query and key are the planes of one part, because they are split over ranks by key heads.
    """
    num_past = config.width - 1
    heads = config.num_value_heads
    return (
        StatePart(
            name=_KEYS,
            num_heads=heads,
            num_kv_heads=config.num_key_heads,
            planes=2,
            row=num_past * config.key_dim,
            dtype="auto",
        ),
        StatePart(
            name=_VALUES,
            num_heads=heads,
            num_kv_heads=heads,
            row=num_past * config.value_dim,
            dtype="auto",
        ),
        StatePart(
            name=_MATRIX,
            num_heads=heads,
            num_kv_heads=heads,
            row=config.key_dim * config.value_dim,
        ),
    )


class DeltaHeads:
    """Holds the heads of a rank, and where they are in the weights of the whole layer."""

    def __init__(self, config: DeltaConfig, tp: TensorParallel) -> None:
        """Raises ValueError if the value heads cannot be split over the ranks."""
        self._config = config
        self.keys = kv_heads(config.num_value_heads, config.num_key_heads, tp.size, tp.rank)
        part = tp.part(config.num_value_heads)
        self.values = range(part.start, part.stop)

    @property
    def value_channels(self) -> slice:
        """Returns the channels of the rank's value heads."""
        dim = self._config.value_dim
        return slice(self.values.start * dim, self.values.stop * dim)

    def convolved(self) -> list[slice]:
        """Returns the rank's channels of query, key and value, as the checkpoint has them."""
        config = self._config
        num_keys = config.num_key_heads * config.key_dim
        keys = [slice(head * config.key_dim, (head + 1) * config.key_dim) for head in self.keys]
        return [
            *joined(keys),
            *joined([slice(num_keys + each.start, num_keys + each.stop) for each in keys]),
            slice(
                2 * num_keys + self.value_channels.start, 2 * num_keys + self.value_channels.stop
            ),
        ]


def joined(slices: list[slice]) -> list[slice]:
    """Joins adjacent slices, so that they are read at once."""
    result: list[slice] = []
    for each in slices:
        if result and result[-1].stop == each.start:
            result[-1] = slice(result[-1].start, each.stop)
        else:
            result.append(each)
    return result


class GatedDeltaNet(Module):
    """Convolves query, key and value, and computes the gated delta rule over them.

    A rank has a part of the value heads, and the key heads that they use.
    """

    def __init__(
        self,
        config: DeltaConfig,
        index: int,
        prefix: str,
        hidden: int,
        epsilon: float,
        build: BuildOptions,
    ) -> None:
        """Raises ValueError if the value heads cannot be split over the ranks."""
        self._config = config
        self._index = index
        heads = DeltaHeads(config, build.tp)
        self._num_heads = (len(heads.keys), len(heads.values))
        channels = 2 * config.num_key_heads * config.key_dim
        num_values = config.num_value_heads * config.value_dim
        channels += num_values
        values = slice(heads.values.start, heads.values.stop)
        self.in_proj_qkvz = ColumnParallelLinear(
            self.inputs(prefix, heads, channels), hidden, build
        )
        self.in_proj_ba = ColumnParallelLinear(self.gates(prefix, heads), hidden, build)
        convolved = [(f"{prefix}.conv1d", channels, kept) for kept in heads.convolved()]
        self.conv1d = CausalConv(convolved, config.width, build, bias=False, silu=True)
        of_heads = ((config.num_value_heads,), (values,))
        self.A_log = Parameter(WeightSlice(f"{prefix}.A_log", *of_heads), dtype=torch.float32)
        self.dt_bias = Parameter(WeightSlice(f"{prefix}.dt_bias", *of_heads), dtype=torch.float32)
        weight = WeightSlice(f"{prefix}.norm.weight", (config.value_dim,))
        self.norm = GatedRMSNorm(weight, config.value_dim, epsilon, build.dtype)
        self.out_proj = RowParallelLinear(
            f"{prefix}.out_proj", hidden, num_values, heads.value_channels, build, bias=False
        )

    def inputs(self, prefix: str, heads: DeltaHeads, channels: int) -> list[Outputs]:
        """Returns the maps of query, key, value and z that the rank keeps."""
        num_values = self._config.num_value_heads * self._config.value_dim
        return [
            *((f"{prefix}.in_proj_qkv", channels, kept) for kept in heads.convolved()),
            (f"{prefix}.in_proj_z", num_values, heads.value_channels),
        ]

    def gates(self, prefix: str, heads: DeltaHeads) -> list[Outputs]:
        """Returns the maps of the gates b and a that the rank keeps."""
        kept = slice(heads.values.start, heads.values.stop)
        return [
            (f"{prefix}.in_proj_{name}", self._config.num_value_heads, kept) for name in ("b", "a")
        ]

    def process_after_load(self) -> None:
        """Computes the rates of the gates, as kernels read them."""
        self._rate = -self.A_log.data.exp()
        del self.A_log

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, states: StepStates
    ) -> torch.Tensor:
        """Maps x [num_tokens, hidden] to the same shape, added to `residual`."""
        config = self._config
        num_tokens = x.shape[0]
        key_heads, heads = self._num_heads
        num_keys = key_heads * config.key_dim
        num_values = heads * config.value_dim
        convolved, z = torch.split(
            self.in_proj_qkvz(x), [2 * num_keys + num_values, num_values], dim=1
        )
        b, a = torch.split(self.in_proj_ba(x), heads, dim=1)
        keys, values, matrix = (
            states.memory(self._index, name).flatten(1, 2) for name in (_KEYS, _VALUES, _MATRIX)
        )
        mixed = self.conv1d(convolved, [keys, values], states.steps)
        query, key, value = torch.split(mixed, [num_keys, num_keys, num_values], dim=1)
        gate, beta = mixers.delta_gates(a, b, self._rate, self.dt_bias.data)
        result = mixers.gated_delta(
            query.view(num_tokens, key_heads, -1),
            key.view(num_tokens, key_heads, -1),
            value.view(num_tokens, heads, -1),
            gate,
            beta,
            matrix,
            states.steps,
            scale=config.key_dim**-0.5,
            normalizes=True,
        )
        normed = self.norm(result, z.view(num_tokens, heads, -1))
        return self.out_proj(normed.flatten(1), residual)


class GroupedGatedDeltaNet(GatedDeltaNet):
    """Reads the maps of query, key, value, z and gates from checkpoints that have them by key head.

    There, each key head is followed by its value heads.
    """

    def inputs(self, prefix: str, heads: DeltaHeads, channels: int) -> list[Outputs]:
        config = self._config
        group = config.num_value_heads // config.num_key_heads
        key_dim = config.key_dim
        values = group * config.value_dim
        size = 2 * key_dim + 2 * values  # of a key head

        def of_values(first: int) -> list[slice]:
            """Returns the rank's values, which begin at `first` in a key head."""
            starts = [
                head // group * size + first + head % group * config.value_dim
                for head in heads.values
            ]
            return [slice(start, start + config.value_dim) for start in starts]

        queries = [slice(head * size, head * size + key_dim) for head in heads.keys]
        keys = [slice(each.stop, each.stop + key_dim) for each in queries]
        kept = [*queries, *keys, *of_values(2 * key_dim), *of_values(2 * key_dim + values)]
        return [
            (f"{prefix}.in_proj_qkvz", config.num_key_heads * size, each) for each in joined(kept)
        ]

    def gates(self, prefix: str, heads: DeltaHeads) -> list[Outputs]:
        config = self._config
        group = config.num_value_heads // config.num_key_heads
        starts = [head // group * 2 * group + head % group for head in heads.values]
        firsts = [start + first for first in (0, group) for start in starts]
        kept = joined([slice(first, first + 1) for first in firsts])
        return [(f"{prefix}.in_proj_ba", 2 * config.num_value_heads, each) for each in kept]
