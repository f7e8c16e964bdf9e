"""Authenticates calls: finds the API key of a call, and the caller that the key stands for.

An unknown key leaves no trace in memory. A key is looked up by its SHA-256 in a dict. The time of
this look-up depends only on digests, and nobody can choose a key by its digest, so the time reveals
nothing about the keys in the file. The digest is then compared in constant time, with a digest of
zeros if the key is unknown.
"""

import hmac
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import unquote

from ...proto.addresses import network_of
from ...proto.errors import Unauthenticated
from .keys import ApiKey, hash_key
from .rate import Quota

MAX_KEY_CHARACTERS: Final = 256

_MISSING: Final = "an API key is needed: Authorization: Bearer KEY"
_WRONG: Final = "the API key is unknown or has expired"
_NO_DIGEST: Final = bytes(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Describes a caller by its key; a caller without a key is anonymous."""

    tenant: str = ""  # the fair queue serves all callers of a tenant as one
    address: str = ""  # of a caller without a key
    cache_salt: bytes = b""  # callers with the same salt share cached prefixes
    max_priority: int | None = None
    key_name: str = ""  # for operators
    sees_all: bool = True  # the rights of an operator: console, usage, files and adapters of all
    quota: Quota = field(default_factory=Quota)

    @property
    def fairness_id(self) -> str:
        """Returns the key by which callers share the CPU threads: the tenant, or else the address.

        Callers without a key are not one tenant.
        """
        return self.tenant or self.address

    def priority(self, wanted: int) -> int:
        """Returns the requested priority, limited to the maximum of the key."""
        return wanted if self.max_priority is None else min(wanted, self.max_priority)


class Authenticator:
    """Maps the credentials of calls to callers; used in one event loop."""

    def __init__(
        self,
        keys: Iterable[ApiKey] | None = None,
        *,
        secret: bytes | None = None,
        share_anonymous_prefixes: bool = True,
        anonymous_sees_all: bool = True,
        anonymous_max_priority: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Starts with these keys.

        `keys`: None if the service needs no keys. `secret`: all routers of the service have the
        same secret, so that a tenant has one prefix cache; None: a random secret. Without
        `share_anonymous_prefixes`, callers without a key share cached prefixes only within a
        connection. `anonymous_sees_all`: callers without a key have the rights of an operator.
        `anonymous_max_priority`: the maximum priority of requests without a key.
        """
        self._salts = hmac.digest(
            secret or secrets.token_bytes(32), b"tandem prefix cache", "sha256"
        )
        self._clock = clock
        self._is_open = keys is None
        self._share = share_anonymous_prefixes
        self._anonymous = Caller(max_priority=anonymous_max_priority, sees_all=anonymous_sees_all)
        self._callers: dict[bytes, tuple[ApiKey, Caller]] = {}  # by digest
        self.replace(keys or ())

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Replaces the keys; a key that stays keeps its used quota, and running calls go on."""
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
        """Returns the caller of a call. Raises Unauthenticated.

        `authorization`: the header of the call. `connection`: a name that no other connection ever
        has, so not an address and a port. `peer`: HOST:PORT of the client, or gRPC's name for it.
        """
        if self._is_open:
            address = _address(peer)
            if self._share:
                return replace(self._anonymous, address=address)
            salt = self._salt("connection", connection)
            return replace(self._anonymous, address=address, cache_salt=salt)
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

    def caller_of(self, tenant: str, key_name: str) -> Caller | None:
        """Returns the caller with the key of this name, for work that it has left with the service.

        None: the key has been removed, has expired or belongs to another tenant. In a service
        without keys, all callers are one.
        """
        if self._is_open:
            return None if key_name else self._anonymous
        for key, caller in self._callers.values():
            if (key.name, key.tenant) == (key_name, tenant) and not key.has_expired(self._clock()):
                return caller
        return None

    def _salt(self, kind: str, name: str) -> bytes:
        """Returns a salt that cannot be computed without the secret."""
        return hmac.digest(self._salts, f"{kind} {name}".encode(), "sha256")


def _address(peer: str) -> str:
    """Returns the address of a peer, or for IPv6 its network; see `network_of`.

    `peer`: `HOST:PORT`, or gRPC's `ipv4:HOST:PORT` or `ipv6:[HOST]:PORT`.
    """
    host = unquote(peer).rpartition(":")[0].removeprefix("ipv4:").removeprefix("ipv6:").strip("[]")
    return network_of(host)
