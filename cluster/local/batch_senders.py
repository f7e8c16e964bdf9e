"""Sends the requests of a batch: to an engine of this process, or to a service."""

import asyncio
import json
import socket
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

import aiohttp

from ...proto.errors import (
    InvalidArgument,
    PermissionDenied,
    TandemError,
    Unauthenticated,
    Unavailable,
)
from ...router.api.batches.lines import BatchRequest
from ...router.api.openai.answers import error_response
from ...router.api.openai.openapi import REQUEST_ID
from ...router.api.openai.streaming import GenerationResponse
from ...router.api.server.http_operations import POSTS
from ...router.api.service import GenerationService, tandem_errors_only
from ...router.auth.authenticator import Caller
from ...router.client.wire import ClientTls, authorization
from ...router.frontend.prepare import RequestContext
from .batch import BatchAnswer, SendRequest

_CONNECT_SECONDS: Final = 10.0
# Without a sign of the server's machine. There is no time limit for an answer.
_GONE_SECONDS: Final = 60
_PROBE_SECONDS: Final = 10
_TRANSIENT: Final = (408, 425, 429)  # client errors that another try may not have


def engine_sender(service: GenerationService, caller: Caller = Caller()) -> SendRequest:
    """Returns a function that answers requests like the HTTP server of `service`."""

    async def send(request: BatchRequest) -> BatchAnswer:
        request_id = uuid.uuid4().hex
        body = await asyncio.to_thread(_encode, request.body)
        context = RequestContext(arrived=time.monotonic(), caller=caller, is_batch=True)
        _, answer = POSTS[request.url]
        try:
            with tandem_errors_only():
                response = await answer(service, body, request_id, context)
                if isinstance(response, GenerationResponse):
                    response = await response.render_full()
        except TandemError as error:
            response = error_response(error)
        return BatchAnswer(
            status=response.status_code,
            body=await asyncio.to_thread(json.loads, bytes(response.body)),
            request_id=request_id,
            retry_after=_seconds(response.headers),
        )

    return send


@asynccontextmanager
async def service_sender(url: str, api_key: str, tls: ClientTls) -> AsyncIterator[SendRequest]:
    """Yields a function that posts requests to the server at `url`.

    Raises InvalidArgument for certificates that cannot be read.
    """
    timeout = aiohttp.ClientTimeout(total=None, connect=_CONNECT_SECONDS)
    headers = authorization(api_key)
    connector = aiohttp.TCPConnector(limit=0, ssl=tls.context(), socket_factory=_open_socket)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers
    ) as session:

        async def send(request: BatchRequest) -> BatchAnswer:
            try:
                async with session.post(url + request.url, json=request.body) as response:
                    data = await response.read()
                    status = response.status
                    retry_after = _seconds(response.headers)
                    request_id = response.headers.get(REQUEST_ID, "")
            except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
                raise InvalidArgument("must be http(s)://HOST:PORT", "--url") from None
            except aiohttp.ClientConnectorCertificateError as error:
                reason = f"{url}: {error.certificate_error}"
                raise InvalidArgument(
                    f"{reason}; give the CA of its certificate by --tls-ca", "--url"
                ) from None
            except (aiohttp.ClientError, OSError, TimeoutError):
                raise Unavailable(f"no server answers at {url}") from None
            if status == Unauthenticated.http_status:
                raise Unauthenticated(
                    "the service needs an API key: TANDEM_API_KEY or --api-key-file"
                )
            if status == PermissionDenied.http_status:
                raise PermissionDenied("the key may not send these requests")
            return BatchAnswer(
                status=status,
                body=await asyncio.to_thread(_parse, data, status, url),
                request_id=request_id,
                retry_after=retry_after,
            )

        yield send


def _encode(body: object) -> bytes:
    return json.dumps(body).encode()


def _seconds(headers: Mapping[str, str]) -> float | None:
    given = headers.get("Retry-After", "")
    return float(given) if given.isdecimal() else None


def _open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Returns a socket whose connection fails when the machine at its other end is gone."""
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _GONE_SECONDS // 2)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _GONE_SECONDS // 2 // _PROBE_SECONDS)
    # Keepalive probes do not run while sent data is not acknowledged.
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _GONE_SECONDS)
    return opened


def _parse(data: bytes, status: int, url: str) -> object:
    """Returns the JSON of an answer.

    Other bodies are not of the API. Raises Unavailable if a proxy may have sent the answer in place
    of a busy service, and InvalidArgument if another try would have the same answer.
    """
    try:
        return json.loads(data)
    except ValueError:
        if status in _TRANSIENT or (status >= 500 and status != HTTPStatus.NOT_IMPLEMENTED):
            raise Unavailable(f"the server answers {status} with a body that is not JSON") from None
        raise InvalidArgument(f"{url} answers {status}, not as an OpenAI API", "--url") from None
