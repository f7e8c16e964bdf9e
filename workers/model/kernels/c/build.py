"""Builds the C kernels with the machine's compiler at first use, and loads them."""

import ctypes
import errno
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import torch

from .....proto.home import cache_home

logger = logging.getLogger(__name__)

_FOLDER: Final = Path(__file__).parent
_SOURCES: Final = tuple(sorted(_FOLDER.rglob("*.[ch]")))
_FLAGS: Final = ("-O3", "-march=native", "-ffast-math", "-pthread", "-fPIC", "-std=gnu11")
# Without -ffast-math: linked with it, the library would flush denormals in the whole process.
_LINK_FLAGS: Final = ("-shared", "-pthread")
_CPUINFO: Final = Path("/proc/cpuinfo")
# The fields on which the instructions of -march=native depend: of x86, ARM and RISC-V.
_CPU_FIELDS: Final = ("flags", "Features", "CPU implementer", "CPU part", "isa")
_PRINTED_BYTES: Final = 500  # of a compiler's output, its end, in a warning
# Limit for one run of the compiler. It takes half a minute on an idle machine, much longer on a
# busy one.
_BUILD_SECONDS: Final = 900
SUFFIX: Final = {torch.float32: "f32", torch.bfloat16: "bf16"}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the kernels, or None if they cannot be built; builds them at first use.

    Raises TimeoutExpired if the compiler takes too long. Running without kernels would be wrong
    then: other processes of the service may have kernels, and a stream that moves between them
    would continue with different tokens.
    """
    try:
        compiler = _compiler()
        name = f"{_fingerprint(compiler)}.so"
        try:
            return _load(compiler, cache_home() / "kernels" / name)
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            # RuntimeError: the user has no home. CalledProcessError: the disk may be full.
            logger.warning("storing the C kernels in a temporary folder: %s", _reason(error))
            return _load(compiler, _temporary_folder() / name)
    except (OSError, subprocess.CalledProcessError) as error:
        logger.warning("no C kernels; plain torch is several times slower: %s", _reason(error))
        return None


def _compiler() -> list[str]:
    """Returns the words of the compiler's command, such as `ccache` and `gcc`.

    Raises OSError if the variable CC has no such command.
    """
    try:
        return shlex.split(os.environ.get("CC", "")) or ["cc"]
    except ValueError as error:
        raise OSError(f"CC must be a command and its arguments: {error}") from None


def _reason(error: Exception) -> str:
    """Returns the text of an error, with the end of the messages of a failed compiler."""
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    printed = error.stderr[-_PRINTED_BYTES:].decode(errors="replace").strip()
    return f"{error} {printed}"


def _load(compiler: Sequence[str], built: Path) -> ctypes.CDLL:
    """Loads the kernels; builds them first if the file is missing.

    Raises OSError if they cannot be stored or loaded, CalledProcessError if they cannot be
    compiled.
    """
    if not built.exists():
        _build(compiler, built)
    return ctypes.CDLL(str(built))


def _temporary_folder() -> Path:
    """Returns this user's private folder for temporary files.

    Raises OSError if another user could write to it, because such a user could make this process
    run any code.
    """
    folder = Path(tempfile.gettempdir()) / f"tandem-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.getuid()
        or stat.S_IMODE(status.st_mode) & 0o077
    ):
        raise PermissionError(errno.EPERM, "belongs to another user", str(folder))
    return folder


def loaded_library() -> ctypes.CDLL:
    """Returns the kernels. Raises RuntimeError if they cannot be built."""
    kernels = library()
    if kernels is None:
        raise RuntimeError("there are no C kernels")
    return kernels


@functools.cache
def address(name: str, dtype: torch.dtype | None = None) -> int:
    """Returns the address of a kernel; `dtype` selects a variant.

    Raises RuntimeError if there are no kernels.
    """
    function = getattr(loaded_library(), name if dtype is None else f"{name}_{SUFFIX[dtype]}")
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _fingerprint(compiler: Sequence[str]) -> str:
    """Returns a hash of the sources, the compiler and the processor."""
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, check=True, timeout=_BUILD_SECONDS
    ).stdout
    cpuinfo = _CPUINFO.read_text().splitlines()
    processor = sorted({line for line in cpuinfo if line.startswith(_CPU_FIELDS)})
    words = (*compiler, *_FLAGS, *_LINK_FLAGS, *processor, platform.machine())
    parts = (
        *(source.read_bytes() for source in _SOURCES),
        version,
        *map(os.fsencode, words),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _build(compiler: Sequence[str], built: Path) -> None:
    """Compiles to a temporary file and renames it, so that a killed process leaves no partial file.

    If several processes need the same kernels, one builds them and the others wait. Parallel builds
    would slow each other down.
    """
    built.parent.mkdir(parents=True, exist_ok=True)
    with (
        built.with_suffix(".lock").open("w") as lock,
        tempfile.TemporaryDirectory(dir=built.parent) as scratch,
    ):
        # Waits without a limit: the kernel releases the lock of a process that has died.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if built.exists():
            return
        sources = [source for source in _SOURCES if source.suffix == ".c"]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(partial(_compile, compiler, Path(scratch)), sources))
        linked = Path(scratch) / "kernels.so"
        _run([*compiler, *_LINK_FLAGS, *objects, "-lm", "-o", str(linked)])
        linked.rename(built)


def _compile(compiler: Sequence[str], folder: Path, source: Path) -> str:
    """Compiles a source file; returns the path of the object file."""
    made = str(folder / f"{source.stem}.o")
    _run([*compiler, *_FLAGS, f"-I{_FOLDER}", "-c", str(source), "-o", made])
    return made


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, capture_output=True, check=True, timeout=_BUILD_SECONDS)
