"""Defines the channel options, credentials, errors and retries that both clients share."""

import os
import random
import ssl
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from ...proto import errors, limits
from ...proto.addresses import host_of, is_loopback

API_KEY_VARIABLE: Final = "TANDEM_API_KEY"
# The log probabilities of a long prompt come in one message.
MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024
CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    # Together they notice within half a minute that a router's machine is gone.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A router that was replaced is reached as soon as it listens. By default grpc fails every call
    # at once while it waits for the next try to connect, for up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # for one try to connect
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

_PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"
_STATUS_KEY: Final = "grpc-status-details-bin"

Metadata = Iterable[tuple[str, str | bytes]]

_MAX_RETRY_SECONDS: Final = 30.0
_RESUME_SECONDS: Final = 30.0  # a lost router is replaced in this time


class Retries:
    """Counts the tries of one request, within its timeout.

    A request that has received tokens is given up only after 30 s without further ones, so that its
    router can be replaced in the meantime. `max_retries` 0 gives every request up at once.
    """

    def __init__(self, max_retries: int, timeout: float | None, num_routers: int = 1) -> None:
        self._max_retries = max_retries
        self._num_routers = num_routers
        self._num_failed = 0  # tries since the last progress
        self._has_begun = False
        self._failing_since = 0.0  # if any has failed
        self._deadline = None if timeout is None else time.monotonic() + timeout

    @property
    def timeout(self) -> float | None:
        """Returns the rest of the timeout in seconds."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def delay(self, error: errors.TandemError) -> float:
        """Counts a failed try; returns the seconds to wait before the next try.

        They are `retry_after` and up to a quarter more, so that clients that were refused together
        do not return together. They are 0 after Unavailable while some router was not tried.

        Raises `error` if there is no next try: no retry is left, the service names no time or more
        than 30 seconds, or the timeout would be exceeded.
        """
        if not self._num_failed:
            self._failing_since = time.monotonic()
        is_over = self._num_failed >= self._max_retries and not (
            self._max_retries and self._may_resume(error)
        )
        if is_over or error.retry_after is None or error.retry_after > _MAX_RETRY_SECONDS:
            raise error
        self._num_failed += 1
        delay = error.retry_after * random.uniform(1, 1.25)
        if isinstance(error, errors.Unavailable) and self._num_failed < self._num_routers:
            delay = 0.0
        if self._deadline is not None and time.monotonic() + delay >= self._deadline:
            raise error
        return delay

    def reset(self) -> None:
        """Forgets the failed tries, after the service has answered with tokens."""
        self._num_failed = 0
        self._has_begun = True

    def _may_resume(self, error: errors.TandemError) -> bool:
        # Overloaded: the other routers of a lost one may be full until it is replaced.
        is_lost = isinstance(error, errors.Unavailable | errors.Overloaded)
        return (
            self._has_begun and is_lost and time.monotonic() - self._failing_since < _RESUME_SECONDS
        )


def environment_api_key() -> str:
    """Returns the API key of the environment, or "".

    The variable may end with a newline, as when Kubernetes makes it from a file.
    """
    return os.environ.get(API_KEY_VARIABLE, "").strip()


def authorization(api_key: str) -> dict[str, str]:
    """Returns the headers that carry the key; none without a key.

    Raises InvalidArgument for a key that no header can hold. HTTP libraries would quote the key.
    """
    if not (api_key.isascii() and api_key.isprintable()):
        raise errors.InvalidArgument("must be printable ASCII", "api_key")
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def credentials(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of every call; None stands for the key of the environment, if any.

    Raises InvalidArgument for a key that no header can hold.
    """
    return tuple(authorization(environment_api_key() if api_key is None else api_key).items())


