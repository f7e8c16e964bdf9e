"""Calls C kernels through ctypes, for what plain torch does in many small calls or, in bfloat16, slowly.

Without a compiler there are none. Tensors are on the CPU, in float32 or bfloat16; their last dimension is contiguous.
"""

import os
from typing import Final

import torch

from .build import SUFFIX, kernel, library

_MAX_HEAD_DIM: Final = 256  # what a thread's stack is sure to hold
_MAX_GROUP: Final = 32  # as in common.h
_PANEL: Final = 32  # as in linear.c


def usable(tensor: torch.Tensor) -> bool:
    """Returns whether there are kernels for tensors of this device and dtype."""
    return tensor.device.type == "cpu" and tensor.dtype in SUFFIX and library() is not None


def can_attend(cache: torch.Tensor, group: int) -> bool:
    """Returns whether `decode_attention` can read a KV cache of this kind, `group` query heads to a KV head."""
    return cache.shape[-1] <= _MAX_HEAD_DIM and group <= _MAX_GROUP and usable(cache)


def can_attend_chunks(cache: torch.Tensor, group: int) -> bool:
    """Returns whether `chunk_attention` can, which needs bfloat16 and a processor with its dot product."""
    kernels = library() if usable(cache) and cache.dtype == torch.bfloat16 else None
    return kernels is not None and bool(kernels.has_chunk_attention(group, cache.shape[-1]))


def decode_attention(
    query: torch.Tensor,  # [rows, num_heads, head_dim]
    keys: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    values: torch.Tensor,  # the same
    tables: torch.Tensor,  # [sum of table lengths] int32
    offsets: torch.Tensor,  # [rows] int64, where each row's block table begins
    first_keys: torch.Tensor,  # [rows] int64, the first position each query sees
    last_keys: torch.Tensor,  # [rows] int64, the last one
    out: torch.Tensor,  # [rows, num_heads * head_dim]
) -> None:
    """Computes attention of one query per row over its own keys, read in place."""
    places = (tables.data_ptr(), offsets.data_ptr(), first_keys.data_ptr(), last_keys.data_ptr(), query.shape[0])
    _attend("decode_attention", query, keys, values, out, *places)


def chunk_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim] bfloat16
    keys: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    values: torch.Tensor,  # the same
    table: torch.Tensor,  # [table length] int32
    start: int,  # the position of the first token
    window: int,  # how many tokens each token sees, itself included
    out: torch.Tensor,  # [num_tokens, num_heads * head_dim]
) -> None:
    """Computes causal attention of one sequence's new tokens over its keys."""
    _attend("chunk_attention", query, keys, values, out, table.data_ptr(), start, query.shape[0], window)


def _attend(
    name: str, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor, *places: int
) -> None:
    """Runs an attention kernel; `places` are its arguments that say where the keys are."""
    num_heads, head_dim = query.shape[1:]
    kv_heads, block_size = keys.shape[1:3]
    kernel(name, query)(
        query.data_ptr(),
        query.stride(0),
        out.data_ptr(),
        out.stride(0),
        keys.data_ptr(),
        values.data_ptr(),
        *places,
        kv_heads,
        num_heads // kv_heads,
        head_dim,
        block_size,
        head_dim**-0.5,
    )


