"""The identity of the service that tests run, and what is made with it."""

from typing import Final

from tandem.proto.channel import PeerChannel, PeerServer
from tandem.proto.identity import PeerIdentity

IDENTITY: Final = PeerIdentity(b"of the service that the tests run")
STRANGER: Final = PeerIdentity(b"of somebody who is not of this service")


def peer_channel(address: str) -> PeerChannel:
    """A channel to a worker or a rank."""
    return PeerChannel(address, IDENTITY)


def peer_server() -> PeerServer:
    """A server that takes calls of such channels."""
    return PeerServer(IDENTITY)
