"""Inputs of each kind of mixer, its call over a step's rows, and transformers' result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import torch
from torch.nn import functional
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba.modeling_mamba import causal_conv1d_fn, mamba_selective_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from tandem.workers.model.states.steps import StateStep, StateSteps

NUM_SLOTS: Final = 12

Inputs = dict[str, torch.Tensor]
"""Of one sequence: tensors of [num_tokens, ...]."""

Compute = Callable[[Any, Inputs, list[torch.Tensor], StateSteps], torch.Tensor]
"""Computes the rows of a step with `mixers` or `reference`, over the memory of slots."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Describes a mixer with constant weights."""

    name: str
    state: tuple[tuple[int, int], ...]  # heads and numbers of a head, of each part
    inputs: Callable[[int, torch.Generator], Inputs]
    compute: Compute
    expected: Callable[[Inputs], torch.Tensor]  # by transformers: [num_tokens, ...]
    dtype: torch.dtype = torch.float32
    is_conv: bool = field(default=False)

    def slots(self) -> list[torch.Tensor]:
        """Memory of slots, full of NaN: [NUM_SLOTS, heads, numbers] of each part, with gaps."""
        dtype = self.dtype if self.is_conv else torch.float32
        sizes = [heads * numbers for heads, numbers in self.state]
        memory = torch.full((NUM_SLOTS, sum(sizes) + 32), torch.nan, dtype=dtype)
        parts = torch.split(memory[:, : sum(sizes)], sizes, dim=1)
        return [part.view(NUM_SLOTS, *shape) for part, shape in zip(parts, self.state, strict=True)]


