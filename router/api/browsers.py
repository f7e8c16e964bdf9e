"""Keeps pages in browsers from a service that their machine reaches, unless the configuration
allows their origin.

Three ways lead from a page to a service on localhost or in an intranet, and each ends here:
- a request across origins (CSRF): browsers send `Origin` with it;
- a request that needs no preflight, by a form or a Blob: it cannot be `application/json`;
- DNS rebinding: the page's own name resolves to the service, so origin and host agree; but the host
  is that name.
gRPC takes no request of a browser: pages cannot speak HTTP/2 without TLS, nor its framing with it.
"""

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers

from ...proto.errors import InvalidArgument, PermissionDenied

ANY: Final = "*"
_LOCAL: Final = "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowserRules:
    """Says which names and origins a server takes requests for. Names have no port; origins are
    `SCHEME://HOST[:PORT]`, as browsers send them; "*" stands for any.
    """

    host_names: Collection[str] = ()
    cors_origins: Collection[str] = ()

    def check(self, headers: Headers) -> None:
        """Raises PermissionDenied for a host that is no address, localhost or one of the names, and
        for an origin that is neither the host's own nor one of the allowed.

        No page has an address as its host but one that the address itself has served.
        """
        hosts = headers.getlist("host")
        if len(hosts) > 1 or (
            hosts and not self._is_host(hosts[0])
        ):  # what sends none, as HTTP/1.0 may, is no browser
            raise PermissionDenied("Host: is not a name of this service (router.host_names)")
        own = {f"{scheme}://{host}".lower() for scheme in ("http", "https") for host in hosts}
        for origin in headers.getlist("origin"):
            if origin.lower() not in own and not {ANY, origin} & set(self.cors_origins):
                raise PermissionDenied(
                    "Origin: is not allowed to use this service (router.cors_origins)"
                )

    def _is_host(self, header: str) -> bool:
        name = _without_port(header).lower()
        known = {_LOCAL, *map(str.lower, self.host_names)}
        return name in known or ANY in known or _is_address(name)


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
