"""Reads the query of a list, and writes the list, as all lists of OpenAI's API have them."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse

from ....proto.errors import InvalidArgument
from ...storage.interface import Page

_MAX_LIMIT_CHARACTERS: Final = 8
_MAX_SHOWN: Final = 64


def read_page(request: Request, *, default: int, most: int, order: str = "desc") -> Page:
    """Returns the page that `limit`, `after` and `order` select. Raises InvalidArgument.

    `default` and `most`: of the limit. `order`: the default.
    """
    query = request.query_params
    limit = 0
    given = query.get("limit", str(default))
    with suppress(ValueError):
        limit = int(given[:_MAX_LIMIT_CHARACTERS])
    if not 1 <= limit <= most:
        raise InvalidArgument(f"must be a number from 1 to {most}", "limit")
    order = query.get("order", order)
    if order not in ("asc", "desc"):
        raise InvalidArgument("must be asc or desc", "order")
    return Page(limit=limit, after=query.get("after", ""), is_ascending=order == "asc")


def unknown_after(page: Page) -> InvalidArgument:
    """Returns the error for a page that begins after an entry that does not exist."""
    return InvalidArgument(f"no entry {page.after[:_MAX_SHOWN]!r} is in this list", "after")


def one_more(page: Page) -> Page:
    """Returns the page with one more entry, which shows if there are more pages."""
    return replace(page, limit=page.limit + 1)


def list_response(entries: Sequence[dict[str, Any]], page: Page) -> JSONResponse:
    """Returns the list; `entries` may have one more than the page, which shows that more exist."""
    shown = entries[: page.limit]
    return JSONResponse(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(entries) > page.limit,
        }
    )
