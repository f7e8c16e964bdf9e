"""Makes, writes and reads the secret key of a watermark."""

import base64
import binascii
import hashlib
import os
import secrets
from pathlib import Path
from typing import Final

from ...proto.errors import InvalidArgument
from ...proto.hashing import WATERMARK_KEY_BYTES

KEY_PREFIX: Final = "tandem-watermark-"
"""Lets people and secret scanners recognise a key."""

_SECRET_BYTES: Final = 32
_MAX_FILE_BYTES: Final = 1024
_FIELD: Final = "watermark.key_file"


def write_watermark_key(path: Path) -> None:
    """Writes a new random key to a new file, which only its owner can read.

    Raises InvalidArgument if the file exists: its texts could not be recognised any more.
    """
    text = base64.urlsafe_b64encode(secrets.token_bytes(_SECRET_BYTES)).decode().rstrip("=")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(f"{KEY_PREFIX}{text}\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", "file") from None


def read_watermark_key(path: str | Path) -> bytes:
    """Returns the key by which workers choose green tokens, derived from the secret in a file.

    It has WATERMARK_KEY_BYTES. Raises InvalidArgument, which never quotes the file.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror or 'cannot be read'}", _FIELD) from None
    prefix, found, text = data.strip().partition(KEY_PREFIX.encode())
    try:
        secret = base64.b64decode(text + b"=", altchars=b"-_", validate=True)
    except binascii.Error:
        secret = b""
    if prefix or not found or len(secret) != _SECRET_BYTES:
        raise InvalidArgument(
            f"{path}: is no key of a watermark; make one with `tandem watermark key`", _FIELD
        )
    return hashlib.blake2b(secret, digest_size=WATERMARK_KEY_BYTES, person=b"watermark").digest()
