"""Hashes API keys that `tandem serve` gets in the clear, and hides them in its command line."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ..proto.errors import InvalidArgument
from ..router.auth.authenticator import MAX_KEY_CHARACTERS
from ..router.auth.keys import hash_key

API_KEY_FLAG: Final = "--api-key"

# Visible ASCII: clients can send nothing else in a header, and a space would end the key.
_KEY: Final = re.compile(rf"[!-~]{{1,{MAX_KEY_CHARACTERS}}}")
_PROCESS: Final = Path("/proc/self")
# Fields of /proc/self/stat after the name of the program (man proc_pid_stat: 48 and 49).
_ARG_START: Final = 45
_ARG_END: Final = 46


def hash_given_keys(given: Any, field: str) -> tuple[str, ...]:
    """Returns the SHA-256 of one key or of each in a list, in hexadecimal.

    `field` names the keys in errors. Raises InvalidArgument, which never quotes a key.
    """
    keys = given if isinstance(given, list | tuple) else [given]
    if not all(isinstance(key, str) and _KEY.fullmatch(key) for key in keys):
        raise InvalidArgument(
            f"must be 1 to {MAX_KEY_CHARACTERS} visible ASCII characters without a space", field
        )
    return tuple(dict.fromkeys(hash_key(key).hex() for key in keys))


def hide_given_keys() -> None:
    """Overwrites the keys in the command line of this process.

    Other users can read it, and Ray shows the command line of a driver in its dashboard. Raises
    InvalidArgument if the keys cannot be overwritten.
    """
    try:
        fields = (_PROCESS / "stat").read_text().rpartition(")")[2].split()
        start = int(fields[_ARG_START])
        length = int(fields[_ARG_END]) - start
        with open(_PROCESS / "mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            hidden = _without_keys(memory.read(length).split(b"\0"))
            memory.seek(start)
            memory.write(b"\0".join(hidden))
    except (OSError, IndexError, ValueError):
        raise InvalidArgument(
            "cannot be hidden in the command line here; use --api-keys FILE", API_KEY_FLAG
        ) from None


def _without_keys(arguments: Sequence[bytes]) -> list[bytes]:
    """Returns arguments of the same lengths with asterisks in the place of keys."""
    flag = API_KEY_FLAG.encode()
    found = list(arguments)
    for index, argument in enumerate(arguments):
        if argument.startswith(flag + b"="):
            found[index] = flag + b"=" + b"*" * (len(argument) - len(flag) - 1)
        elif index and arguments[index - 1] == flag:
            found[index] = b"*" * len(argument)
    return found
