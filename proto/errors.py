"""Defines the errors that clients of Tandem receive, as one tree.

    TandemError
    ├── InvalidArgument          INVALID_ARGUMENT     400   a field is wrong; `field` names it
    │   ├── PromptTooLong        INVALID_ARGUMENT     400   the prompt exceeds a bound
    │   │   └── ContextExceeded  INVALID_ARGUMENT     400   it does not fit the context
    │   └── UnknownEncoding      INVALID_ARGUMENT     415   the body's compression is not supported
    ├── TooLarge                 RESOURCE_EXHAUSTED   413   the message itself is too large
    ├── NotFound                 NOT_FOUND            404   unknown model
    ├── Overloaded               RESOURCE_EXHAUSTED   429   queue or KV budget
    │   └── KeyLimitReached      RESOURCE_EXHAUSTED   429   a limit of a key
    ├── Unavailable              UNAVAILABLE          503   no healthy worker, or draining
    ├── DeadlineExceeded         DEADLINE_EXCEEDED    504
    ├── Cancelled                CANCELLED            499
    ├── Unauthenticated          UNAUTHENTICATED      401
    ├── PermissionDenied         PERMISSION_DENIED    403
    └── InternalError            INTERNAL             500   the service is at fault

The text of an error never has a traceback, a path or an address of the service. Overloaded and
Unavailable have `retry_after` in seconds: servers send it, and the clients of router/client retry
after that time.
"""

from typing import Any, ClassVar


class TandemError(Exception):
    """Defines the common attributes of all errors.

    `code` is the name of a gRPC status code. `retry_after`, in seconds, is None unless a retry may
    succeed.
    """

    code: ClassVar[str]
    http_status: ClassVar[int]
    default_retry_after: ClassVar[float | None]

    def __init_subclass__(
        cls, code: str = "INTERNAL", http_status: int = 500, retry_after: float | None = None
    ) -> None:
        cls.code = code
        cls.http_status = http_status
        cls.default_retry_after = retry_after

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = self.default_retry_after if retry_after is None else retry_after


class InvalidArgument(TandemError, code="INVALID_ARGUMENT", http_status=400):
    """Reports a field that breaks a bound; the message names both."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


class PromptTooLong(InvalidArgument, code="INVALID_ARGUMENT", http_status=400):
    """Reports a prompt that is longer than the service accepts.

    The HTTP APIs report it with words and a code of their own, by which clients recognise it.
    """


class ContextExceeded(PromptTooLong, code="INVALID_ARGUMENT", http_status=400):
    """Reports a prompt that does not fit the context together with the tokens to generate.

    If nothing is to be generated, `num_generated` is 0. Such a prompt may have one token less than
    the context, because workers reserve a place for one token.
    """

    def __init__(self, num_prompt: int, num_generated: int, context: int, field: str) -> None:
        self.remedy = "shorten the prompt"
        self.generated = f" and {num_generated} to generate" if num_generated else ""
        if not num_generated:
            self.remedy = f"shorten the prompt to at most {context - 1}"
        elif num_prompt < context:
            self.remedy = f"ask for at most {context - num_prompt}"
        super().__init__(
            f"{num_prompt} prompt tokens{self.generated} do not fit the context of {context} "
            f"tokens; {self.remedy}",
            field,
        )
        self.num_prompt = num_prompt
        self.num_generated = num_generated
        self.context = context

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the arguments: Exception would give the text alone to a new object."""
        given = (self.num_prompt, self.num_generated, self.context, self.field)
        return type(self), given, self.__dict__


class UnknownEncoding(InvalidArgument, code="INVALID_ARGUMENT", http_status=415):
    """Reports a Content-Encoding that the service does not decode."""


class TooLarge(TandemError, code="RESOURCE_EXHAUSTED", http_status=413):
    """Reports a message that is larger than the service accepts."""


class NotFound(TandemError, code="NOT_FOUND", http_status=404):
    """Reports that the service has no model of that name."""


class Overloaded(TandemError, code="RESOURCE_EXHAUSTED", http_status=429, retry_after=1.0):
    """Reports that the queue or the KV budget is full."""

    retry_after: float  # seconds


class KeyLimitReached(Overloaded, code="RESOURCE_EXHAUSTED", http_status=429, retry_after=1.0):
    """Reports that a limit of the caller's key is reached; the service may be idle."""


class Unavailable(TandemError, code="UNAVAILABLE", http_status=503, retry_after=1.0):
    """Reports that no worker can accept the request now."""

    retry_after: float  # seconds


class DeadlineExceeded(TandemError, code="DEADLINE_EXCEEDED", http_status=504):
    """Reports that the request's deadline has passed."""


class Cancelled(TandemError, code="CANCELLED", http_status=499):
    """Reports that the client cancelled the request."""


class Unauthenticated(TandemError, code="UNAUTHENTICATED", http_status=401):
    """Reports credentials that are missing or wrong."""


class PermissionDenied(TandemError, code="PERMISSION_DENIED", http_status=403):
    """Reports that the caller may not make this call."""


class InternalError(TandemError):
    """Reports a fault of the service."""
