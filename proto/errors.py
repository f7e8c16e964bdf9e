"""Every error a user of Tandem can meet, as one tree.

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

The text of an error is ours: never a traceback, a path or an address of the service.
"""

from typing import ClassVar


class TandemError(Exception):
    """The root. `code` is the name of a gRPC status code."""

    code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidArgument(TandemError):
    """A field breaks a bound; the message names both."""

    code = "INVALID_ARGUMENT"
    http_status = 400

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


class TooLarge(TandemError):
    """The message is larger than the service reads."""

    code = "RESOURCE_EXHAUSTED"
    http_status = 413


class NotFound(TandemError):
    """No model of that name is served."""

    code = "NOT_FOUND"
    http_status = 404


class Overloaded(TandemError):
    """The queue or the KV budget is full; try again after `retry_after` seconds."""

    code = "RESOURCE_EXHAUSTED"
    http_status = 429
    retryable = True

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(TandemError):
    """No worker can take the request now; try again after `retry_after` seconds."""

    code = "UNAVAILABLE"
    http_status = 503
    retryable = True

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(TandemError):
    """The request's deadline passed."""

    code = "DEADLINE_EXCEEDED"
    http_status = 504


class Cancelled(TandemError):
    """The caller cancelled the request."""

    code = "CANCELLED"
    http_status = 499


class Unauthenticated(TandemError):
    """No credentials."""

    code = "UNAUTHENTICATED"
    http_status = 401


class PermissionDenied(TandemError):
    """Wrong credentials."""

    code = "PERMISSION_DENIED"
    http_status = 403


class InternalError(TandemError):
    """The service is at fault."""
