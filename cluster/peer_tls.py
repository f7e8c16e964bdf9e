"""Gives the processes of a service certificates for TLS between them: made at the launch, or read from files."""

import ssl
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ..proto.errors import InvalidArgument
from ..proto.identity import PeerTls
from .config import PeerTlsConfig, is_loopback

_DAYS: Final = 3650  # a service that runs for longer is deployed again before


def peer_tls(config: PeerTlsConfig, addresses: Iterable[str]) -> PeerTls | None:
    """Returns what peers of a service on nodes with these addresses use; None for plaintext, which is the default only
    where all nodes are loopback. Raises InvalidArgument if files are no certificates."""
    mode = config.mode or ("none" if all(map(is_loopback, addresses)) else "cluster")
    if mode == "none":
        return None
    return make_peer_tls(config.name) if mode == "cluster" else _read_files(config)


def make_peer_tls(name: str) -> PeerTls:
    """Makes a key and a certificate that all processes of one service share, and that no one else has."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks of nodes may differ
        .not_valid_after(now + timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return PeerTls(ca=pem, certificate=pem, key=private, name=name)


def _read_files(config: PeerTlsConfig) -> PeerTls:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(config.ca)
        context.load_cert_chain(str(config.certificate), config.key)
        ca, certificate, key = (Path(str(path)).read_bytes() for path in (config.ca, config.certificate, config.key))
    except (OSError, ValueError) as error:  # of ssl, too
        raise InvalidArgument(f"peer_tls: no certificate with its key and its CA ({error})") from None
    return PeerTls(ca=ca, certificate=certificate, key=key, name=config.name)
