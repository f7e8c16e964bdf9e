"""Configures who may call the routers, and TLS at their API servers."""

import os
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from .tls import TlsFiles

AbsolutePath = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(os.path.abspath)]
SECTION: Final = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class AuthConfig(BaseModel):
    """Configures who may call the routers. Without keys everyone may, but on loopback only unless
    it says otherwise.
    """

    model_config = SECTION

    keys_file: AbsolutePath | None = (
        None  # as `tandem key` makes it; at this path on every node of a router
    )
    allow_anonymous: bool = False  # serve without keys on any interface
    # Whether callers without a key share cached prefixes with all others; if not, only within one
    # connection: whether a prompt is cached says that another has sent it. None: on loopback.
    share_anonymous_prefixes: bool | None = None
    anonymous_max_priority: int = Field(
        default=0, ge=-100, le=100
    )  # of requests without a key, at most

    @model_validator(mode="after")
    def _needs_keys_or_not(self) -> Self:
        if self.keys_file is not None and self.allow_anonymous:
            raise ValueError("auth.allow_anonymous: does not go with auth.keys_file")
        return self


class TlsConfig(BaseModel):
    """Configures TLS at the API servers: files in PEM, at these paths on every node of a router.
    They may be replaced while the service runs.
    """

    model_config = SECTION

    certificate: AbsolutePath  # with its chain
    key: AbsolutePath
    client_ca: AbsolutePath | None = None  # only clients with a certificate of it are served

    @property
    def files(self) -> TlsFiles:
        client_ca = None if self.client_ca is None else Path(self.client_ca)
        return TlsFiles(certificate=Path(self.certificate), key=Path(self.key), client_ca=client_ca)
