"""Computes the mixers of Mamba 2 (arXiv 2405.21060), as Granite 4 and Nemotron-H use them."""

from typing import Final

import torch

from ...kv_cache.layout import StatePart
from ..config import Mamba2Config, ModelConfig
from ..module import Module, Parameter, WeightSlice
from ..states import mixers
from ..states.steps import StepStates
from .causal_conv import CausalConv
from .linear import BuildOptions, ColumnParallelLinear, RowParallelLinear, split_outputs
from .norm import GatedRMSNorm, SharedGatedRMSNorm

_MATRIX: Final = "matrix"
_CONV_X: Final = "conv_x"
_CONV_BC: Final = "conv_bc"


def mamba2_states(own: Mamba2Config) -> tuple[StatePart, ...]:
    """Returns the parts of a mixer's state: the matrix, and the last inputs of the convolution.

    B and C are the planes of one part. They have heads as keys have: a group of heads reads each.
    """
    heads = own.num_heads
    past = own.conv_width - 1
    return (
        StatePart(
            name=_MATRIX,
            num_heads=heads,
            num_kv_heads=heads,
            row=own.state_size * own.head_dim,
        ),
        StatePart(
            name=_CONV_X,
            num_heads=heads,
            num_kv_heads=heads,
            row=past * own.head_dim,
            dtype="auto",
        ),
        StatePart(
            name=_CONV_BC,
            num_heads=heads,
            num_kv_heads=own.num_groups,
            planes=2,
            row=past * own.state_size,
            dtype="auto",
        ),
    )


class Mamba2(Module):
    """Computes out(norm(scan(conv(x, B, C), dt), z)); x, B, C, dt and z are maps of the input.

    A rank has its heads, and B and C of the groups that these read.
    """

    def __init__(self, config: ModelConfig, index: int, prefix: str, build: BuildOptions) -> None:
        """Raises ValueError if the heads cannot be split over the ranks."""
        assert config.mamba2 is not None
        own = self._own = config.mamba2
        hidden = config.hidden_size
        matrix, _, conv_bc = config.layers[index].states
        local = build.tp.kv_heads(matrix)
        heads = slice(local[0], local[-1] + 1)
        channels = slice(heads.start * own.head_dim, heads.stop * own.head_dim)
        groups = build.tp.kv_heads(conv_bc)
        rows = [slice(each * own.state_size, (each + 1) * own.state_size) for each in groups]
        self._index = index
        self._num_groups = len(groups)
        num_channels = channels.stop - channels.start
        self._convolved = [num_channels, *[len(groups) * own.state_size] * 2]
        self._projected = [num_channels, sum(self._convolved), len(local)]

        x_b_c = [(own.channels, [channels]), *[(own.num_groups * own.state_size, rows)] * 2]
        maps = [(own.channels, [channels]), *x_b_c, (own.num_heads, [heads])]
        outputs = split_outputs(f"{prefix}.in_proj", maps)
        self.in_proj = ColumnParallelLinear(outputs, hidden, build, bias=own.proj_bias)
        convolved = split_outputs(f"{prefix}.conv1d", x_b_c)
        self.conv1d = CausalConv(convolved, own.conv_width, build, bias=own.conv_bias, silu=True)
        self.a_log, self.d, self.dt_bias = (
            Parameter(
                WeightSlice(f"{prefix}.{name}", (own.num_heads,), (heads,)), dtype=torch.float32
            )
            for name in ("A_log", "D", "dt_bias")
        )
        self.norm, self._normed = self._gated_norm(f"{prefix}.norm.weight", channels, build)
        self.out_proj = RowParallelLinear(
            f"{prefix}.out_proj", hidden, own.channels, channels, build, bias=own.proj_bias
        )

    def _gated_norm(
        self, name: str, channels: slice, build: BuildOptions
    ) -> tuple[GatedRMSNorm | SharedGatedRMSNorm, int]:
        """Returns the norm of groups of channels, and the size of the heads that it takes.

        If all ranks have whole groups, a head is a group.
        """
        own = self._own
        size = own.channels // own.num_groups
        epsilon = own.norm_eps
        weight = WeightSlice(name, (own.channels,), (channels,))
        if (channels.stop - channels.start) % size == 0:
            return GatedRMSNorm(weight, size, epsilon, build.dtype, gate_first=True), size
        dim = own.head_dim
        return SharedGatedRMSNorm(weight, dim, size, epsilon, build.dtype, build.tp), dim

    def process_after_load(self) -> None:
        """Computes the rates, as kernels read them."""
        self._rates = -self.a_log.data.exp()
        del self.a_log

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, states: StepStates
    ) -> torch.Tensor:
        """Maps x [num_tokens, hidden] to the same shape, added to `residual`."""
        own = self._own
        num_tokens = x.shape[0]
        z, x_b_c, dt = torch.split(self.in_proj(x), self._projected, dim=1)
        memory = [states.memory(self._index, name).flatten(1, 2) for name in (_CONV_X, _CONV_BC)]
        convolved = self.conv1d(x_b_c, memory, states.steps)
        x, b, c = torch.split(convolved, self._convolved, dim=1)
        y = mixers.mamba2(
            x.view(num_tokens, -1, own.head_dim),
            dt,
            b.view(num_tokens, self._num_groups, -1),
            c.view(num_tokens, self._num_groups, -1),
            self._rates,
            self.d.data,
            self.dt_bias.data,
            states.memory(self._index, _MATRIX)[:, 0],
            states.steps,
            limits=own.limits,
        )
        by_head = (num_tokens, -1, self._normed)
        normed = self.norm(y.view(by_head), z.view(by_head))
        return self.out_proj(normed.view(num_tokens, -1), residual)
