"""The C kernels of kernels.c: built with the machine's compiler at first use, called through ctypes.

Without a compiler there are none, and the model runs in plain torch, which is also what tests hold the kernels against.
Tensors are on the CPU, in float32 or bfloat16, and their last dimension is contiguous.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import platformdirs
import torch

logger = logging.getLogger(__name__)

_SOURCE: Final = Path(__file__).with_name("kernels.c")
_FLAGS: Final = ("-O3", "-march=native", "-ffast-math", "-fopenmp", "-fPIC", "-std=gnu11", "-Wall", "-Werror")
_BUILD_SECONDS: Final = 120
_SUFFIX: Final = {torch.float32: "f32", torch.bfloat16: "bf16"}
_MAX_HEAD_DIM: Final = 256  # what a thread's stack is sure to hold
_MAX_GROUP: Final = 32  # as in kernels.c

_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS: Final = {
    "decode_attention": (_P, _N, _P, _N, _P, _P, _P, _P, _P, _P, _N, _N, _N, _N, _N, _F),
    "chunk_attention": (_P, _N, _P, _N, _P, _P, _P, _N, _N, _N, _N, _N, _N, _N, _F),
    "store_kv": (_P, _N, _P, _N, _P, _P, _P, _N, _N, _N),
    "rms_norm": (_P, _P, _P, _N, _N, _F),
    "silu_mul": (_P, _P, _N, _N),
    "rotate": (_P, _N, _P, _P, _N, _N, _N),
}


def usable(tensor: torch.Tensor) -> bool:
    """Whether there are kernels for tensors of this device and dtype."""
    return tensor.device.type == "cpu" and tensor.dtype in _SUFFIX and library() is not None


def can_attend(cache: torch.Tensor, group: int) -> bool:
    """Whether `decode_attention` can read a KV cache of this kind, `group` query heads to a KV head."""
    return cache.shape[-1] <= _MAX_HEAD_DIM and group <= _MAX_GROUP and usable(cache)


def can_attend_chunks(cache: torch.Tensor, group: int) -> bool:
    """Whether `chunk_attention` can, which wants bfloat16 and a processor with its dot product."""
    kernels = library() if usable(cache) and cache.dtype == torch.bfloat16 else None
    return kernels is not None and bool(kernels.has_chunk_attention(_N(group), _N(cache.shape[-1])))


def decode_attention(
    query: torch.Tensor,  # [rows, num_heads, head_dim]
    keys: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    values: torch.Tensor,  # the same
    tables: torch.Tensor,  # [sum of table lengths] int32
    offsets: torch.Tensor,  # [rows] int64, where each row's block table begins
    first_keys: torch.Tensor,  # [rows] int64, the first position each query sees
    last_keys: torch.Tensor,  # [rows] int64, the last one
) -> torch.Tensor:
    """Attention of one query per row over its own keys, read in place: [rows, num_heads * head_dim]."""
    rows, num_heads, head_dim = query.shape
    _, kv_heads, block_size, _ = keys.shape
    out = query.new_empty(rows, num_heads * head_dim)
    _kernel("decode_attention", query)(
        query.data_ptr(),
        query.stride(0),
        out.data_ptr(),
        out.stride(0),
        keys.data_ptr(),
        values.data_ptr(),
        tables.data_ptr(),
        offsets.data_ptr(),
        first_keys.data_ptr(),
        last_keys.data_ptr(),
        rows,
        kv_heads,
        num_heads // kv_heads,
        head_dim,
        block_size,
        head_dim**-0.5,
    )
    return out


def chunk_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim] bfloat16
    keys: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    values: torch.Tensor,  # the same
    table: torch.Tensor,  # [table length] int32
    start: int,  # the position of the first token
    window: int,  # how many tokens each token sees, itself included
) -> torch.Tensor:
    """Causal attention of one sequence's new tokens over its keys: [num_tokens, num_heads * head_dim]."""
    tokens, num_heads, head_dim = query.shape
    _, kv_heads, block_size, _ = keys.shape
    out = query.new_empty(tokens, num_heads * head_dim)
    _kernel("chunk_attention", query)(
        query.data_ptr(),
        query.stride(0),
        out.data_ptr(),
        out.stride(0),
        keys.data_ptr(),
        values.data_ptr(),
        table.data_ptr(),
        start,
        tokens,
        window,
        kv_heads,
        num_heads // kv_heads,
        head_dim,
        block_size,
        head_dim**-0.5,
    )
    return out


