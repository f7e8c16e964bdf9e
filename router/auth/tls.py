"""Serves TLS with certificates that may be replaced while connections are open.

Each new connection uses the latest certificate; open connections do not change.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from ...proto.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Names the files of a server, in PEM."""

    certificate: Path  # with the chain
    key: Path
    client_ca: Path | None = None  # clients need a certificate of this CA; None: no certificate

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self.certificate, self.key, self.client_ca) if path is not None]

    def load(self) -> "TlsMaterial":
        """Reads and checks the files. Raises InvalidArgument, which never quotes their content."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            contents = [path.read_bytes() for path in self.paths]
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except ssl.SSLError:  # a subclass of OSError
            raise InvalidArgument(
                "certificate and key do not match or are not PEM, or client_ca is not PEM", "tls"
            ) from None
        except OSError as error:
            raise InvalidArgument(f"{error.filename}: {error.strerror}", "tls") from None
        certificate, key, *ca = contents
        pair = grpc.ssl_server_certificate_configuration(
            [(key, certificate)], ca[0] if ca else None
        )
        return TlsMaterial(context=context, configuration=pair)


@dataclass(frozen=True, kw_only=True)
class TlsMaterial:
    """Holds the loaded files, in the forms that the HTTP and the gRPC server need."""

    context: ssl.SSLContext
    configuration: Any  # grpc.ServerCertificateConfiguration


class ServerTls:
    """Gives the HTTP and the gRPC server of a router the latest certificates."""

    def __init__(self, material: TlsMaterial) -> None:
        self._needs_clients = material.context.verify_mode is ssl.CERT_REQUIRED
        self._configuration = material.configuration
        self.http_context = _LatestContext(ssl.PROTOCOL_TLS_SERVER)
        self.http_context.latest = material.context

    def replace(self, material: TlsMaterial) -> None:
        """Replaces the certificates for new connections."""
        self._configuration = material.configuration
        self.http_context.latest = material.context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Returns credentials that use the latest certificates at each handshake.

        They read the certificates in a thread of gRPC.
        """
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            lambda: self._configuration,
            require_client_authentication=self._needs_clients,
        )


class _LatestContext(ssl.SSLContext):
    """Wraps each new connection with the latest context.

    A context could load another certificate, but it can never remove a CA.
    """

    latest: ssl.SSLContext

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Wraps a connection; servers call no other method of the context."""
        return self.latest.wrap_bio(*args, **kwargs)


def _no_password() -> str:
    """Refuses an encrypted key; without it, OpenSSL asks the terminal for a password."""
    return ""
