"""Answers a request whose body is not read because it is too large."""

import asyncio
from contextlib import suppress
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....proto.limits import MAX_MESSAGE_BYTES

_LINGER_SECONDS: Final = 10.0
_MAX_DROPPED_BYTES: Final = 16 * MAX_MESSAGE_BYTES


class RefusedBody(Response):
    """Sends a response at once, then reads and drops the rest of the body for up to 10 seconds.

    If a connection is closed with unread bytes, the client may lose the response.
    """

    def __init__(self, response: Response) -> None:
        super().__init__(response.body, response.status_code, response.headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                await _drop(receive)
        await send({"type": "http.response.body", "body": b""})


async def _drop(receive: Receive) -> None:
    num_bytes = 0
    while num_bytes <= _MAX_DROPPED_BYTES:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body", False):
            return
