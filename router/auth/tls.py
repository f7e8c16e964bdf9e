"""Serves TLS with certificates that may be replaced while connections are open.

Each new connection uses the latest certificate; open connections do not change.
"""

import ssl
from pathlib import Path
from typing import Any

import grpc
from pydantic import BaseModel

from ...proto.errors import InvalidArgument
from .config import SECTION, AbsolutePath

TlsMaterial = tuple[ssl.SSLContext, Any]
"""The loaded files: for the HTTP server, and as the configuration of the gRPC server."""


class TlsConfig(BaseModel):
    """Configures TLS of the API servers.

    The files are in PEM, at these paths on every node of a router. They may be replaced while the
    service runs.
    """

    model_config = SECTION

    certificate: AbsolutePath  # with its chain
    key: AbsolutePath
    client_ca: AbsolutePath | None = None  # clients need a certificate of this CA

    @property
    def paths(self) -> list[Path]:
        return [Path(path) for path in (self.certificate, self.key, self.client_ca) if path]

    def load(self) -> TlsMaterial:
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
        return context, pair


class ServerTls:
    """Gives the HTTP and the gRPC server of a router the latest certificates."""

    def __init__(self, material: TlsMaterial) -> None:
        self.http_context = _LatestContext(ssl.PROTOCOL_TLS_SERVER)
        self.replace(material)
        self._needs_clients = self.http_context.latest.verify_mode is ssl.CERT_REQUIRED

    def replace(self, material: TlsMaterial) -> None:
        """Replaces the certificates for new connections."""
        self.http_context.latest, self._configuration = material

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
