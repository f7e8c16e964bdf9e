import socket

import pytest

from tandem.proto.addresses import (
    free_port,
    host_of,
    in_brackets,
    is_loopback,
    listen,
    network_of,
    why_not_bound,
    without_brackets,
)
from tandem.tests.waits import WAIT


@pytest.mark.parametrize(
    ("host", "written"),
    [
        ("::1", "[::1]"),
        ("[::1]", "[::1]"),
        ("127.0.0.1", "127.0.0.1"),
        ("a.example", "a.example"),
    ],
)
def test_only_ipv6_addresses_get_brackets(host: str, written: str) -> None:
    assert in_brackets(host) == written
    assert in_brackets(without_brackets(written)) == written
    assert host_of(f"{written}:80") == without_brackets(host)


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "[fe80::1]", "a.example", "")))


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::7", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("no:address", "no:address"),
        ("", ""),
    ],
)
def test_a_client_can_own_a_network_of_64_bits(host: str, network: str) -> None:
    assert network_of(host) == network


@pytest.mark.io
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "::1"])
def test_listens_on_interfaces_of_both_families(host: str) -> None:
    if ":" in host and why_not_bound("::1", 0):
        pytest.skip("this machine has no IPv6")
    with listen(host, free_port(host)) as server:
        port = server.getsockname()[1]
        assert why_not_bound(host, port) == "; is it taken?"
        socket.create_connection((without_brackets(host), port), timeout=WAIT).close()
    assert why_not_bound(host, port) == ""


@pytest.mark.io
def test_why_a_port_cannot_be_bound() -> None:
    assert why_not_bound("192.0.2.7", 0) == ": this machine has no such interface"
    assert why_not_bound("[2001:db8::7]", 0).startswith(": this machine has no ")
