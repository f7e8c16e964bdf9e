"""Defines the errors that clients of Tandem receive, as one tree.

    TandemError
    ├── InvalidArgument      INVALID_ARGUMENT     400   a field is wrong; `field` names it
    ├── TooLarge             RESOURCE_EXHAUSTED   413   the message itself is too large
    ├── NotFound             NOT_FOUND            404   unknown model
    ├── Overloaded           RESOURCE_EXHAUSTED   429   queue or KV budget full; `retry_after` seconds
    ├── Unavailable          UNAVAILABLE          503   no healthy worker, draining; `retry_after` seconds
    ├── DeadlineExceeded     DEADLINE_EXCEEDED    504
    ├── Cancelled            CANCELLED            499
    ├── Unauthenticated      UNAUTHENTICATED      401
    ├── PermissionDenied     PERMISSION_DENIED    403
    └── InternalError        INTERNAL             500   the service is at fault

The text of an error never has a traceback, a path or an address of the service. Those with a `retry_after` are worth
another try: the clients of router/client retry by it, servers send it along.
"""

from typing import ClassVar


class TandemError(Exception):
    """Defines what all errors have.

    `code` is the name of a gRPC status code; `retry_after`, in seconds, is None unless a later try may succeed."""

    code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    default_retry_after: ClassVar[float | None] = None

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = self.default_retry_after if retry_after is None else retry_after


class InvalidArgument(TandemError):
    """Reports a field that breaks a bound; the message names both."""

    code = "INVALID_ARGUMENT"
    http_status = 400

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


class TooLarge(TandemError):
    """Reports a message that is larger than the service reads."""

    code = "RESOURCE_EXHAUSTED"
    http_status = 413


class NotFound(TandemError):
    """Reports that no model of that name is served."""

    code = "NOT_FOUND"
    http_status = 404


class Overloaded(TandemError):
    """Reports that the queue or the KV budget is full."""

    code = "RESOURCE_EXHAUSTED"
    http_status = 429
    default_retry_after = 1.0
    retry_after: float  # seconds


class Unavailable(TandemError):
    """Reports that no worker can take the request now."""

    code = "UNAVAILABLE"
    http_status = 503
    default_retry_after = 1.0
    retry_after: float  # seconds


class DeadlineExceeded(TandemError):
    """Reports that the request's deadline has passed."""

    code = "DEADLINE_EXCEEDED"
    http_status = 504


class Cancelled(TandemError):
    """Reports that the client cancelled the request."""

    code = "CANCELLED"
    http_status = 499


class Unauthenticated(TandemError):
    """Reports missing credentials."""

    code = "UNAUTHENTICATED"
    http_status = 401


class PermissionDenied(TandemError):
    """Reports wrong credentials."""

    code = "PERMISSION_DENIED"
    http_status = 403


class InternalError(TandemError):
    """Reports a fault of the service."""
