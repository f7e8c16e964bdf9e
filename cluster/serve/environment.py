"""Checks and sets the environment of Ray and other libraries.

Runs before Ray is imported, and before a local Ray starts.
"""

import os
import resource
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import gettempdir, mkdtemp
from typing import Final

from ...proto.errors import InvalidArgument, Unavailable

_ADDRESS_VARIABLE: Final = "RAY_ADDRESS"
_MODE_VARIABLE: Final = "RAY_AUTH_MODE"
_PATH_VARIABLE: Final = "RAY_AUTH_TOKEN_PATH"
_TOKEN_VARIABLE: Final = "RAY_AUTH_TOKEN"
_MODES: Final = ("disabled", "token", "k8s")
_PROXY_VARIABLES: Final = tuple(
    spelled
    for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
    for spelled in (name, name.upper())
)
_NEVER_BY_PROXY: Final = ("localhost", "127.0.0.1", "::1")
_MAX_SOCKET_BYTES: Final = 107  # of the path of a Unix socket, on Linux
# The longest path of a socket below Ray's folder.
_LONGEST_SOCKET: Final = "/session_2026-12-31_23-59-59_999999_4194304/sockets/plasma_store"
_OPEN_FILES: Final = 8_192  # a router opens one for each connection
_FEWEST_OPEN_FILES: Final = 256
# Threads, allocators and torch reserve far more address space than they use.
_LEAST_ADDRESS_SPACE: Final = 16 * 1024**3
_SCRATCH: Final = "tandem-"
_RANDOM_BYTES: Final = 8  # that mkdtemp adds to a name
MAX_TMPDIR_BYTES: Final = (
    _MAX_SOCKET_BYTES - len(_LONGEST_SOCKET) - len(f"/{_SCRATCH}") - _RANDOM_BYTES
)


def prepare_ray_environment(address: str | None) -> str | None:
    """Sets Ray's environment variables; returns the cluster's address, or None for a local Ray.

    Call it before Ray is imported. Raises InvalidArgument, which names the variable, for values
    with which Ray would end this process or fail with a traceback.

    A cluster has its own authentication mode, so nothing is set for one: Ray reads the mode and the
    token from the same variables as when the cluster was started.
    """
    address = cluster_address(address)
    _check_working_folder()
    _check_authentication()
    _check_limits()
    _keep_loopback_from_proxies()
    if os.environ.get("PYTHONOPTIMIZE", "").strip() not in ("", "0"):
        # Level 2 removes docstrings, without which Ray's processes do not start.
        os.environ["PYTHONOPTIMIZE"] = "1"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Under `uv run`, Ray would copy the working folder to every process, and refuse a large one.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # A call after the end of Ray must fail instead of starting another Ray.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    if address is None:
        # A local Ray listens beyond loopback and runs any code that it receives: require a token,
        # see `own_ray_token`.
        os.environ.setdefault(_MODE_VARIABLE, "token")
        # Ray would run workers at nice 15: other programs on the machine would stall the token
        # streams.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # By default Serve's controller checks every replica ten times a second, which takes 5 % of
        # a core.
        os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.3")
        # Ray starts one process for each CPU before it knows what they will run. By default only
        # the first driver makes it do so, and waits until they have started.
        os.environ.setdefault("RAY_enable_worker_prestart", "1")
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    return address


def cluster_address(address: str | None) -> str | None:
    """Returns the address of the cluster to join, or None to start a local Ray.

    The address is HOST:PORT or `auto`.

    The address is the option, else RAY_ADDRESS. No address, an empty one and `local` mean a local
    Ray; then RAY_ADDRESS is unset. Raises InvalidArgument.
    """
    name = "--address" if address else _ADDRESS_VARIABLE
    given = (address or os.environ.get(_ADDRESS_VARIABLE, "")).strip()
    if given in ("", "local"):
        os.environ.pop(_ADDRESS_VARIABLE, None)  # Ray would use even an empty value as an address
        return None
    host, _, port = given.rpartition(":")
    if given == "auto" or (
        host and "/" not in host and port.isdecimal() and 0 < int(port) < 65_536
    ):
        return given
    hint = "; unset it to start a Ray on this machine" if name == _ADDRESS_VARIABLE else ""
    if "://" in given:
        kind = "Ray Client" if given.startswith("ray:") else "Ray's dashboard and jobs"
        raise InvalidArgument(
            f"{given} is an address of {kind}; give HOST:PORT of the GCS server{hint}", name
        )
    raise InvalidArgument(f"{given!r} is not HOST:PORT of a Ray cluster's GCS server{hint}", name)


def _check_working_folder() -> None:
    """Raises InvalidArgument if the working folder is gone: Ray's processes start there."""
    try:
        os.getcwd()
    except OSError as error:
        raise InvalidArgument(
            f"the working folder cannot be used ({error.strerror}); change to another one"
        ) from None


