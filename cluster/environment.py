"""Sets what Ray reads from the environment: before it is imported, and before a local Ray starts."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

_PATH_VARIABLE: Final = "RAY_AUTH_TOKEN_PATH"


def prepare_ray_environment(address: str | None) -> str | None:
    """Sets Ray's variables explicitly; returns the address of the cluster to join, None for a local Ray. Call it before
    Ray is imported.

    A cluster that is joined has its own mode of authentication, which Ray takes from the variables and the token of
    whoever joins, as it did when the cluster was started on this machine."""
    address = address or os.environ.get("RAY_ADDRESS") or None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A call after the end of Ray must fail instead of starting another Ray.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    if address is None:
        # A local Ray listens beyond loopback, and runs whatever it is sent: require a token, see `own_ray_token`.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        # Ray would run workers at nice 15: whatever else runs on the machine would stall the token streams.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Serve's controller looks at every replica ten times a second: with Ray's own store a twentieth of a core.
        os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.3")
    return address


@contextmanager
def own_ray_token(folder: str) -> Iterator[None]:
    """Gives a local Ray a token that nothing else has, in a file in `folder`: not the one in ~/.ray, with which the
    user may reach other clusters. A token that the environment names is left."""
    disabled = os.environ.get("RAY_AUTH_MODE", "token").lower() != "token"
    if disabled or os.environ.get("RAY_AUTH_TOKEN") or os.environ.get(_PATH_VARIABLE):
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


@cache  # Ray keeps the first token that it has read for the life of a process
def _ray_token() -> str:
    return secrets.token_hex(32)
