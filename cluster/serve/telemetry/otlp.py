"""Checks, without importing them, that the packages that export spans are installed."""

from importlib.util import find_spec
from typing import Final

from ....proto.errors import InvalidArgument

_PACKAGE: Final = "opentelemetry.exporter.otlp.proto.http"


def check_otlp(endpoint: str | None) -> None:
    """Raises InvalidArgument if spans have a collector, but no package that exports them."""
    if endpoint is not None and not _is_installed():
        raise InvalidArgument("needs the extra tandem-llm[otel]; install it", "tracing.endpoint")


def _is_installed() -> bool:
    try:
        return find_spec(_PACKAGE) is not None
    except ModuleNotFoundError:  # a package that contains it
        return False
