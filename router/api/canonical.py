"""Gives requests that mean the same one form, before a path or a method decides anything.

HEAD is answered as GET is, and uvicorn sends no body. A path with a slash at its end is the path
without it: some clients add one, and a redirect would lose bodies and keys, or lead through a proxy
to the wrong scheme.
"""

from starlette.types import Scope


def canonical(scope: Scope) -> Scope:
    """Returns the scope with method GET for HEAD, and without slashes at the end of the path."""
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "method": method, "path": scope["path"].rstrip("/") or "/"}
