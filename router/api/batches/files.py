"""Answers the requests of OpenAI's Files API."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from ....proto.errors import (
    InvalidArgument,
    NotFound,
    Overloaded,
    PermissionDenied,
    TandemError,
)
from ...auth.authenticator import Caller
from ...frontend.prepare import RequestContext
from ...storage.interface import MAX_FILE_BYTES, MAX_FILES, StoredFile
from ..openai.answers import error_response
from ..openai.lists import list_response, one_more, read_page, unknown_after
from ..openai.refused_body import RefusedBody
from ..openai.respond import respond
from ..service import GenerationService
from .multipart import FormPart, parse_form

_MAX_PAGE: Final = 10_000
_MAX_NAME_CHARACTERS: Final = 255
_PIECE_BYTES: Final = 1024 * 1024
_MIN_SECONDS: Final = 3_600
_MAX_SECONDS: Final = 2_592_000
_MAX_UPLOADS: Final = 8  # at a time, of all tenants
_MAX_UPLOADS_EACH: Final = 2  # of one tenant
_FORM_BYTES: Final = 65_536  # of the fields beside the file

_uploads = Counter[str]()  # by tenant


def check_can_keep(caller: Caller) -> None:
    """Raises PermissionDenied for a caller who cannot be told from others.

    Without keys, everybody who reaches the service would see the files of all.
    """
    if not caller.key_name and not caller.sees_all:
        raise PermissionDenied(
            "files and batches need an API key here: without keys, all callers would see them"
        )


async def upload_file(service: GenerationService, request: Request) -> Response:
    """Answers POST /v1/files; refuses uploads while too many are read."""

    async def answer(body: bytes, _request_id: str, context: RequestContext) -> Response:
        kind = request.headers.get("content-type", "")
        form = await asyncio.to_thread(parse_form, body, kind)  # it copies the file several times
        return await _add_file(service, context.caller, form)

    try:
        check_can_keep(request.state.caller)
        with _uploading(request.state.caller.tenant):
            return await respond(
                request,
                answer,
                max_bytes=MAX_FILE_BYTES + _FORM_BYTES,
                is_form=True,
                outlives_client=True,
            )
    except TandemError as error:  # `respond` raises none
        return RefusedBody(error_response(error))


def _uploading(tenant: str) -> AbstractContextManager[None]:
    """Counts an upload, which may be slow. Raises Overloaded beyond the bounds."""
    return counted(_uploads, tenant, 1, _MAX_UPLOADS_EACH, _MAX_UPLOADS, "files", "uploaded")


@contextmanager
def counted(
    used: Counter[str],
    tenant: str,
    amount: int,
    most_each: int,
    most: int,
    what: str,
    how: str,
) -> Iterator[None]:
    """Counts an amount in `used`, by tenant, while the context is open.

    Raises Overloaded beyond the bounds; `what` and `how` complete its text. The bound of a tenant
    leaves room to others.
    """
    for count, bound, whose in (
        (used[tenant], most_each, "of this tenant "),
        (used.total(), most, ""),
    ):
        if count + amount > bound:
            raise Overloaded(f"{bound} {what} {whose}are being {how}; try again")
    used[tenant] += amount
    try:
        yield
    finally:
        used[tenant] -= amount
        if not used[tenant]:
            del used[tenant]


async def list_files(service: GenerationService, request: Request) -> Response:
    """Answers GET /v1/files."""
    caller = request.state.caller
    check_can_keep(caller)
    page = read_page(request, default=_MAX_PAGE, most=_MAX_PAGE)
    if page.after and await service.storage.find_file(caller.tenant, page.after) is None:
        raise unknown_after(page)
    purpose = request.query_params.get("purpose", "")
    files = await service.storage.list_files(caller.tenant, one_more(page), purpose)
    return list_response(list(map(describe_file, files)), page)


async def get_file(service: GenerationService, request: Request) -> Response:
    """Answers GET /v1/files/{name}."""
    return JSONResponse(describe_file(await find_file(service, request)))


class _Download(StreamingResponse):
    """Sends a file. If the rest cannot be read, the connection ends before the announced length.

    An error after the start of the response would be logged with its traceback, as often as a
    caller deletes what it reads.
    """

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(TandemError):
            await super().__call__(scope, receive, send)


async def get_content(service: GenerationService, request: Request) -> Response:
    """Answers GET /v1/files/{name}/content."""
    stored = await find_file(service, request)
    pieces = read_pieces(service, request.state.caller.tenant, stored)
    headers = {"Content-Length": str(stored.size)}
    return _Download(pieces, headers=headers, media_type="application/octet-stream")


async def read_pieces(
    service: GenerationService, tenant: str, stored: StoredFile
) -> AsyncIterator[bytes]:
    """Yields the content of a file. Raises NotFound if the file is deleted meanwhile."""
    for offset in range(0, stored.size, _PIECE_BYTES):
        piece = await service.storage.read_file(tenant, stored.file_id, offset, _PIECE_BYTES)
        if piece is None:
            raise NotFound("the file was deleted while it was read")
        yield piece


async def delete_file(service: GenerationService, request: Request) -> Response:
    """Answers DELETE /v1/files/{name}."""
    caller = request.state.caller
    check_can_keep(caller)
    name = request.path_params["name"]
    if not await service.storage.delete_file(caller.tenant, name):
        raise _unknown()
    return JSONResponse({"id": name, "object": "file", "deleted": True})


async def find_file(service: GenerationService, request: Request) -> StoredFile:
    """Returns the file that the path names. Raises NotFound or PermissionDenied."""
    caller = request.state.caller
    check_can_keep(caller)
    stored = await service.storage.find_file(caller.tenant, request.path_params["name"])
    if stored is None:
        raise _unknown()
    return stored


def describe_file(stored: StoredFile) -> dict[str, Any]:
    return {
        "id": stored.file_id,
        "object": "file",
        "bytes": stored.size,
        "created_at": stored.created,
        "expires_at": stored.expires,
        "filename": stored.name,
        "purpose": stored.purpose,
        "status": "processed",
    }


def read_seconds(given: str, field: str) -> int:
    """Returns the time for which a file is to be kept. Raises InvalidArgument."""
    with suppress(ValueError):
        if _MIN_SECONDS <= (seconds := int(given[:16])) <= _MAX_SECONDS:
            return seconds
    raise InvalidArgument(f"must be from {_MIN_SECONDS} to {_MAX_SECONDS} seconds", field)


async def _add_file(
    service: GenerationService, caller: Caller, form: dict[str, FormPart]
) -> Response:
    file = form.pop("file", None)
    fields = {name: part.content.decode("utf-8", "replace") for name, part in form.items()}
    if file is None or file.filename is None:
        raise InvalidArgument("must be a file", "file")
    if len(file.content) > MAX_FILE_BYTES:
        raise InvalidArgument(
            f"has {len(file.content)} bytes; the maximum is {MAX_FILE_BYTES}", "file"
        )
    if fields.pop("purpose", "") != "batch":
        raise InvalidArgument("must be batch: files have no other use here", "purpose")
    anchor = fields.pop("expires_after[anchor]", None)
    if anchor not in (None, "created_at"):
        raise InvalidArgument("must be created_at", "expires_after.anchor")
    seconds = fields.pop("expires_after[seconds]", None)
    if anchor is not None and seconds is None:
        raise InvalidArgument("must be set with expires_after.anchor", "expires_after.seconds")
    kept = None if seconds is None else read_seconds(seconds, "expires_after.seconds")
    if fields:
        raise InvalidArgument("is not a field of this request", next(iter(fields)))
    name = file.filename[:_MAX_NAME_CHARACTERS]
    stored = await service.storage.add_file(caller.tenant, name, "batch", file.content, kept)
    if stored is None:
        raise Overloaded(
            f"the storage of this tenant is full, or has {MAX_FILES} files; delete some"
        )
    return JSONResponse(describe_file(stored))


def _unknown() -> NotFound:
    return NotFound("no file of this id is stored here")