def store_kv(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # the same
    keys: torch.Tensor,  # [..., head_dim], a layer's cache
    values: torch.Tensor,  # the same
    slots: torch.Tensor,  # [num_tokens * num_kv_heads] int64, rows of the cache
) -> None:
    """Writes the step's keys and values where they belong."""
    tokens, heads, head_dim = key.shape
    size = key.element_size()
    _kernel("store_kv")(
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
    """Root mean square norm over the last dimension of a contiguous tensor."""
    out = torch.empty_like(x)
    dim = weight.shape[0]
    _kernel("rms_norm", x)(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // dim, dim, epsilon)
    return out


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of a contiguous [rows, 2 * dim], gates first: [rows, dim]."""
    rows, dim = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, dim)
    _kernel("silu_mul", x)(x.data_ptr(), out.data_ptr(), rows, dim)
    return out


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates heads [num_tokens, num_heads, head_dim] in place by a RotaryTable's [num_tokens, 1, head_dim]."""
    rows, num_heads, dim = heads.shape
    _kernel("rotate", heads)(heads.data_ptr(), heads.stride(0), cos.data_ptr(), sin.data_ptr(), rows, num_heads, dim)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, built if this machine has not built them before; None where they cannot be built."""
    compiler = os.environ.get("CC", "cc")
    home = os.environ.get("TANDEM_HOME") or platformdirs.user_cache_dir("tandem")
    try:
        built = Path(home) / "kernels" / f"{_fingerprint(compiler)}.so"
        if not built.exists():
            _build(compiler, built)
        return ctypes.CDLL(str(built))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("no C kernels, running slower in plain torch: %s", error)
        return None


def _kernel(name: str, tensor: torch.Tensor | None = None) -> Callable[..., None]:
    return _bound(name, None if tensor is None else tensor.dtype)


@functools.cache
def _bound(name: str, dtype: torch.dtype | None) -> Callable[..., None]:
    """A kernel with its argument types. Raises RuntimeError where there are none: ask `usable` first."""
    kernels = library()
    if kernels is None:
        raise RuntimeError("no kernels")
    function: Any = getattr(kernels, name if dtype is None else f"{name}_{_SUFFIX[dtype]}")
    function.argtypes, function.restype = _ARGUMENTS[name], None
    return cast(Callable[..., None], function)


def _fingerprint(compiler: str) -> str:
    """What the build depends on: the source, the compiler, the processor it tunes for, torch's OpenMP."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_BUILD_SECONDS).stdout
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    parts = (_SOURCE.read_bytes(), version, " ".join(_FLAGS).encode(), flags.encode(), platform.machine().encode())
    return hashlib.sha256(b"\0".join((*parts, _openmp().encode()))).hexdigest()[:24]


def _build(compiler: str, built: Path) -> None:
    """Compiles into a temporary file and renames it: two workers may build at once, and a killed one leaves nothing."""
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
        objects, linked = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
        # Linked against the very OpenMP that torch has loaded: a second runtime would spin against the first.
        compile_it = [compiler, *_FLAGS, "-c", str(_SOURCE), "-o", str(objects)]
        link_it = [compiler, "-shared", str(objects), _openmp(), "-lm", "-o", str(linked)]
        for command in (compile_it, link_it):
            subprocess.run(command, capture_output=True, check=True, timeout=_BUILD_SECONDS)
        linked.rename(built)


def _openmp() -> str:
    """The path of the OpenMP runtime in this process. Raises OSError if it is not GNU's or not there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libgomp" in line:
            return line.split(maxsplit=5)[-1]
    raise OSError("torch runs without GNU OpenMP")
