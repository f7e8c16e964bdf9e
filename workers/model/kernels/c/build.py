"""Builds the C kernels with the machine's compiler at first use, and finds them."""

import ctypes
import errno
import fcntl
import functools
import hashlib
import logging
import os
import platform
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import platformdirs
import torch

logger = logging.getLogger(__name__)

_FOLDER: Final = Path(__file__).parent
_SOURCES: Final = tuple(sorted(_FOLDER.rglob("*.[ch]")))
_FLAGS: Final = ("-O3", "-march=native", "-ffast-math", "-pthread", "-fPIC", "-std=gnu11")
# Without -ffast-math: linked with it, the library would flush denormals in the whole process.
_LINK_FLAGS: Final = ("-shared", "-pthread")
_BUILD_SECONDS: Final = (
    900  # of the compiler, which takes half a minute alone: so long only beside much other work
)
SUFFIX: Final = {torch.float32: "f32", torch.bfloat16: "bf16"}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the kernels, built if this machine has not built them before; None where they cannot
    be built. Raises TimeoutExpired if the compiler takes too long: then others of this service may
    have kernels, with which a stream would go on with other tokens than without.
    """
    compiler = os.environ.get("CC") or "cc"
    try:
        name = f"{_fingerprint(compiler)}.so"
        try:
            home = os.environ.get("TANDEM_HOME") or platformdirs.user_cache_dir("tandem")
            return _load(compiler, Path(os.path.expanduser(home)) / "kernels" / name)
        except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
            logger.warning("kernels go to a temporary folder: %s", error)
            return _load(compiler, _temporary_folder() / name)
    except (OSError, subprocess.CalledProcessError) as error:
        logger.warning("no C kernels, running several times slower in plain torch: %s", error)
        return None


def _load(compiler: str, built: Path) -> ctypes.CDLL:
    """Loads the kernels, built first if they are not there. Raises OSError if they cannot be
    stored, or not loaded from there, CalledProcessError if they cannot be compiled.
    """
    if not built.exists():
        _build(compiler, built)
    return ctypes.CDLL(str(built))


def _temporary_folder() -> Path:
    """Returns this user's own folder among the temporary files. Raises OSError if another user
    could write there, who could have this process run anything.
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
    """Returns the kernels. Raises RuntimeError if there are none."""
    kernels = library()
    if kernels is None:
        raise RuntimeError("no kernels")
    return kernels


@functools.cache
def address(name: str, dtype: torch.dtype | None = None) -> int:
    """Returns where a kernel is, of a dtype where it has variants. Raises RuntimeError if there are
    no kernels.
    """
    function = getattr(loaded_library(), name if dtype is None else f"{name}_{SUFFIX[dtype]}")
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _fingerprint(compiler: str) -> str:
    """Hashes what the build depends on: source, compiler, the processor it tunes for."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=_BUILD_SECONDS
    ).stdout
    flags = next(
        (
            line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("flags")
        ),
        "",
    )
    words = (*_FLAGS, *_LINK_FLAGS, flags, platform.machine())
    parts = (
        *(source.read_bytes() for source in _SOURCES),
        version,
        *(word.encode() for word in words),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _build(compiler: str, built: Path) -> None:
    """Compiles into a temporary file and renames it, so that a killed process leaves nothing. Of
    several that need the same kernels one builds them, and the others wait for it: together they
    would take as many times as long.
    """
    built.parent.mkdir(parents=True, exist_ok=True)
    with (
        built.with_suffix(".lock").open("w") as lock,
        tempfile.TemporaryDirectory(dir=built.parent) as scratch,
    ):
        fcntl.flock(
            lock, fcntl.LOCK_EX
        )  # for as long as the compiler may take: the kernel frees it of who has died
        if built.exists():
            return
        sources = [source for source in _SOURCES if source.suffix == ".c"]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(partial(_compile, compiler, Path(scratch)), sources))
        linked = Path(scratch) / "kernels.so"
        _run([compiler, *_LINK_FLAGS, *objects, "-lm", "-o", str(linked)])
        linked.rename(built)


def _compile(compiler: str, folder: Path, source: Path) -> str:
    """Returns the path of the object file."""
    made = str(folder / f"{source.stem}.o")
    _run([compiler, *_FLAGS, f"-I{_FOLDER}", "-c", str(source), "-o", made])
    return made


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, capture_output=True, check=True, timeout=_BUILD_SECONDS)
