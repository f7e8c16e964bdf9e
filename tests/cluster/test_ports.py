"""Tests the claims of ports, and what is told of a taken one."""

import pytest

from tandem.cluster.config import load_config
from tandem.cluster.serve import ports
from tandem.cluster.serve.ports import PortClaim, local_host
from tandem.proto.addresses import bindable_port, listen
from tandem.proto.errors import Unavailable


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("status_port", "set status_port to another one"),
        ("router.grpc_port", "choose another one (--grpc-port, 0 for a free one)"),
        ("router.http_port", "choose another one (--http-port, 0 for a free one)"),
    ],
)
def test_a_taken_port_has_a_remedy(key: str, remedy: str) -> None:
    free = {"model": "m", "router.grpc_port": 0, "router.http_port": 0}
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable) as refused:
            local_host(load_config(overrides=free | {key: port}))
    told = f"{key}: 127.0.0.1:{port} cannot be bound; is it taken? Then {remedy}"
    assert str(refused.value) == told


def test_a_port_has_one_claim() -> None:
    claim = PortClaim("127.0.0.1:0", "", ())
    with pytest.raises(OSError, match="in use"):
        PortClaim(claim.address, "", ())
    claim.close()
    PortClaim(claim.address, "", ()).close()


def test_a_port_is_shared_with_one_router_of_the_deployment_that_replaces() -> None:
    claim = PortClaim("127.0.0.1:0", "", ())
    successor = PortClaim(claim.address, "tandem.2", {claim.address})
    with pytest.raises(OSError, match="in use"):
        PortClaim(claim.address, "tandem.2", {claim.address})
    successor.close()
    claim.close()


def test_a_free_port_that_another_process_claims_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claim = PortClaim("127.0.0.1:0", "", ())
    taken = ports.port_of(claim.address)
    found = iter([taken, taken, bindable_port("127.0.0.1", 0)])
    monkeypatch.setattr(ports, "bindable_port", lambda _host, _port: next(found))
    other = PortClaim("127.0.0.1:0", "", ())
    assert other.address != claim.address
    other.close()
    claim.close()


def test_a_claim_gives_up_when_no_free_port_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = PortClaim("127.0.0.1:0", "", ())
    taken = ports.port_of(claim.address)
    monkeypatch.setattr(ports, "bindable_port", lambda _host, _port: taken)
    with pytest.raises(OSError, match="in use"):
        PortClaim("127.0.0.1:0", "", ())
    claim.close()
