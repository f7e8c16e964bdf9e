"""Keeps the identity of a service in a file of the user who has launched it, for the commands that talk to workers."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from platformdirs import user_cache_path

from ..proto.errors import NotFound, Unavailable
from ..proto.identity import PeerIdentity

log = logging.getLogger(__name__)


def identity_path(status_url: str) -> Path:
    """Returns the file of the service with this status page: in `$TANDEM_HOME/services`, else in `services` of the
    user's cache folder."""
    home = os.environ.get("TANDEM_HOME")
    folder = Path(os.path.expanduser(home)) if home else user_cache_path("tandem")
    return folder / "services" / quote(status_url, safe="")


@contextmanager
def kept_identity(identity: PeerIdentity, status_url: str) -> Iterator[None]:
    """Has the file there for as long as the context lasts, readable by this user alone; where it cannot be written,
    logs that and goes on without it."""
    path = None
    try:
        path = identity_path(status_url)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of a launcher that was killed
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
    """Makes the file, readable by this user alone. Raises Unavailable if it is there already, or cannot be made."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(identity.to_text())
    except OSError as error:
        raise Unavailable(f"{path}: {error.strerror}") from None


def read_identity(status_url: str, path: Path | None = None) -> PeerIdentity:
    """Returns the identity of the service with this status page, from `path` if it is given. Raises NotFound."""
    try:
        return PeerIdentity.from_text((path or identity_path(status_url)).read_text())
    except (OSError, ValueError):
        where = f"in {path}" if path else f"of this user for a service at {status_url}"
        raise NotFound(f"identity: none {where}; it is kept where `tandem serve` runs") from None
