"""Knows who calls: finds the key that a call brings, and what the key stands for.

Nothing is kept of a key that is not known. A key is looked up by its SHA-256 in a dict: how long
that takes depends on digests alone, and nobody can choose a key by its digest, so it says nothing
about the keys in the file; the digest that was found is then compared in constant time, and where
none was found another one is.
"""

import hmac
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from typing import Final
from urllib.parse import unquote

from ...proto.errors import Unauthenticated
from .keys import ApiKey, hash_key
from .rate import Quota

MAX_KEY_CHARACTERS: Final = 256

_MISSING: Final = "an API key is needed: Authorization: Bearer KEY"
_WRONG: Final = "the API key is not known, or has expired"
_NO_DIGEST: Final = bytes(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Describes who calls, by what the key says; without one anonymously."""

    tenant: str = ""  # callers of one tenant take turns with others as one
    address: str = ""  # without a key
    cache_salt: bytes = b""  # callers with the same share cached prefixes
    max_priority: int | None = None
    key_name: str = ""  # of the key, for operators
    sees_all: bool = True  # of the console: requests of all tenants, not only of this one
    quota: Quota = field(default_factory=Quota)

    @property
    def turn(self) -> str:
        """The name by which the caller takes turns with others at being tokenized: its tenant;
        without a key its address, since strangers are not one tenant.
        """
        return self.tenant or self.address

    def priority(self, wanted: int) -> int:
        """Returns the priority of a request: what it asks for, as far as the key goes."""
        return wanted if self.max_priority is None else min(wanted, self.max_priority)


class Authenticator:
    """Maps the credentials of calls to callers. Lives in one event loop; `replace` changes the keys
    while it runs.
    """

    def __init__(
        self,
        keys: Iterable[ApiKey] | None = None,
        *,
        secret: bytes | None = None,
        share_anonymous_prefixes: bool = True,
        anonymous_max_priority: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`keys`: None if the service needs none. `secret`: the same in all routers of the service,
        so that a tenant has one prefix cache; None: a random one. Without
        `share_anonymous_prefixes` callers without a key share cached prefixes only within a
        connection. `anonymous_max_priority`: the highest priority of their requests.
        """
        self._salts = hmac.digest(
            secret or secrets.token_bytes(32), b"tandem prefix cache", "sha256"
        )
        self._clock = clock
        self._is_open = keys is None
        self._share = share_anonymous_prefixes
        self._anonymous = Caller(max_priority=anonymous_max_priority)
        self._callers: dict[bytes, tuple[ApiKey, Caller]] = {}  # by digest
        self.replace(keys or ())

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Takes other keys from now on. A key that stays keeps what it has used; calls under way go
        on in any case.
        """
        callers = {}
        for key in keys:
            digest = bytes.fromhex(key.sha256)
            _, known = self._callers.get(digest, (None, None))
            quota = Quota() if known is None else known.quota
            quota.resize(key.requests_per_minute, key.tokens_per_minute, key.max_streams)
            salt = self._salt("tenant", key.tenant)
            caller = Caller(
                tenant=key.tenant,
                cache_salt=salt,
                max_priority=key.max_priority,
                key_name=key.name,
                sees_all=key.operator,
                quota=quota,
            )
            callers[digest] = key, caller
        self._callers = callers

    def caller(self, authorization: str | None, connection: str, peer: str = "") -> Caller:
        """Returns who calls. `authorization`: the header of the call; `connection`: a name that no
        other connection has or will have, so no address and port; `peer`: HOST:PORT of the client,
        or gRPC's name of it. Raises Unauthenticated.
        """
        if self._is_open:
            address = _address(peer)
            if self._share:
                return replace(self._anonymous, address=address)
            salt = self._salt("connection", connection)
            return replace(self._anonymous, address=address, cache_salt=salt, sees_all=False)
        scheme, _, given = (authorization or "").strip().partition(" ")
        given = given.strip()
        if scheme.lower() != "bearer" or not given:
            raise Unauthenticated(_MISSING)
        digest = hash_key(given[: MAX_KEY_CHARACTERS + 1])
        key, caller = self._callers.get(digest, (None, self._anonymous))
        expected = _NO_DIGEST if key is None else bytes.fromhex(key.sha256)
        if (
            not hmac.compare_digest(digest, expected)
            or key is None
            or key.has_expired(self._clock())
        ):
            raise Unauthenticated(_WRONG)
        return caller

    def _salt(self, kind: str, name: str) -> bytes:
        """Returns a salt that nobody can compute who lacks the secret."""
        return hmac.digest(self._salts, f"{kind} {name}".encode(), "sha256")


def _address(peer: str) -> str:
    """Returns the address in `HOST:PORT`, or in gRPC's `ipv4:HOST:PORT` and `ipv6:[HOST]:PORT`; of
    IPv6 the network of 64 bits, all of whose addresses one host can have.
    """
    host = unquote(peer).rpartition(":")[0].removeprefix("ipv4:").removeprefix("ipv6:").strip("[]")
    if ":" not in host:
        return host
    try:
        return str(ip_network((host.partition("%")[0], 64), strict=False))
    except ValueError:
        return host
