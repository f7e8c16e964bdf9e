"""Refuses requests of web pages, unless the configuration allows their origin.

A page in a browser can reach a service on localhost or in an intranet in three ways. This module
stops each of them:
- A request across origins (CSRF): browsers send `Origin` with it.
- A request without a preflight, by a form or a Blob: it cannot be `application/json`.
- DNS rebinding: the name of the page's host resolves to the service, so origin and host agree. The
  host is then a name that the service does not know.
Pages cannot use gRPC: they have no HTTP/2 without TLS, and cannot write its frames with TLS.
"""

import ipaddress
import socket
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers

from ...proto.addresses import is_loopback
from ...proto.errors import InvalidArgument, PermissionDenied

ANY: Final = "*"
_LOCAL: Final = "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowserRules:
    """Holds the host names and the origins that a server accepts.

    Names have no port; origins are `SCHEME://HOST[:PORT]`, as browsers send them; "*" stands for
    any.
    """

    host_names: Collection[str] = ()
    cors_origins: Collection[str] = ()

    def check(self, headers: Headers) -> None:
        """Raises PermissionDenied for an unknown host or origin.

        Addresses, localhost and `host_names` are known hosts: the host of a page is an address only
        if the server at this address has sent the page. The own origin of the host and
        `cors_origins` are known origins.
        """
        hosts = headers.getlist("host")  # every browser sends one; clients of HTTP/1.0 need not
        if len(hosts) > 1 or (hosts and not self._is_host(hosts[0])):
            raise PermissionDenied(
                "Host: is not a name of this service; add it by --host-name NAME or "
                "router.host_names"
            )
        own = {f"{scheme}://{host}".lower() for scheme in ("http", "https") for host in hosts}
        for origin in headers.getlist("origin"):
            if origin.lower() not in own and not {ANY, origin} & set(self.cors_origins):
                raise PermissionDenied(
                    "Origin: is not allowed to use this service; add it by --cors-origin ORIGIN "
                    "or router.cors_origins"
                )

    def _is_host(self, header: str) -> bool:
        name = _without_port(header).lower()
        known = {_LOCAL, *map(str.lower, self.host_names)}
        return name in known or ANY in known or _is_address(name)


def own_names(host: str) -> tuple[str, ...]:
    """Returns the names of a server that binds `host`: on a network, also those of its machine.

    Asks no DNS server, because an answer may take seconds.
    """
    if is_loopback(host):
        return (host,)
    # DNS rebinding by one of these names needs control of the DNS or mDNS of the network. Who has
    # it is inside, and can call a service without keys directly, so the check would not help. Other
    # attackers own names of the public DNS only: no single label, nothing under .local, and not the
    # domain of this machine. Nobody on the network reaches a service on loopback directly, so there
    # the names stay unknown.
    name = socket.gethostname()
    label = name.partition(".")[0]
    return (host, name, label, f"{label}.local")


def check_json(headers: Headers) -> None:
    """Raises InvalidArgument unless the body is declared as JSON."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise InvalidArgument("must be application/json", "Content-Type")


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return name if name and port.isdecimal() and not name.endswith(":") else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name[:1] + name[-1:] == "[]" else name)
    except ValueError:
        return False
    return True
