"""Builds the C kernels with the machine's compiler at first use, and binds them."""

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

_SOURCES: Final = tuple(sorted(Path(__file__).parent.glob("*.[ch]")))
_FLAGS: Final = ("-O3", "-march=native", "-ffast-math", "-fopenmp", "-fPIC", "-std=gnu11")
_BUILD_SECONDS: Final = 120
SUFFIX: Final = {torch.float32: "f32", torch.bfloat16: "bf16"}

_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS: Final = {
    "decode_attention": (_P, _N, _P, _N, _P, _P, _P, _P, _P, _P, _N, _N, _N, _N, _N, _F),
    "chunk_attention": (_P, _N, _P, _N, _P, _P, _P, _N, _N, _N, _N, _N, _N, _N, _F),
    "store_kv": (_P, _N, _P, _N, _P, _P, _P, _N, _N, _N),
    "read_heads": (_P, _P, _P, _N, _N, _N, _N, _N, _N),
    "write_heads": (_P, _P, _P, _N, _N, _N, _N, _N, _N),
    "rms_norm": (_P, _P, _P, _N, _N, _F),
    "silu_mul": (_P, _P, _N, _N),
    "rotate": (_P, _N, _P, _P, _N, _N, _N),
    "pack_linear": (_P, _P, _N, _N),
    "linear": (_P, _N, _P, _P, _P, _P, _N, _N, _N, _N),
    "bind_threads": (_P, _N),
    "sample": (_P, _N, _P, _P, _P, _N, _N),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the kernels, built if this machine has not built them before; None where they cannot be built."""
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


def kernel(name: str, tensor: torch.Tensor | None = None) -> Callable[..., None]:
    """Returns a kernel, of the tensor's dtype where it has variants. Raises RuntimeError if there are no kernels."""
    return _bound(name, None if tensor is None else tensor.dtype)


@functools.cache
def _bound(name: str, dtype: torch.dtype | None) -> Callable[..., None]:
    """Returns a kernel with its argument types set."""
    kernels = library()
    if kernels is None:
        raise RuntimeError("no kernels")
    function: Any = getattr(kernels, name if dtype is None else f"{name}_{SUFFIX[dtype]}")
    function.argtypes, function.restype = _ARGUMENTS[name], None
    return cast(Callable[..., None], function)


def _fingerprint(compiler: str) -> str:
    """Hashes what the build depends on: source, compiler, the processor it tunes for, torch's OpenMP."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_BUILD_SECONDS).stdout
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    words = (*_FLAGS, flags, platform.machine(), _openmp())
    parts = (*(source.read_bytes() for source in _SOURCES), version, *(word.encode() for word in words))
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _build(compiler: str, built: Path) -> None:
    """Compiles into a temporary file and renames it: two workers may build at once, and a killed one leaves nothing."""
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
        linked = Path(scratch) / "kernels.so"
        sources = [str(source) for source in _SOURCES if source.suffix == ".c"]
        # Linked against the very OpenMP that torch has loaded: a second runtime would spin against the first.
        compile_it = [compiler, *_FLAGS, "-c", *sources]
        link_it = [compiler, "-shared", *(f"{Path(source).stem}.o" for source in sources), _openmp(), "-lm"]
        for command in (compile_it, [*link_it, "-o", str(linked)]):
            subprocess.run(command, cwd=scratch, capture_output=True, check=True, timeout=_BUILD_SECONDS)
        linked.rename(built)


def _openmp() -> str:
    """Returns the path of the OpenMP runtime in this process. Raises OSError if it is not GNU's or not there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libgomp" in line:
            return line.split(maxsplit=5)[-1]
    raise OSError("torch runs without GNU OpenMP")
