"""Makes a CA and certificates for tests."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Holds a certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def write(self, certificate: Path, key: Path | None = None) -> Path:
        """Writes PEM files; returns the path of the certificate."""
        certificate.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))
        if key is not None:
            form = (
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            key.write_bytes(self.key.private_bytes(*form))
        return certificate


_SIGNS = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)
"""The uses of a CA's key."""


def make_certificate(
    name: str, issuer: Certificate | None = None, address: str = "127.0.0.1"
) -> Certificate:
    """Returns a CA, or with an issuer a certificate for an address.

    Both have the key identifiers that RFC 5280 requires and Python checks from 3.13 on.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(
                (issuer.key if issuer else key).public_key()
            ),
            critical=False,
        )
    )
    if issuer is None:
        builder = builder.add_extension(_SIGNS, critical=True)
    if issuer is not None:
        names = x509.SubjectAlternativeName([x509.IPAddress(ip_address(address))])
        builder = builder.add_extension(names, critical=False)
    signed = builder.sign(issuer.key if issuer else key, hashes.SHA256())
    return Certificate(certificate=signed, key=key)
