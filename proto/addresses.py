"""Formats and parses hosts, and opens sockets on them.

In HOST:PORT an IPv6 address is in brackets; sockets need it without them.
"""

import errno
import ipaddress
import socket
from typing import Final

TAKEN: Final = "; is it taken?"
_REASONS: Final = {
    errno.EADDRINUSE: TAKEN,
    errno.EADDRNOTAVAIL: ": this machine has no such interface",
    errno.EACCES: ": this user has no permission; use a port from 1024 up",
    errno.EAFNOSUPPORT: ": this machine has no IPv6",
    socket.EAI_NONAME: ": the name does not resolve",
}


def in_brackets(host: str) -> str:
    """Returns the host's form in HOST:PORT and URLs: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def without_brackets(host: str) -> str:
    """Returns the host's form for sockets."""
    return host.removeprefix("[").removesuffix("]")


def host_of(address: str) -> str:
    """Returns the host of HOST:PORT, without brackets."""
    return without_brackets(address.rpartition(":")[0])


def network_of(host: str) -> str:
    """Returns the network that one client can own: an IPv4 address, or 64 bits of IPv6."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), 64), strict=False))


def open_socket(host: str) -> socket.socket:
    """Returns a TCP socket of the host's address family, which is IPv4 for names."""
    return socket.socket(_family(host))


def listen(
    host: str, port: int, *, backlog: int | None = None, reuse_port: bool = False
) -> socket.socket:
    """Returns a socket that listens on one interface; port 0 is any free port. Raises OSError."""
    place = without_brackets(host), port
    return socket.create_server(place, family=_family(host), backlog=backlog, reuse_port=reuse_port)


def bindable_port(host: str, port: int) -> int:
    """Returns `port`, or a free one for port 0, if a server can bind it. Raises OSError if not."""
    with open_socket(host) as probe:
        # Set as servers set it, so that closed connections do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((without_brackets(host), port))
        return int(probe.getsockname()[1])


def why_not_bound(host: str, port: int) -> str:
    """Returns the reason why a port cannot be bound, as the end of a sentence.

    The reason is empty if the port can be bound.
    """
    try:
        bindable_port(host, port)
    except OSError as error:
        return _REASONS.get(error.errno or 0, f": {error.strerror}")
    return ""


def free_port(host: str) -> int:
    """Returns a port that is not bound at this moment. Raises OSError."""
    with listen(host, 0) as probe:
        return int(probe.getsockname()[1])


def is_loopback(host: str) -> bool:
    """Returns True if only this machine can reach the host."""
    try:
        return ipaddress.ip_address(without_brackets(host)).is_loopback
    except ValueError:
        return host == "localhost"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