def _check_authentication() -> None:
    """Raises InvalidArgument for a mode or a token file with which Ray would abort this process."""
    for name in (_MODE_VARIABLE, _PATH_VARIABLE, _TOKEN_VARIABLE):
        if not os.environ.get(name, "").strip():
            os.environ.pop(name, None)
    mode = os.environ.get(_MODE_VARIABLE, "token")
    if mode.lower() not in _MODES:
        raise InvalidArgument(f"must be one of {', '.join(_MODES)}, got {mode!r}", _MODE_VARIABLE)
    path = os.environ.get(_PATH_VARIABLE)
    if path and mode.lower() == "token" and _TOKEN_VARIABLE not in os.environ:
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, RuntimeError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not a text file"
            raise InvalidArgument(f"{path} cannot be read: {reason}", _PATH_VARIABLE) from None
        if not text.strip():
            raise InvalidArgument(f"{path} is empty; it must hold a token", _PATH_VARIABLE)


def raise_open_files() -> int:
    """Raises this process's limit of open files as far as the user may; returns what is allowed.

    Processes of a local Ray inherit it; those of a cluster have the limit of `ray start`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def _check_limits() -> None:
    """Raises InvalidArgument for limits with which Ray's processes abort."""
    wanted = raise_open_files()
    if wanted < _FEWEST_OPEN_FILES:
        raise InvalidArgument(
            f"{wanted} open files are too few; the minimum is {_FEWEST_OPEN_FILES} (ulimit -n)",
            "RLIMIT_NOFILE",
        )
    memory, _ = resource.getrlimit(resource.RLIMIT_AS)
    if memory != resource.RLIM_INFINITY and memory < _LEAST_ADDRESS_SPACE:
        raise InvalidArgument(
            f"{memory >> 20} MiB of address space are too few for Ray; remove the limit "
            "(ulimit -v unlimited)",
            "RLIMIT_AS",
        )


def _keep_loopback_from_proxies() -> None:
    """Adds loopback to both spellings of no_proxy if the environment names a proxy.

    Otherwise libraries in the processes of the service, which inherit the environment, send even
    loopback traffic through the proxy.
    """
    if not any(os.environ.get(name) for name in _PROXY_VARIABLES):
        return
    kept = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [host.strip() for host in kept.split(",") if host.strip()]
    text = ",".join(dict.fromkeys((*hosts, *_NEVER_BY_PROXY)))
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "*" if "*" in hosts else text


@contextmanager
def ray_scratch() -> Iterator[str]:
    """Yields a new folder for a local Ray and removes it afterwards.

    Tries RAY_TMPDIR, then TMPDIR, then the system's folders for temporary files; the first that can
    be written and whose path leaves room for the names of Ray's sockets is used. Raises
    Unavailable.
    """
    made = None
    reasons = []
    for parent in dict.fromkeys(
        filter(None, (os.environ.get("RAY_TMPDIR"), *_temporary_folders()))
    ):
        if len(os.fsencode(parent)) > MAX_TMPDIR_BYTES:
            reasons.append(f"{parent}: longer than {MAX_TMPDIR_BYTES} bytes")
            continue
        try:
            made = mkdtemp(prefix=_SCRATCH, dir=parent)
            break
        except OSError as error:
            reasons.append(f"{parent}: {error.strerror}")
    if made is None:
        raise Unavailable(
            f"TMPDIR: Ray needs a folder for its sockets that can be written ({'; '.join(reasons)})"
        )
    try:
        yield made
    finally:
        rmtree(made, ignore_errors=True)


def _temporary_folders() -> Iterator[str]:
    with suppress(FileNotFoundError):  # no folder can be written
        yield os.path.abspath(gettempdir())
    yield from ("/tmp", "/var/tmp", "/dev/shm")  # nosec B108: mkdtemp makes a private folder there


@contextmanager
def own_ray_token(folder: str) -> Iterator[None]:
    """Gives a local Ray a new token, in a file in `folder`, unless the environment names a token.

    The token in ~/.ray is not used: it may give access to other clusters of the user.
    """
    disabled = os.environ.get(_MODE_VARIABLE, "token").lower() != "token"
    if disabled or os.environ.get(_TOKEN_VARIABLE) or os.environ.get(_PATH_VARIABLE):
        yield
        return
    path = Path(folder) / "auth_token"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(_ray_token())
    os.environ[_PATH_VARIABLE] = str(path)
    try:
        yield
    finally:
        del os.environ[_PATH_VARIABLE]


@contextmanager
def set_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of this process, which new processes inherit, while the context is open."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@cache  # Ray keeps the first token that it has read for the life of a process
def _ray_token() -> str:
    return secrets.token_hex(32)