def store_kv(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # the same
    keys: torch.Tensor,  # [..., head_dim], a layer's cache
    values: torch.Tensor,  # the same
    slots: torch.Tensor,  # [num_tokens * num_kv_heads] int64, rows of the cache
) -> None:
    """Writes the step's keys and values to their slots."""
    tokens, heads, head_dim = key.shape
    size = key.element_size()
    kernel("store_kv")(
        key.data_ptr(),
        key.stride(0) * size,
        value.data_ptr(),
        value.stride(0) * size,
        keys.data_ptr(),
        values.data_ptr(),
        slots.data_ptr(),
        tokens,
        heads,
        head_dim * size,
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Normalises the last dimension by its root mean square."""
    x = x.contiguous()
    out = torch.empty_like(x)
    dim = weight.shape[0]
    kernel("rms_norm", x)(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // dim, dim, epsilon)
    return out


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up of a contiguous [rows, 2 * dim], gates first: [rows, dim]."""
    rows, dim = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, dim)
    kernel("silu_mul", x)(x.data_ptr(), out.data_ptr(), rows, dim)
    return out


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates heads [num_tokens, num_heads, head_dim] in place by a RotaryEmbedding's [num_tokens, 1, head_dim]."""
    rows, num_heads, dim = heads.shape
    kernel("rotate", heads)(heads.data_ptr(), heads.stride(0), cos.data_ptr(), sin.data_ptr(), rows, num_heads, dim)


def can_multiply(weight: torch.Tensor) -> bool:
    """Returns whether there is a `linear` for a weight [outputs, inputs], which needs bfloat16 and a processor with its
    dot product and without AMX."""
    kernels = library() if usable(weight) and weight.dtype == torch.bfloat16 else None
    return kernels is not None and bool(kernels.has_linear(weight.shape[1]))


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """Packs a weight [outputs, inputs] in the order in which `linear` reads it: [ceil(outputs / 32), inputs / 2, 32,
    2]."""
    outputs, inputs = weight.shape
    weight = weight.contiguous()
    packed = weight.new_empty(-(-outputs // _PANEL), inputs // 2, _PANEL, 2)
    kernel("pack_linear")(weight.data_ptr(), packed.data_ptr(), outputs, inputs)
    return packed


def can_gate(gate: torch.Tensor) -> bool:
    """Returns whether `linear` can gate: for a weight of gates [outputs, inputs]."""
    return can_multiply(gate) and gate.shape[0] % (_PANEL // 2) == 0


def alternate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns two weights [outputs, inputs] as one [2 * outputs, inputs], in turn 16 rows of each."""
    runs = [weight.view(-1, _PANEL // 2, weight.shape[1]) for weight in (gate, up)]
    return torch.cat(runs, dim=1).view(-1, gate.shape[1])


def linear(
    x: torch.Tensor,  # [rows, inputs] bfloat16
    packed: torch.Tensor,  # from pack_linear
    outputs: int,
    bias: torch.Tensor | None = None,  # [outputs]
    residual: torch.Tensor | None = None,  # [rows, outputs], contiguous
    gated: bool = False,
) -> torch.Tensor:
    """Computes x W^T + bias + residual: [rows, outputs].

    `gated` is for an alternated weight: then it is silu(gate) * up, [rows, outputs / 2]."""
    rows, inputs = x.shape
    out = x.new_empty(rows, outputs // 2 if gated else outputs)
    kernel("linear", x)(
        x.data_ptr(),
        x.stride(0),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        out.data_ptr(),
        rows,
        outputs,
        inputs,
        gated,
    )
    return out


def sample(logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Samples as gumbel.py does from logits [rows, vocab_size] token ids [rows], int64.

    temperatures float32 [rows], 0 for the greedy choice; keys int64 [rows, 2], each below 2^32."""
    rows, vocab_size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    words = keys.to(torch.uint32)
    kernel("sample", logits)(
        logits.data_ptr(),
        logits.stride(0),
        temperatures.data_ptr(),
        words.data_ptr(),
        tokens.data_ptr(),
        rows,
        vocab_size,
    )
    return tokens


def bind_threads() -> None:
    """Binds each thread of the calling thread's OpenMP team to a core of its own, if they are as many as the cores of
    this process: else, after a pause, two threads may land on one core and wait for each other there for many
    milliseconds."""
    cores = torch.tensor(sorted(os.sched_getaffinity(0)))
    if len(cores) == torch.get_num_threads() > 1 and library() is not None:
        kernel("bind_threads")(cores.data_ptr(), len(cores))
