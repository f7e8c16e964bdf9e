"""Gives the processes of a service certificates for TLS between them.

They are made at the launch or read from files.
"""

import ssl
from collections.abc import Iterable
from pathlib import Path

from ...proto.addresses import is_loopback
from ...proto.errors import InvalidArgument
from ...proto.identity import PeerTls
from ..certificate import make_peer_tls
from ..config import PeerTlsConfig


def peer_tls(config: PeerTlsConfig, addresses: Iterable[str]) -> PeerTls | None:
    """Returns the TLS material of the peers of a service on nodes with these addresses.

    None means plaintext, the default if all nodes are loopback. Raises InvalidArgument if the files
    are no certificates.
    """
    mode = config.mode or ("none" if all(map(is_loopback, addresses)) else "cluster")
    if mode == "none":
        return None
    return make_peer_tls(config.name) if mode == "cluster" else _read_files(config)


def _read_files(config: PeerTlsConfig) -> PeerTls:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(config.ca)
        context.load_cert_chain(str(config.certificate), config.key)
        ca, certificate, key = (
            Path(str(path)).read_bytes() for path in (config.ca, config.certificate, config.key)
        )
    except (OSError, ValueError) as error:  # ssl raises both
        raise InvalidArgument(
            f"peer_tls: the files are not a certificate with its key and its CA ({error})"
        ) from None
    return PeerTls(ca=ca, certificate=certificate, key=key, name=config.name)
