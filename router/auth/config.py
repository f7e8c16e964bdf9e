"""Configures the API keys of the routers' API servers."""

import os
from typing import Annotated, Final, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, model_validator

from ..fields import matching

AbsolutePath = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(os.path.abspath)]
TENANT: Final = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"
"""The name of a tenant or of a key, as a regular expression."""

KeyHash = Annotated[
    str,
    # Not shown in errors, because it may be a key by mistake.
    matching(
        r"[0-9a-f]{64}", "the SHA-256 of a key: 64 digits of 0 to 9 and a to f", is_secret=True
    ),
]
SECTION: Final = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class AuthConfig(BaseModel):
    """Configures API keys; without keys the routers serve everyone, by default on loopback only."""

    model_config = SECTION

    # Written by `tandem key`; at this path on every node of a router.
    keys_file: AbsolutePath | None = None
    # The SHA-256 of keys of the tenant `default`, in place of a file; `--api-key` sets them.
    key_hashes: Annotated[tuple[KeyHash, ...], Field(max_length=64), Strict(False)] = ()
    allow_anonymous: bool = False  # serve without keys on any interface
    # True: callers without a key share cached prefixes with all others. False: only within one
    # connection, because a cached prompt reveals that another caller has sent it. None: True on
    # loopback.
    share_anonymous_prefixes: bool | None = None
    # The maximum priority of requests without a key.
    anonymous_max_priority: int = Field(default=0, ge=-100, le=100)

    @model_validator(mode="after")
    def _has_one_source_of_keys(self) -> Self:
        if self.keys_file is not None and self.key_hashes:
            raise ValueError(
                "auth.key_hashes (--api-key): cannot be set together with auth.keys_file "
                "(--api-keys)"
            )
        if self.needs_key and self.allow_anonymous:
            name = "keys_file" if self.keys_file is not None else "key_hashes"
            raise ValueError(f"auth.allow_anonymous: cannot be set together with auth.{name}")
        return self

    @property
    def needs_key(self) -> bool:
        """Returns True if each call needs a key."""
        return self.keys_file is not None or bool(self.key_hashes)
