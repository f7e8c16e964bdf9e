"""Wraps the C kernels, which replace many small torch calls and slow bfloat16 code.

Without a compiler there are no kernels. Tensors are on the CPU, in float32 or bfloat16, and their
last dimension is contiguous. One file because every function is the wrapper of one kernel.
"""

import ctypes
import os
from functools import cache
from typing import Final

import torch

from .build import SUFFIX, library
from .calls import call

_MAX_SUMMED_INPUTS: Final = (2**31 - 1) // (255 * 127)
"""The largest group of integers, 66,311 inputs.

Numbers are 0 to 255, inputs -127 to 127, and the sum of their products has 32 bits.
"""
_MAX_HEAD_DIM: Final = 576  # as in common.h
_PANEL: Final = 32  # as in linear.c
ACTIVATIONS: Final = ("silu", "gelu_tanh")  # in the order of common.h
WIDENED: Final = 2  # a form of a product, as in linear.h

PackedNumbers = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Numbers, scales and zeros from `pack_linear_int` or `pack_linear_fp8`."""


def usable(tensor: torch.Tensor) -> bool:
    """Returns True if there are kernels for tensors of this device and dtype."""
    return tensor.device.type == "cpu" and tensor.dtype in SUFFIX and library() is not None


def can_attend(query: torch.Tensor) -> bool:
    """Returns True if `paged_attention` supports queries [.., head_dim]."""
    return query.shape[-1] <= _MAX_HEAD_DIM and usable(query)


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    # [num_blocks, num_kv_heads, block_size, head_dim], or quantized as in PagedKv; the blocks have
    # any stride.
    keys: torch.Tensor,
    # The same, in the same strides; or `keys` themselves, if the first value_dim elements of a key
    # are its value.
    values: torch.Tensor,
    tables: torch.Tensor,  # [2] int64, see paged_attention.c
    out: torch.Tensor,  # [num_tokens, num_heads * value_dim]
    scale: float,
    soft_cap: float | None = None,  # see AttentionOptions
    sinks: torch.Tensor | None = None,  # float32 [num_heads]
    cache_dtype: str = "auto",  # see `KvLayout`
) -> None:
    """Computes attention of each token to its sequence's keys, which are read in place."""
    rows, num_heads, head_dim = query.shape
    kv_heads, block_size = keys.shape[1:3]
    shape = (kv_heads, num_heads // kv_heads, head_dim, block_size)
    threads = torch.get_num_threads()
    options = (float(scale), float(soft_cap or 0), sinks, out.shape[1] // num_heads, threads)
    places = (query, query.stride(0), out, out.stride(0), keys, values, tables)
    call(
        f"paged_attention{_form(cache_dtype)}",
        query.dtype,
        rows,
        *places,
        *shape,
        *options,
        keys.stride(0),
        shared=True,
    )


def _form(cache_dtype: str) -> str:
    """Returns the part of a kernel's name that tells the form of the cache."""
    return "" if cache_dtype == "auto" else f"_{cache_dtype}"


def store_kv(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # the same
    keys: torch.Tensor,  # a layer's cache, as for `paged_attention`
    values: torch.Tensor | None,  # the same, in the same strides; None: only keys are written
    slots: torch.Tensor,  # [num_tokens] int64, block * block_size + offset
    cache_dtype: str = "auto",  # see `KvLayout`
) -> None:
    """Writes the step's keys and values to their token slots."""
    tokens, heads, head_dim = key.shape
    block_size = keys.shape[2]
    if cache_dtype != "auto":
        places = (key, key.stride(0), value, value.stride(0), keys, values, slots)
        call(
            f"store_kv{_form(cache_dtype)}",
            key.dtype,
            tokens,
            *places,
            heads,
            head_dim,
            block_size,
            keys.stride(0),
            shared=True,
        )
        return
    size = key.element_size()
    new = (key, key.stride(0) * size, value, value.stride(0) * size)
    sizes = (heads, head_dim * size, block_size, keys.stride(0) * size)
    call("store_kv", None, tokens, *new, keys, values, slots, *sizes, shared=True)


def rms_norm(
    x: torch.Tensor,  # [rows, dim] or [rows, heads, dim]
    weight: torch.Tensor,  # [dim]
    epsilon: float,
    offset: float = 0.0,  # of the weight
    residual: torch.Tensor | None = None,  # of x's shape, contiguous; is added
) -> torch.Tensor:
    """Normalizes the last dimension of x by its root mean square."""
    out = torch.empty(x.shape, dtype=x.dtype)
    rows = x.shape[0]
    heads = x.shape[1] if x.ndim == 3 else 1
    dim = x.shape[-1]
    call(
        "rms_norm",
        x.dtype,
        rows,
        x,
        x.stride(0),
        weight,
        out,
        heads,
        dim,
        epsilon,
        offset,
        residual,
    )
    return out


def layer_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Normalizes x [rows, dim] by mean and standard deviation; multiplies by weight [dim]."""
    rows, dim = x.shape
    out = x.new_empty(rows, dim)
    call("layer_norm", x.dtype, rows, x, x.stride(0), weight, out, dim, epsilon)
    return out


def scale(x: torch.Tensor, factor: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Computes factor * x + residual of contiguous [rows, dim]."""
    rows, dim = x.shape
    out = x.new_empty(rows, dim)
    call("scale", x.dtype, rows, x, residual, out, dim, float(factor))
    return out


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Computes cap * tanh(x / cap) of a contiguous [rows, dim]."""
    rows, dim = x.shape
    out = x.new_empty(rows, dim)
    call("soft_cap", x.dtype, rows, x, out, dim, float(cap))
    return out


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up of a contiguous [rows, 2 * dim], gates first: [rows, dim]."""
    return _gated("silu_mul", x)


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """Computes gelu(gate) * up like `silu_mul`, with the tanh form of GELU."""
    return _gated("gelu_mul", x)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """Computes relu(x) ** 2 of a contiguous [rows, dim]."""
    rows, dim = x.shape
    out = x.new_empty(rows, dim)
    call("relu_squared", x.dtype, rows, x, out, dim)
    return out


def clamped_gate(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Computes gpt-oss's gate of a contiguous [rows, 2 * dim], gate and up in turn: [rows, dim]."""
    rows = x.shape[0]
    dim = x.shape[1] // 2
    out = x.new_empty(rows, dim)
    call("clamped_gate", x.dtype, rows, x, out, dim, alpha, limit)
    return out


def _gated(name: str, x: torch.Tensor) -> torch.Tensor:
    rows = x.shape[0]
    dim = x.shape[1] // 2
    out = x.new_empty(rows, dim)
    call(name, x.dtype, rows, x, out, dim)
    return out


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates heads [num_tokens, num_heads, head_dim] by a RotaryEmbedding's cos and sin."""
    out = torch.empty(heads.shape, dtype=heads.dtype)
    rows, num_heads, dim = heads.shape
    call("rotate", heads.dtype, rows, heads, heads.stride(0), cos, sin, out, num_heads, dim)
    return out


def gather(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Looks up int32 rows [num_rows] of a contiguous table [size, ...]: [num_rows, ...]."""
    out = table.new_empty(len(rows), *table.shape[1:])
    call("gather", None, len(rows), table, rows, out, table[0].nbytes, len(table))
    return out


@cache
def linear_form(kind: str = "") -> int:
    """Returns how this processor multiplies weights, as in linear.h; 0 if there is no kernel.

    `kind` is "" for bfloat16, "_fp8" or "_int".
    """
    kernels = library()
    return 0 if kernels is None else int(kernels[f"form_of_linear{kind}"]())


def can_multiply(weight: torch.Tensor) -> bool:
    """Returns True if `linear` supports a weight [outputs, inputs].

    It must be in bfloat16, and the processor must not have AMX.
    """
    return (
        usable(weight)
        and weight.dtype == torch.bfloat16
        and weight.shape[1] % 2 == 0
        and linear_form() != 0
    )


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """Packs a weight [outputs, inputs] for `linear`: [ceil(outputs / 32), inputs / 2, 32, 2]."""
    outputs, inputs = weight.shape
    weight = weight.contiguous()
    packed = weight.new_empty(-(-outputs // _PANEL), inputs // 2, _PANEL, 2)
    call("pack_linear", None, outputs, weight, packed, inputs, 8 * weight.itemsize)
    return packed


def can_multiply_fp8(inputs: int, group_size: int) -> bool:
    """Returns True if `linear` supports FP8 weights with groups of `group_size` inputs."""
    return group_size % 2 == inputs % group_size == 0 and linear_form("_fp8") != 0


def pack_linear_fp8(
    weight: torch.Tensor,  # [outputs, inputs] uint8, the bits of numbers in E4M3
    scales: torch.Tensor,  # [outputs, groups] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs a weight as `pack_linear`, and its scales as [panels, groups, 32], for `linear`."""
    return pack_linear(weight), _by_panel(scales)


def _by_panel(terms: torch.Tensor) -> torch.Tensor:
    """Maps [outputs, groups] to [panels, groups, 32], padded with zeros."""
    outputs, groups = terms.shape
    padded = torch.nn.functional.pad(terms, (0, 0, 0, -outputs % _PANEL))
    return padded.view(-1, _PANEL, groups).transpose(1, 2).contiguous()


def can_gate(gate: torch.Tensor) -> bool:
    """Returns True if `linear` can gate, for a weight of gates [outputs, inputs]."""
    return can_multiply(gate) and gate.shape[0] % (_PANEL // 2) == 0


def alternate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Joins two weights [outputs, inputs] to [2 * outputs, inputs], alternating 16 rows of each."""
    runs = [weight.view(-1, _PANEL // 2, weight.shape[1]) for weight in (gate, up)]
    return torch.cat(runs, dim=1).view(-1, gate.shape[1])


def apart(y: torch.Tensor) -> torch.Tensor:
    """Reorders the outputs [rows, 2 * outputs] of an alternated weight: gates first."""
    rows, outputs = y.shape
    return y.view(rows, outputs // _PANEL, 2, _PANEL // 2).transpose(1, 2).reshape(y.shape)


def linear(
    x: torch.Tensor,  # [rows, inputs] bfloat16
    packed: torch.Tensor,  # from pack_linear
    outputs: int,
    bias: torch.Tensor | None = None,  # [outputs]
    residual: torch.Tensor | None = None,  # [rows, outputs], contiguous
    activation: str | None = None,
    scales: torch.Tensor | None = None,  # of weights in FP8, from pack_linear_fp8
    groups: torch.Tensor | None = None,  # of rows by expert, from `experts.sort_choices`
) -> torch.Tensor:
    """Computes x W^T + bias + residual: [rows, outputs].

    With `activation` the weight must be alternated; the result is activation(gate) * up, [rows,
    outputs / 2]. With `groups` the weights and biases of all experts follow each other, and x are
    the sorted rows of all choices.
    """
    rows, inputs = x.shape
    gated = 0 if activation is None else 1 + ACTIVATIONS.index(activation)  # as in common.h
    out = x.new_empty(rows, outputs // 2 if gated else outputs)
    group_size = inputs if scales is None else inputs // scales.shape[1]
    is_wide = linear_form("" if scales is None else "_fp8") == WIDENED
    name = "linear_wide" if is_wide else "linear"
    factor = _widen(x) if is_wide else x
    places = (factor, factor.stride(0), packed, bias, residual, out)
    sizes = (outputs, inputs, gated, scales, group_size, 0, 0)
    call(name, x.dtype, rows, *places, *sizes, groups)
    return out


def can_multiply_heads(weight: torch.Tensor) -> bool:
    """Returns True if `linear_by_head` supports a weight [heads, outputs, inputs]."""
    return weight.shape[1] % _PANEL == 0 and can_multiply(weight[0])


def linear_by_head(
    x: torch.Tensor,  # [rows, heads, inputs] bfloat16, any strides of rows and heads
    packed: torch.Tensor,  # from pack_linear, of [heads * outputs, inputs]
) -> torch.Tensor:
    """Multiplies each head by a weight of its own: [rows, heads, outputs]."""
    rows, heads, inputs = x.shape
    outputs = len(packed) * _PANEL
    is_wide = linear_form() == WIDENED
    if is_wide:
        x = _widen(x.reshape(rows, heads * inputs)).view(x.shape)
    out = x.new_empty(rows, heads, outputs // heads, dtype=packed.dtype)
    places = (x, x.stride(0), packed, None, None, out)
    sizes = (outputs, inputs, 0, None, inputs, outputs // heads, x.stride(1))
    call("linear_wide" if is_wide else "linear", packed.dtype, rows, *places, *sizes)
    return out


def _widen(x: torch.Tensor) -> torch.Tensor:
    """Converts x [rows, inputs] to float32."""
    rows, inputs = x.shape
    wide = x.new_empty(rows, inputs, dtype=torch.float32)
    call("widen_rows", x.dtype, rows, x, x.stride(0), wide, inputs)
    return wide


def can_multiply_int(inputs: int, group_size: int) -> bool:
    """Returns True if `linear_int` supports weights with groups of `group_size` inputs."""
    return group_size % 8 == inputs % group_size == 0 and linear_form("_int") != 0


def _count_pieces(group_size: int) -> int:
    """Returns the number of equal pieces into which a group is split for the dot product.

    It is 1 unless the group's sum might not fit. Each piece is a multiple of 8 inputs, as is such a
    group.
    """
    if group_size <= _MAX_SUMMED_INPUTS:
        return 1
    pieces = range(-(-group_size // _MAX_SUMMED_INPUTS), group_size // 8 + 1)
    return next(count for count in pieces if group_size % (8 * count) == 0)


def pack_linear_int(
    weight: torch.Tensor,  # [outputs, inputs] uint8, numbers below 2**bits
    scales: torch.Tensor,  # [outputs, groups] bfloat16
    # [outputs, groups] uint8, the number that represents 0, in 256ths of 2**bits; None: 128
    zeros: torch.Tensor | None,
    bits: int,
) -> PackedNumbers:
    """Packs a weight, its scales and zeros for `linear_int`.

    The results are [panels, inputs * bits / 8, 32] and twice [panels, groups, 32]. A group whose
    sum might not fit into 32 bits is split into several.
    """
    outputs, inputs = weight.shape
    num_pieces = _count_pieces(inputs // scales.shape[1])
    scales = scales.repeat_interleave(num_pieces, dim=1)
    zeros = None if zeros is None else zeros.repeat_interleave(num_pieces, dim=1)
    panels = -(-outputs // _PANEL)
    groups = scales.shape[1]
    packed = weight.new_empty(panels, inputs * bits // 8, _PANEL)
    packed_scales = scales.new_empty(panels, groups, _PANEL)
    weight = weight.contiguous()
    scales = scales.contiguous()
    call(
        "pack_linear_int",
        None,
        outputs,
        weight,
        scales,
        packed,
        packed_scales,
        inputs,
        groups,
        bits,
    )
    return packed, packed_scales, None if zeros is None else _by_panel(zeros)


def linear_int(
    x: torch.Tensor,  # [rows, inputs] bfloat16
    packed: PackedNumbers,
    outputs: int,
    bias: torch.Tensor | None = None,  # [outputs]
    residual: torch.Tensor | None = None,  # [rows, outputs], contiguous
    activation: str | None = None,
    input_bits: int = 8,  # or 16
    groups: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes `linear` for integer weights; x is rounded by group if there is a dot product."""
    weight, scales, zeros = packed
    rows, inputs = x.shape
    num_groups = scales.shape[1]
    bits = 8 * weight.shape[1] // inputs
    parts = input_bits // 8
    is_wide = linear_form("_int") == WIDENED
    name = "linear_int_wide" if is_wide else "linear_int"
    gated = 0 if activation is None else 1 + ACTIVATIONS.index(activation)  # as in common.h
    factors = (_widen(x), None) if is_wide else _quantize(x, num_groups, parts)
    out = x.new_empty(rows, outputs // 2 if gated else outputs)
    operands = (*factors, weight, scales, bias, residual, out)
    sizes = (outputs, inputs, inputs // num_groups, bits, gated, zeros, parts)
    call(name, x.dtype, rows, *operands, *sizes, groups)
    return out


def _quantize(x: torch.Tensor, groups: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds x [rows, inputs] to numbers [rows, parts, inputs] and terms; see linear_int.c.

    The terms are [rows, parts, groups, 2].
    """
    rows, inputs = x.shape
    q = x.new_empty(rows, parts, inputs, dtype=torch.int8)
    terms = x.new_empty(rows, parts, groups, 2, dtype=torch.float32)
    call("quantize", x.dtype, rows, x, x.stride(0), q, terms, inputs, inputs // groups, parts)
    return q, terms


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    keys: torch.Tensor,
    filters: torch.Tensor | None = None,
) -> torch.Tensor:
    """Maps logits [rows, vocab_size] to sampled token ids [rows], int64, as gumbel.py does.

    A token is -1 if a logit of its row is not finite. temperatures: float32 [rows], 0 for greedy
    sampling. keys: int64 [rows, 2], each below 2^32. filters: float32 [rows, 3], which are top-k (0
    for none), top-p, and the logarithm of min-p (-3e38 for none). Filters treat scores that differ
    by less than 2^-16 as ties.
    """
    rows, vocab_size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    words = keys.to(torch.uint32)
    call(
        "sample",
        logits.dtype,
        rows,
        logits,
        logits.stride(0),
        temperatures,
        words,
        tokens,
        vocab_size,
        filters,
    )
    return tokens


def add_green(
    scores: torch.Tensor,
    contexts: torch.Tensor,
    key: torch.Tensor,
    threshold: int,
    delta: float,
) -> torch.Tensor:
    """Returns float32 scores [rows, vocab_size]; green tokens have `delta` more than before.

    contexts: int64 [rows, width], contiguous, the tokens before, which choose the green ones. key:
    int64 [2]. A token is green if the lower 31 bits of its hash are below the threshold.
    """
    rows, vocab_size = scores.shape
    out = torch.empty(rows, vocab_size)
    call(
        "add_green",
        None,
        rows,
        scores,
        scores.stride(0),
        out,
        vocab_size,
        contexts,
        contexts.shape[1],
        key,
        threshold,
        float(delta),
    )
    return out


def bind_threads() -> None:
    """Binds the calling thread and its helpers to one core each, if there are as many cores.

    Otherwise, after a pause, two threads may share a core for many milliseconds.
    """
    cores = torch.tensor(sorted(os.sched_getaffinity(0)))
    kernels = library()
    if kernels is not None and len(cores) == torch.get_num_threads() > 1:
        # Creates torch's own threads now, so that they do not inherit the caller's core.
        torch.zeros(2**16).add_(1)
        kernels.bind_threads(ctypes.c_void_p(cores.data_ptr()), ctypes.c_int64(len(cores)))
