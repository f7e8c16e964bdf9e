"""Keeps secrets of a service in files of the user who launches it.

One is its identity, for the commands that talk to workers. The other is the salt of prefixes in KV
cache on disk, which outlive a restart.
"""

import logging
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from ...proto.errors import NotFound, Unavailable
from ...proto.home import cache_home
from ...proto.identity import PeerIdentity
from .status import service_of

_SALT_FILE: Final = "prefix-salt"
_SALT_BYTES: Final = 32
log = logging.getLogger(__name__)


def identity_path(status_url: str) -> Path:
    """Returns the path of the identity of the service with this status page, in `cache_home`."""
    return cache_home() / "services" / quote(status_url, safe="")


def kept_status_url(service: str) -> str:
    """Returns the status page of the service of this name whose identity this user keeps.

    Raises NotFound for none, and for several, as of services on several ports.
    """
    try:
        urls = [unquote(file.name) for file in (cache_home() / "services").iterdir()]
    except OSError:
        urls = []
    found = [url for url in urls if service_of(url.rpartition("/")[2]) == service]
    if len(found) != 1:
        raise NotFound(
            f"identity: {cache_home() / 'services'} has {len(found)} identities of services named "
            f"{service}; give the status page of the service (--url) or the file (--identity)"
        )
    return found[0]


@contextmanager
def kept_identity(identity: PeerIdentity, status_url: str) -> Iterator[None]:
    """Keeps the identity in a file, readable by this user alone, while the context is open.

    If the file cannot be written, logs that and continues without it.
    """
    path = None
    try:
        path = identity_path(status_url)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # left by a launcher that was killed
        write_identity(path, identity)
    except (OSError, RuntimeError, Unavailable) as error:  # RuntimeError: the user has no home
        reason = getattr(error, "strerror", None) or "cannot be written"
        log.warning(
            "`tandem drain` will not work: %s: %s; set TANDEM_HOME to a folder that can be written",
            path or "this user has no home",
            reason,
        )
    try:
        yield
    finally:
        with suppress(OSError):
            if path is not None:
                path.unlink(missing_ok=True)


def write_identity(path: Path, identity: PeerIdentity) -> None:
    """Creates the file, readable by this user alone.

    Raises Unavailable if it exists already or cannot be created.
    """
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(identity.to_text())
    except OSError as error:
        raise Unavailable(f"{path}: {error.strerror}") from None


def read_identity(status_url: str, path: Path | None = None) -> PeerIdentity:
    """Returns the identity of the service with this status page, from `path` if it is given.

    Raises NotFound.
    """
    try:
        return PeerIdentity.from_text((path or identity_path(status_url)).read_text())
    except (OSError, ValueError):
        where = f"in {path}" if path else f"of the service at {status_url}"
        raise NotFound(
            f"identity: no identity {where}; run the command on the machine and as the user of "
            "`tandem serve`, or give the file (--identity)"
        ) from None


def kept_salt(folders: Sequence[Path]) -> bytes:
    """Returns the salt that is kept in these folders of KV cache; creates it at the first start.

    Writes it to each folder that lacks it. Raises Unavailable if a salt cannot be read or written,
    or if other users may read it.
    """
    try:
        found = {folder: _read_salt(folder / _SALT_FILE) for folder in folders}
        salt = next(filter(None, found.values()), None) or secrets.token_bytes(_SALT_BYTES)
        for folder, known in found.items():
            if known is None:
                salt = _write_salt(folder / _SALT_FILE, salt)
    except OSError as error:
        raise Unavailable(f"{error.filename or folders[0]}: {error.strerror}") from None
    return salt


def _read_salt(path: Path) -> bytes | None:
    """Returns the salt in a file, None without a file. Raises OSError if the file is unsafe."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(file)
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.geteuid()
            or status.st_mode & 0o077
        ):
            raise OSError(0, "is not a file of this user alone; remove it", str(path))
        salt = os.read(file, _SALT_BYTES + 1)
    finally:
        os.close(file)
    if len(salt) != _SALT_BYTES:
        raise OSError(0, "is damaged; remove it", str(path))
    return salt


def _write_salt(path: Path, salt: bytes) -> bytes:
    """Writes a salt unless another process has just written one; returns the salt in the file.

    Raises OSError.
    """
    os.makedirs(path.parent, mode=0o700, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(
            os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
        ) as file:
            file.write(salt)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(scratch, path)  # atomic, and never replaces a file
    finally:
        scratch.unlink(missing_ok=True)
    return _read_salt(path) or salt
