"""Serves TLS with certificates that may be replaced at any time: each new connection gets the
latest, and those that are open stay as they are.
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
    client_ca: Path | None = None  # clients need a certificate of it; None: they need none

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self.certificate, self.key, self.client_ca) if path is not None]

    def load(self) -> "TlsMaterial":
        """Reads and checks the files. Raises InvalidArgument, which has nothing of their content."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            contents = [path.read_bytes() for path in self.paths]
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except ssl.SSLError:  # before OSError, of which it is one
            raise InvalidArgument(
                "certificate and key are no pair in PEM, or client_ca is not PEM", "tls"
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
    """Holds what one generation of the files says, for both servers."""

    context: ssl.SSLContext
    configuration: Any  # grpc.ServerCertificateConfiguration


class ServerTls:
    """Gives both servers of a router the latest material that `replace` got."""

    def __init__(self, material: TlsMaterial) -> None:
        self._needs_clients = material.context.verify_mode is ssl.CERT_REQUIRED
        self._configuration = material.configuration
        self.http_context = _LatestContext(ssl.PROTOCOL_TLS_SERVER)
        self.http_context.latest = material.context

    def replace(self, material: TlsMaterial) -> None:
        """Takes other certificates from now on."""
        self._configuration = material.configuration
        self.http_context.latest = material.context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Returns credentials that ask for the latest certificates at each handshake, in a thread
        of gRPC.
        """
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            lambda: self._configuration,
            require_client_authentication=self._needs_clients,
        )


class _LatestContext(ssl.SSLContext):
    """Leaves each new connection to the latest context. A context itself can take another
    certificate, but never loses a CA.
    """

    latest: ssl.SSLContext

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """See ssl.SSLContext; servers call nothing else."""
        return self.latest.wrap_bio(*args, **kwargs)


def _no_password() -> str:
    """Keeps OpenSSL from asking the terminal: an encrypted key is refused."""
    return ""