def _noise(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def _weights(*shape: int) -> torch.Tensor:
    return _noise(torch.Generator().manual_seed(sum(shape)), *shape)


def conv_case(dtype: torch.dtype, width: int, silu: bool, has_bias: bool) -> Case:
    parts = ((6, 24), (2, 40))  # heads and their channels
    channels = sum(heads * columns for heads, columns in parts)
    weight = _weights(width, channels).to(dtype)
    bias = _weights(channels).to(dtype) if has_bias else None

    def compute(
        module: Any, inputs: Inputs, states: list[torch.Tensor], steps: StateSteps
    ) -> torch.Tensor:
        result: torch.Tensor = module.conv(inputs["x"], weight, bias, states, steps, silu=silu)
        return result

    def expected(inputs: Inputs) -> torch.Tensor:
        activation = "silu" if silu else None
        taps = weight.t().contiguous().float()
        constant = None if bias is None else bias.float()
        result: torch.Tensor = causal_conv1d_fn(
            inputs["x"].float().t()[None], taps, constant, activation=activation
        )
        return result[0].t()

    return Case(
        name=f"conv {width}",
        state=tuple((heads, columns * (width - 1)) for heads, columns in parts),
        inputs=lambda n, generator: {"x": _noise(generator, n, channels).to(dtype)},
        compute=compute,
        expected=expected,
        dtype=dtype,
        is_conv=True,
    )


def delta_case(
    dtype: torch.dtype, key_heads: int, heads: int, rows: int, columns: int, by_row: bool
) -> Case:
    scale = rows**-0.5

    def inputs(n: int, generator: torch.Generator) -> Inputs:
        # Slices of one tensor, as mixers have them.
        sizes = [key_heads * rows, key_heads * rows, heads * columns]
        query, key, value = torch.split(_noise(generator, n, sum(sizes)).to(dtype), sizes, dim=1)
        shape = (n, heads, rows) if by_row else (n, heads)
        return {
            "query": query.view(n, key_heads, rows),
            "key": key.view(n, key_heads, rows),
            "value": value.view(n, heads, columns),
            "gate": -functional.softplus(_noise(generator, *shape)),
            "beta": _noise(generator, n, heads).sigmoid().to(dtype),
        }

    def compute(
        module: Any, inputs: Inputs, states: list[torch.Tensor], steps: StateSteps
    ) -> torch.Tensor:
        result: torch.Tensor = module.gated_delta(
            **inputs, state=states[0], steps=steps, scale=scale, normalizes=True
        )
        return result

    def expected(inputs: Inputs) -> torch.Tensor:
        query, key, value, gate, beta = (each.float()[None] for each in inputs.values())
        # transformers 5.17 leaves it to the caller to repeat the heads.
        query, key = (each.repeat_interleave(heads // key_heads, dim=2) for each in (query, key))
        rule = chunk_kimi_delta_attention if by_row else torch_chunk_gated_delta_rule
        result: torch.Tensor = rule(
            query, key, value, g=gate, beta=beta, use_qk_l2norm_in_kernel=True
        )[0][0]
        return result

    return Case(
        name=f"delta {rows} x {columns}",
        state=((heads, rows * columns),),
        inputs=inputs,
        compute=compute,
        expected=expected,
        dtype=dtype,
    )


def mamba2_case(
    dtype: torch.dtype,
    groups: int,
    heads: int,
    rows: int,
    columns: int,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> Case:
    a = -_weights(heads).exp()
    d = _weights(heads + 1)[1:]
    bias = _weights(heads + 2)[2:]

    def inputs(n: int, generator: torch.Generator) -> Inputs:
        sizes = [heads * columns, groups * rows, groups * rows, heads]
        x, b, c, dt = torch.split(_noise(generator, n, sum(sizes)).to(dtype), sizes, dim=1)
        return {
            "x": x.view(n, heads, columns),
            "dt": dt,
            "b": b.view(n, groups, rows),
            "c": c.view(n, groups, rows),
        }

    def compute(
        module: Any, inputs: Inputs, states: list[torch.Tensor], steps: StateSteps
    ) -> torch.Tensor:
        result: torch.Tensor = module.mamba2(
            **inputs, a=a, d=d, dt_bias=bias, state=states[0], steps=steps, limits=limits
        )
        return result

    def expected(inputs: Inputs) -> torch.Tensor:
        x, dt, b, c = (each.float()[None] for each in inputs.values())
        result: torch.Tensor = mamba2_chunk_scan(
            x, dt, a, b, c, chunk_size=16, D=d, dt_bias=bias, dt_softplus=True, dt_limit=limits
        )
        return result[0]

    return Case(
        name=f"mamba2 {rows} x {columns}",
        state=((heads, rows * columns),),
        inputs=inputs,
        compute=compute,
        expected=expected,
        dtype=dtype,
    )


def mamba_case(dtype: torch.dtype, heads: int, rows: int, columns: int, gated: bool) -> Case:
    channels = heads * columns
    a = -_weights(rows, channels).exp()
    d = _weights(channels)
    bias = _weights(channels + 1)[1:]

    def inputs(n: int, generator: torch.Generator) -> Inputs:
        x, dt, z = _noise(generator, n, 3 * channels).to(dtype).chunk(3, dim=1)
        b, c = _noise(generator, n, 2 * rows).to(dtype).chunk(2, dim=1)
        return {"x": x, "dt": dt, "b": b, "c": c} | ({"z": z} if gated else {})

    def compute(
        module: Any, inputs: Inputs, states: list[torch.Tensor], steps: StateSteps
    ) -> torch.Tensor:
        options = {"z": None} | inputs
        result: torch.Tensor = module.mamba(
            **options, a=a, d=d, dt_bias=bias, state=states[0], steps=steps
        )
        return result

    def expected(inputs: Inputs) -> torch.Tensor:
        values = {name: each.float().t()[None] for name, each in inputs.items()}
        result: torch.Tensor = mamba_selective_scan(
            values["x"],
            values["dt"],
            a.t(),
            values["b"],
            values["c"],
            D=d,
            z=values.get("z"),
            delta_bias=bias,
            delta_softplus=True,
        )
        return result[0].t()

    return Case(
        name=f"mamba {rows} x {columns}",
        state=((heads, rows * columns),),
        inputs=inputs,
        compute=compute,
        expected=expected,
        dtype=dtype,
    )


def every_case(dtype: torch.dtype) -> list[Case]:
    """Cases with whole and partial items and vectors, some with rows that are no multiple of 4."""
    return [
        conv_case(dtype, width=4, silu=True, has_bias=True),
        conv_case(dtype, width=3, silu=False, has_bias=False),
        conv_case(dtype, width=7, silu=True, has_bias=False),
        delta_case(dtype, key_heads=2, heads=4, rows=32, columns=80, by_row=False),
        delta_case(dtype, key_heads=3, heads=3, rows=24, columns=24, by_row=True),
        delta_case(dtype, key_heads=1, heads=2, rows=10, columns=7, by_row=False),
        mamba2_case(dtype, groups=2, heads=4, rows=16, columns=32),
        mamba2_case(dtype, groups=1, heads=2, rows=18, columns=68, limits=(0.3, 0.9)),
        mamba_case(dtype, heads=2, rows=16, columns=80, gated=True),
        mamba_case(dtype, heads=3, rows=5, columns=9, gated=False),
    ]


def run_cut(
    case: Case, module: Any, inputs: Inputs, cuts: Sequence[int], states: list[torch.Tensor]
) -> tuple[torch.Tensor, int]:
    """Computes a sequence in steps that end at `cuts`: its result, and the slot of its last state.

    The steps read and write slots 0 and 1 in turn.
    """
    results = []
    source = None
    slot = 1
    for begin, end in pairwise((0, *cuts)):
        slot = 1 - slot
        step = StateStep(
            first_row=0, num_tokens=end - begin, source=source, targets=((end - begin, slot),)
        )
        part = {name: each[begin:end] for name, each in inputs.items()}
        results.append(case.compute(module, part, states, StateSteps([step])))
        source = slot
    return torch.cat(results), slot


def state_of(states: list[torch.Tensor], slot: int) -> torch.Tensor:
    """The numbers of a slot."""
    return torch.cat([each[slot].flatten() for each in states])