@dataclass(frozen=True, kw_only=True)
class ClientTls:
    """Names the PEM files that a client uses for TLS."""

    ca: Path | str | None = None  # the CA of the service's certificate; None: the CAs of gRPC
    # The client's own certificate, for a service that demands one, and its key.
    certificate: Path | str | None = None
    key: Path | str | None = None

    @property
    def is_given(self) -> bool:
        return (self.ca, self.certificate, self.key) != (None, None, None)

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files for gRPC. Raises InvalidArgument."""
        self._check_pair()
        paths = (self.ca, self.key, self.certificate)
        try:
            ca, key, certificate = (
                None if path is None else Path(path).read_bytes() for path in paths
            )
        except OSError as error:
            raise errors.InvalidArgument(f"{error.filename}: {error.strerror}", "tls") from None
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def context(self) -> ssl.SSLContext:
        """Reads the files for HTTP. Raises InvalidArgument."""
        self._check_pair()
        name = f"{self.ca}"
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate is not None:
                name = f"{self.certificate} or {self.key}"
                context.load_cert_chain(self.certificate, self.key)
        except OSError as error:
            reason = error.strerror or "not a certificate"
            raise errors.InvalidArgument(f"{name}: {reason}", "tls") from None
        return context

    def _check_pair(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise errors.InvalidArgument(
                "tls_certificate and tls_key must be set together", "tls_certificate"
            )


def open_channel(
    module: Any, address: str, tls: ClientTls, compression: grpc.Compression, use_proxy: bool = True
) -> Any:
    """Opens a channel of `module`, which is grpc or grpc.aio.

    `address` is HOST:PORT, grpc://HOST:PORT or, for TLS, grpcs://HOST:PORT. Without a scheme the
    channel uses TLS if `tls` names a file. With `use_proxy` it goes through the proxy that the
    environment names (https_proxy and the like), unless the host is loopback. Raises
    InvalidArgument.
    """
    scheme, _, host = address.rpartition("://")
    if scheme not in ("", "grpc", "grpcs") or (scheme == "grpc" and tls.is_given):
        raise errors.InvalidArgument(
            "must be HOST:PORT, grpc://HOST:PORT, or with TLS grpcs://HOST:PORT", "address"
        )
    # gRPC would use a proxy even for loopback, unless no_proxy names it.
    goes_direct = not use_proxy or is_loopback(host_of(host))
    options = (*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", int(not goes_direct)))
    if scheme == "grpcs" or tls.is_given:
        return module.secure_channel(host, tls.credentials(), options, compression)
    return module.insecure_channel(host, options, compression)


def error_of(call: Any) -> errors.TandemError:
    """Converts grpc's error, sync or async: both have the same methods, but no common type."""
    return to_error(call.code(), call.details() or "", call.trailing_metadata())


_RESET: Final = "CANCELLED"
"""The details that gRPC itself gives for a reset stream, as when a router stops at its start.

A call that the client or the service cancelled has other details.
"""


def to_error(code: grpc.StatusCode, details: str, trailing: Metadata | None) -> errors.TandemError:
    """Returns the error that the service raised, from its status and metadata."""
    metadata = dict(trailing or ())
    status = _status(metadata.get(_STATUS_KEY))
    retry_after = _retry_after(status, metadata.get(_PUSHBACK_KEY))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if retry_after is None:
            return errors.TooLarge(details)
        return errors.Overloaded(details, retry_after)
    if code is grpc.StatusCode.UNAVAILABLE:  # without a time if the router could not be reached
        return errors.Unavailable(details, retry_after)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return _invalid(status, details)
    if code is grpc.StatusCode.CANCELLED and details == _RESET:
        return errors.Unavailable("the router has ended the call")
    return _BY_CODE.get(code, errors.InternalError)(details)


_BY_CODE: Final = {grpc.StatusCode[kind.code]: kind for kind in errors.TandemError.__subclasses__()}


def _status(packed: str | bytes | None) -> status_pb2.Status:
    """Parses the details of an error (google.rpc.Status); empty for an error without details."""
    if isinstance(packed, bytes):
        # Details of another sender, such as a proxy, are dropped; the text of the error remains.
        with suppress(DecodeError):
            return status_pb2.Status.FromString(packed)
    return status_pb2.Status()


def _retry_after(status: status_pb2.Status, pushback: str | bytes | None) -> float | None:
    """Returns the seconds to wait before another try; None if the service gives none."""
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(retry):
            return float(retry.retry_delay.ToMilliseconds()) / 1_000
    return float(pushback) / 1_000 if isinstance(pushback, str) and pushback.isdecimal() else None


def _invalid(status: status_pb2.Status, details: str) -> errors.InvalidArgument:
    """Returns the error with the field of the first violation, or of the beginning of its text."""
    request = error_details_pb2.BadRequest()
    for detail in status.details:
        if detail.Unpack(request) and request.field_violations:
            field = request.field_violations[0].field
            return errors.InvalidArgument(details.removeprefix(f"{field}: "), field)
    field, colon, message = details.partition(": ")
    named = bool(colon) and " " not in field
    return errors.InvalidArgument(message, field) if named else errors.InvalidArgument(details)
