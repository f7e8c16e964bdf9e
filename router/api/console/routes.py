"""Serves the console: one page with its styles and modules, and the data that it polls.

The page is the same for everybody and holds nothing about the service. It runs only the scripts of
this folder, and loads nothing from other hosts.
"""

import hashlib
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ....proto.errors import InvalidArgument, TandemError, Unavailable
from .feed import ConsoleFeed

PAGE_PATH: Final = "/console"
DATA_PATH: Final = "/console/data"
EXPLAIN_PATH: Final = "/console/explain"

_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FILES: Final = sorted(
    path for path in Path(__file__).with_name("static").iterdir() if path.suffix in _MEDIA_TYPES
)

_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Endpoint = Callable[[Request], Awaitable[Response]]


def console_endpoints(feed: ConsoleFeed) -> dict[str, Endpoint]:
    """Returns the endpoints of the page's files and of its data, by path."""

    async def data(request: Request) -> bytes:
        return await feed.answer(request.query_params.get("cursor", ""), request.state.caller)

    async def explain(request: Request) -> bytes:
        if feed.explain is None:
            raise Unavailable("this router does not know the arithmetic of its model")
        counts = [_number(request, name) for name in ("prompt_tokens", "output_tokens")]
        return json.dumps(await feed.explain(*counts)).encode()

    gets = {DATA_PATH: _json_endpoint(data), EXPLAIN_PATH: _json_endpoint(explain)}
    files = {_path_of(file): _file_endpoint(file) for file in _FILES}
    return gets | files | {PAGE_PATH: _page_endpoint(files[PAGE_PATH])}


def _number(request: Request, name: str) -> int:
    given = request.query_params.get(name, "")
    if not re.fullmatch("[0-9]{1,9}", given):
        raise InvalidArgument("must be a number", name)
    return int(given)


def _json_endpoint(answer: Callable[[Request], Awaitable[bytes]]) -> Endpoint:
    async def respond(request: Request) -> Response:
        headers = _HEADERS | {"Cache-Control": "no-store"}
        try:
            body = await answer(request)
        except TandemError as error:
            return JSONResponse({"error": {"message": error.message}}, error.http_status, headers)
        return Response(body, media_type="application/json", headers=headers)

    return respond


def _file_endpoint(file: Path) -> Endpoint:
    content = file.read_bytes()
    headers = {
        **_HEADERS,
        "Content-Type": _MEDIA_TYPES[file.suffix],
        "Cache-Control": "no-cache",  # browsers ask each time if the file has changed
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
    }

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return answer


def _page_endpoint(page: Endpoint) -> Endpoint:
    """Redirects to the page's path without slashes at its end, because its URLs are relative.

    The scope's path has lost these slashes (see canonical.py), its raw path has them. The redirect
    is relative as well, so it is right behind a proxy that adds a prefix.
    """

    async def answer(request: Request) -> Response:
        path: bytes = request.scope.get("raw_path") or b""
        num_slashes = len(path) - len(path.rstrip(b"/"))
        if not num_slashes:
            return await page(request)
        location = "../" * num_slashes + PAGE_PATH.strip("/")
        return Response(status_code=307, headers=_HEADERS | {"Location": location})

    return answer


def _path_of(file: Path) -> str:
    return PAGE_PATH if file.name == "index.html" else f"{PAGE_PATH}/{file.name}"


STATIC_PATHS: Final = frozenset(map(_path_of, _FILES))
"""The paths that need no key."""
