"""Answers GET /usage: what the requests of each API key used, by day."""

import time
from dataclasses import asdict
from datetime import date

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...proto.errors import InvalidArgument, PermissionDenied
from ..auth.authenticator import Caller
from ..storage.interface import Owner
from ..storage.usage import MAX_ROWS, day_of
from .service import GenerationService


async def answer_usage(service: GenerationService, request: Request) -> Response:
    """Returns the counts from the day `since` on, by default of this day.

    An operator sees all keys, and others their own. Raises InvalidArgument, PermissionDenied or
    Unavailable.
    """
    caller: Caller = request.state.caller
    if not (caller.sees_all or caller.key_name):
        raise PermissionDenied("callers without a key see no usage")
    since = request.query_params.get("since", day_of(time.time()))
    try:
        since = date.fromisoformat(since).isoformat()  # which Python also reads without hyphens
    except ValueError:
        raise InvalidArgument("must be a day, such as 2026-11-27", "since") from None
    owner = None
    if not caller.sees_all:
        owner = Owner(tenant=caller.tenant, key_name=caller.key_name)
    found = await service.storage.find_usage(since, owner)
    has_more = len(found) == MAX_ROWS
    return JSONResponse({"object": "list", "data": list(map(asdict, found)), "has_more": has_more})
