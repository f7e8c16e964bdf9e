"""Defines the file of API keys: a JSON object with the SHA-256 and the limits of each key.

A key is 256 random bits and cannot be guessed, so a fast hash is safe. A slow hash protects only
passwords that people choose, and would let strangers spend the router's time.
"""

import base64
import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...proto.errors import InvalidArgument, NotFound
from ..fields import error_text, matching
from .config import TENANT, KeyHash

KEY_PREFIX: Final = "tandem-"
"""Lets people and secret scanners recognise a key."""

MAX_FILE_BYTES: Final = 4 * 1024 * 1024

_KEY_BYTES: Final = 32
_Name = Annotated[
    str,
    matching(
        TENANT,
        "1 to 64 letters, digits, '.', '_', '@' and '-', with a letter or digit first",
    ),
]
_STRICT: Final = ConfigDict(frozen=True, extra="forbid", strict=True)

PerMinute = Annotated[int, Field(ge=1, le=1_000_000_000)]


class ApiKey(BaseModel):
    """Describes one key; a limit of None is no limit."""

    model_config = _STRICT

    name: _Name
    sha256: KeyHash
    # The keys of one tenant share its turns in the queue and its prefix cache.
    tenant: _Name
    max_priority: Annotated[int, Field(ge=-100, le=100)] = 0
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None  # of prompts and completions
    max_streams: Annotated[int, Field(ge=1, le=1_000_000)] | None = None  # concurrent calls
    operator: bool = False  # sees the requests of all tenants in the console
    expires: AwareDatetime | None = None

    def has_expired(self, now: float) -> bool:
        """Returns True if the key is not valid any more at `now`, in seconds since the epoch."""
        return self.expires is not None and self.expires.timestamp() <= now


class KeyFile(BaseModel):
    """Holds the keys of a service."""

    model_config = _STRICT

    keys: Annotated[list[ApiKey], Field(max_length=10_000)] = []

    @model_validator(mode="after")
    def _has_no_key_twice(self) -> Self:
        for field in ("name", "sha256"):
            if len({getattr(key, field) for key in self.keys}) < len(self.keys):
                raise ValueError(f"two keys have the same {field}")
        return self


def hash_key(key: str) -> bytes:
    """Returns the SHA-256 of a key; accepts any text."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def operator_keys(hashes: Sequence[str]) -> list[ApiKey]:
    """Returns keys of the tenant `default` with the rights of an operator and without limits.

    `hashes`: the SHA-256 of each key, in hexadecimal.
    """
    return [
        ApiKey(name=f"api-key-{number}", sha256=sha256, tenant="default", operator=True)
        for number, sha256 in enumerate(hashes, 1)
    ]


def load_keys(path: str | Path) -> list[ApiKey]:
    """Reads a key file. Raises InvalidArgument; its message never quotes a value of the file."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        text = f"{path}: {error.strerror}; `tandem key create FILE NAME` makes the file"
        raise InvalidArgument(text, "keys_file") from None
    except OSError as error:
        raise InvalidArgument(
            f"{path}: {error.strerror or 'cannot be read'}", "keys_file"
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise InvalidArgument(f"{path}: must be at most {MAX_FILE_BYTES} bytes", "keys_file")
    try:
        return KeyFile.model_validate_json(data).keys
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidArgument(
            f"{path}: {where + ': ' if where else ''}{error_text(first)}", "keys_file"
        ) from None


def create_key(path: Path, **fields: object) -> str:
    """Adds a new key to the file and returns the key, which is stored nowhere.

    Creates a missing file. `fields`: the fields of ApiKey without `sha256`. Raises InvalidArgument.
    """
    secret = base64.urlsafe_b64encode(secrets.token_bytes(_KEY_BYTES)).decode().rstrip("=")
    key = KEY_PREFIX + secret
    try:
        added = ApiKey(sha256=hash_key(key).hex(), **fields)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidArgument(error_text(first), ".".join(map(str, first["loc"]))) from None
    with _exclusive(path):
        keys = load_keys(path) if path.exists() else []
        if any(added.name == each.name for each in keys):
            raise InvalidArgument("another key has this name; revoke it first", "name")
        _write(path, [*keys, added])
    return key


def revoke_key(path: Path, name: str) -> None:
    """Removes a key from the file. Raises NotFound or InvalidArgument."""
    with _exclusive(path):
        keys = load_keys(path)
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            raise NotFound(f"name: no key {name!r} in {path}")
        _write(path, left)


def parse_expiry(text: str) -> datetime:
    """Parses an ISO date or time, by default in UTC. Raises InvalidArgument."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(
            "must be a date such as 2027-01-31, or a time in ISO form", "expires"
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Locks the folder of the file against other commands.

    The file itself cannot hold the lock, because each change replaces it.
    """
    try:
        folder = os.open(path.absolute().parent, os.O_RDONLY)
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", "keys_file") from None
    try:
        flock(folder, LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write(path: Path, keys: list[ApiKey]) -> None:
    """Replaces the file atomically, so that readers see the old keys or the new keys.

    A new file is readable by its owner only. A replaced file keeps its owner, group and mode, so
    that the router can still read it after a command of another user, for example root.
    """
    text = KeyFile(keys=keys).model_dump_json(indent=2, exclude_none=True) + "\n"
    target = path.resolve()  # replaces the file that a link names, not the link
    try:
        descriptor, made = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with open(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if target.exists():
                _copy_rights(target, made)
            os.replace(made, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(made)
            raise
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", "keys_file") from None


def _copy_rights(source: Path, target: str) -> None:
    """Gives `target` the owner, group and mode of `source`. Raises InvalidArgument."""
    found = source.stat()
    try:
        os.chown(target, found.st_uid, found.st_gid)
    except OSError as error:
        raise InvalidArgument(
            f"{source}: its owner and group cannot be kept: {error.strerror}; run the command as "
            "the owner of the file or root",
            "keys_file",
        ) from None
    os.chmod(target, found.st_mode & 0o777)  # after chown: before, it could let others read
