"""Brings requests with the same meaning into one form, before anything reads their path or method.

The app answers HEAD like GET; uvicorn omits the body. A slash at the end of a path is removed,
because some clients add one. A redirect instead would lose bodies and keys, and could lead to the
wrong scheme behind a proxy. Only the console's page redirects, because it has relative URLs and
needs neither body nor key.
"""

from starlette.types import Scope


def canonical(scope: Scope) -> Scope:
    """Returns the scope with method GET for HEAD, and without slashes at the end of the path."""
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "method": method, "path": scope["path"].rstrip("/") or "/"}
