"""Computes the mixers of transformers' layers that keep a state with our functions.

A mixer calls functions of its module for its convolution and its recurrence. Their names are bound
to our functions in a copy of the mixer's own `forward`, so transformers' modules do not change.
Without a cache, a mixer passes all rows to the functions of prompts and keeps nothing. Our
functions know the sequences of the step, as attention does, and read and write their slots.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import unwrap
from types import FunctionType, MethodType
from typing import Any, Final

import torch
from torch import nn

_CONV: Final = "causal_conv1d_fn"
# Attributes of caches; a module that uses them and has no such convolution is no mixer.
_STATE_OF_CACHE: Final = {
    "get_conv_state",
    "update_conv_state",
    "get_recurrent_state",
    "update_recurrent_state",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConvCall:
    """Holds the arguments of a causal convolution."""

    x: torch.Tensor  # [num_tokens, channels]
    weight: torch.Tensor  # [channels, width]
    bias: torch.Tensor | None  # [channels]
    activation: str | None

    def empty_result(self) -> torch.Tensor:
        return self.x.new_empty(self.x.shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeltaCall:
    """Holds the arguments of a gated delta rule; see `states.mixers.gated_delta`."""

    query: torch.Tensor  # [num_tokens, key_heads, rows]
    key: torch.Tensor  # the same
    value: torch.Tensor  # [num_tokens, heads, columns]
    gate: torch.Tensor  # [num_tokens, heads] or [num_tokens, heads, rows]
    beta: torch.Tensor  # [num_tokens, heads]
    normalizes: bool

    def empty_result(self) -> torch.Tensor:
        return self.value.new_empty(self.value.shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mamba2Call:
    """Holds the arguments of a recurrence of Mamba 2; see `states.mixers.mamba2`."""

    x: torch.Tensor  # [num_tokens, heads, columns]
    dt: torch.Tensor  # [num_tokens, heads]
    b: torch.Tensor  # [num_tokens, groups, rows]
    c: torch.Tensor  # the same
    a: torch.Tensor  # [heads]
    d: torch.Tensor | None  # [heads]
    dt_bias: torch.Tensor | None  # [heads]
    limits: tuple[float, float]

    def empty_result(self) -> torch.Tensor:
        return self.x.new_empty(self.x.shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MambaCall:
    """Holds the arguments of a selective scan of Mamba; see `states.mixers.mamba`."""

    x: torch.Tensor  # [num_tokens, channels]
    dt: torch.Tensor  # the same
    b: torch.Tensor  # [num_tokens, rows]
    c: torch.Tensor  # the same
    a: torch.Tensor  # [channels, rows]
    d: torch.Tensor | None  # [channels]
    z: torch.Tensor | None  # [num_tokens, channels]
    dt_bias: torch.Tensor | None  # [channels]

    def empty_result(self) -> torch.Tensor:
        return self.x.new_empty(self.x.shape)


MixerCall = ConvCall | DeltaCall | Mamba2Call | MambaCall

Mix = Callable[[nn.Module, MixerCall], torch.Tensor]
"""Computes a mixer's call; the result is as of `states.mixers`."""

_handler: ContextVar[Mix] = ContextVar("mixers")


@contextmanager
def mix_by(handler: Mix) -> Iterator[None]:
    """Makes the mixers that this thread calls compute by `handler`."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


class _Functions:
    """Replaces the functions that one mixer calls; each batch of them has one row."""

    def __init__(self, mixer: nn.Module) -> None:
        self._mixer = mixer
        num_key_heads = getattr(mixer, "num_k_heads", 1)
        self._num_repeats = getattr(mixer, "num_v_heads", num_key_heads) // num_key_heads

    def _mix(self, call: MixerCall) -> torch.Tensor:
        return _handler.get()(self._mixer, call)

    def conv(
        self,
        hidden_states: torch.Tensor,  # [1, channels, num_tokens]
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        call = ConvCall(x=hidden_states[0].t(), weight=weight, bias=bias, activation=activation)
        return self._mix(call).t()[None]

    def delta(
        self,
        query: torch.Tensor,  # [1, num_tokens, key_heads, rows]
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        # transformers 5.17 repeats the heads of query and key before the call.
        each = self._num_repeats if query.shape[2] == value.shape[2] else 1
        call = DeltaCall(
            query=query[0, :, ::each],
            key=key[0, :, ::each],
            value=value[0],
            gate=g[0],
            beta=beta[0],
            normalizes=use_qk_l2norm_in_kernel,
        )
        return self._mix(call)[None], None

    def mamba2(
        self,
        hidden_states: torch.Tensor,  # [1, num_tokens, heads, columns]
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> torch.Tensor:
        if z is not None or not dt_softplus:
            raise NotImplementedError("a scan of Mamba 2 with a gate or without softplus")
        call = Mamba2Call(
            x=hidden_states[0],
            dt=dt[0],
            b=B[0],
            c=C[0],
            a=A,
            d=D,
            dt_bias=dt_bias,
            limits=(dt_limit[0], dt_limit[1]),
        )
        return self._mix(call)[None]

    def mamba(
        self,
        hidden_states: torch.Tensor,  # [1, channels, num_tokens]
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        if not delta_softplus:
            raise NotImplementedError("a scan of Mamba without softplus")
        call = MambaCall(
            x=hidden_states[0].t(),
            dt=dt[0].t(),
            b=B[0].t(),
            c=C[0].t(),
            a=A,
            d=D,
            z=None if z is None else z[0].t(),
            dt_bias=delta_bias,
        )
        return self._mix(call).t()[None]

    def by_name(self) -> dict[str, Callable[..., Any]]:
        """Returns the functions by the names that mixers call."""
        return {
            _CONV: self.conv,
            "torch_chunk_gated_delta_rule": self.delta,
            "chunk_kimi_delta_attention": self.delta,
            "mamba2_chunk_scan": self.mamba2,
            "mamba_selective_scan": self.mamba,
        }


def _forward_of(module: nn.Module) -> FunctionType | None:
    """Returns a module's own `forward` without decorators."""
    forward = unwrap(type(module).forward)
    return forward if isinstance(forward, FunctionType) else None


def forward_of_mixer(module: nn.Module) -> FunctionType | None:
    """Returns the `forward` of a module with a convolution that our functions compute."""
    forward = _forward_of(module)
    return forward if forward and _CONV in forward.__code__.co_names else None


def bind_mixers(decoder: nn.Module) -> dict[nn.Module, bool]:
    """Binds our functions in the mixers of a decoder.

    Returns the mixers, each with True if it has a recurrence beside its convolution.
    """
    mixers: dict[nn.Module, bool] = {}
    for module in decoder.modules():
        forward = forward_of_mixer(module)
        if forward is None:
            continue
        functions = _Functions(module).by_name()
        used = {name: functions[name] for name in functions if name in forward.__code__.co_names}
        copy = FunctionType(
            forward.__code__,
            {**forward.__globals__, **used},
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        copy.__kwdefaults__ = forward.__kwdefaults__
        setattr(module, "forward", MethodType(copy, module))  # noqa: B010  # mypy refuses a method
        mixers[module] = len(used) > 1
    return mixers


def keeps_other_state(decoder: nn.Module, mixers: dict[nn.Module, bool]) -> bool:
    """Returns True if a module that is no mixer reads or writes states of a cache."""
    return any(
        module not in mixers
        and (forward := _forward_of(module)) is not None
        and not _STATE_OF_CACHE.isdisjoint(forward.__code__.co_names)
        for module in decoder.modules()
    )
