"""Stores responses, continues them, and answers the requests for stored ones.

A stored response has all input items of its conversation, so that the deletion of an earlier
response does not change what a later one continues.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ....proto.errors import InternalError, InvalidArgument, NotFound, PromptTooLong, Unavailable
from ....proto.limits import MAX_MESSAGE_BYTES
from ...frontend.fair_threads import PARSING
from ...frontend.prepare import RequestContext
from ...storage.interface import Storage, StoredResponse
from ..large_messages import check_json_elements
from ..openai.answers import error_response
from ..openai.lists import list_response, read_page, unknown_after
from ..openai.openapi import REQUEST_ID
from ..openai.parsing import parse
from ..openai.respond import off_loop
from ..openai.streaming import GenerationResponse
from ..openai.writers import streaming_form
from ..service import GenerationService
from .answers import ResponsesWriter
from .bodies import ResponsesBody, ResponsesFields
from .items import Item, ItemReference, LeftOutItem
from .requests import ResponsesRequest, translate_responses

_log = logging.getLogger(__name__)

_ITEM: Final[TypeAdapter[Any]] = TypeAdapter(Item)
_ITEMS: Final[TypeAdapter[list[Any]]] = TypeAdapter(list[Item])
_MAX_ITEMS_PAGE: Final = 100
_DEFAULT_ITEMS_PAGE: Final = 20

_MAX_CONVERSATION_BYTES: Final = 2 * MAX_MESSAGE_BYTES
"""Size of a stored response that is continued, or of all whose items an input refers to.

JSON of text that is not ASCII is twice as long.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeper:
    """Stores the response to one request."""

    storage: Storage
    tenant: str
    items: list[dict[str, Any]]  # of the input and of the conversation before

    async def keep(self, response: dict[str, Any]) -> dict[str, Any]:
        """Returns the finished response; `store` tells if it was stored.

        A store that fails does not fail the response.
        """
        stored = StoredResponse(
            response_id=response["id"],
            body=json.dumps(response | {"store": True}).encode(),
            items=json.dumps(self.items).encode(),
        )
        is_stored = False
        try:
            is_stored = await self.storage.keep_response(self.tenant, stored)
        except Unavailable as error:
            _log.warning("a response is not stored: %s", error.message)
        return response | {"store": is_stored}


async def answer_responses(
    service: GenerationService, body: bytes, request_id: str, context: RequestContext
) -> Response:
    """Answers POST /v1/responses: generates, and stores the response unless `store` is false.

    Raises InvalidArgument, also for an unknown previous response, and for a stored response whose
    id equals an earlier one of its conversation.
    """
    fairness_id = context.caller.fairness_id
    parse_body = partial(parse, ResponsesBody, ignores_unknown=service.dialect.ignores_unknown)
    parsed = await off_loop(fairness_id, body, parse_body)
    tenant = context.caller.tenant
    previous = None
    if parsed.previous_response_id is not None:
        previous = await _previous(service.storage, tenant, parsed.previous_response_id)
    size = len(body) + (0 if previous is None else _size(previous))
    earlier: list[dict[str, Any]] = []
    if previous is not None:
        earlier = await PARSING.run(
            fairness_id, size, _conversation, previous, "previous_response_id"
        )
    size += await _resolve_references(service.storage, tenant, fairness_id, parsed)
    request = await PARSING.run(fairness_id, size, _translate, parsed, request_id, earlier)
    keep = None
    if parsed.store is not False:
        named = await PARSING.run(fairness_id, size, _named_items, parsed, request_id, earlier)
        items = earlier + named
        keep = Keeper(storage=service.storage, tenant=tenant, items=items).keep
    # Codex CLI shortens its conversation only after an event: a status of 400 ends the turn.
    form = streaming_form(partial(ResponsesWriter, keep=keep), error_response, (PromptTooLong,))
    return GenerationResponse(service, request, context, form)


async def get_response(service: GenerationService, request: Request) -> Response:
    """Answers GET /v1/responses/{name}."""
    if request.query_params.get("stream", "false") != "false":
        raise InvalidArgument("is not supported: a stored response comes in full", "stream")
    stored = await _stored(service.storage, request)
    return Response(stored.body, media_type="application/json")


async def delete_response(service: GenerationService, request: Request) -> Response:
    """Answers DELETE /v1/responses/{name}."""
    name = request.path_params["name"]
    if not await service.storage.delete_response(request.state.caller.tenant, name):
        raise _unknown()
    return JSONResponse({"id": name, "object": "response", "deleted": True})


async def list_input_items(service: GenerationService, request: Request) -> Response:
    """Answers GET /v1/responses/{name}/input_items, with the items of the conversation before."""
    page = read_page(request, default=_DEFAULT_ITEMS_PAGE, most=_MAX_ITEMS_PAGE)
    stored = await _stored(service.storage, request)
    fairness_id = request.state.caller.fairness_id
    items: list[dict[str, Any]] = await PARSING.run(
        fairness_id, len(stored.items), json.loads, stored.items
    )
    if not page.is_ascending:
        items.reverse()
    ids = [item["id"] for item in items]
    if page.after and page.after not in ids:
        raise unknown_after(page)
    start = ids.index(page.after) + 1 if page.after else 0
    return list_response(items[start : start + page.limit + 1], page)


async def _stored(storage: Storage, request: Request) -> StoredResponse:
    stored = await storage.find_response(request.state.caller.tenant, request.path_params["name"])
    if stored is None:
        raise _unknown()
    return stored


def _unknown() -> NotFound:
    return NotFound("no response of this id is stored here")


async def _previous(storage: Storage, tenant: str, response_id: str) -> StoredResponse:
    """Returns the response to continue. Raises InvalidArgument."""
    stored = await storage.find_response(tenant, response_id)
    if stored is None:
        reason = "no response of this id is stored here"
    elif _size(stored) > _MAX_CONVERSATION_BYTES:
        reason = f"its conversation has more than {_MAX_CONVERSATION_BYTES} bytes"
    else:
        return stored
    raise InvalidArgument(f"{reason}; send the whole conversation as input", "previous_response_id")


async def _resolve_references(
    storage: Storage, tenant: str, fairness_id: str, body: ResponsesFields
) -> int:
    """Replaces the references in the input by the stored items; returns the size of these.

    Raises InvalidArgument. The newest reference comes first, because a stored response has the
    items of the whole conversation.
    """
    if isinstance(body.input, str):
        return 0
    found: dict[str, dict[str, Any]] = {}
    places: dict[str, int] = {}  # of the references, by the id of the item
    size = 0
    for i in reversed(range(len(body.input))):
        reference = body.input[i]
        if not isinstance(reference, ItemReference):
            continue
        if reference.id in places:
            raise InvalidArgument(
                f"refers to the same item as input[{places[reference.id]}]; refer to it once",
                f"input[{i}].id",
            )
        places[reference.id] = i
        if reference.id not in found:
            stored = await storage.find_response(tenant, _response_of(reference.id))
            size += 0 if stored is None else _size(stored)
            if size > _MAX_CONVERSATION_BYTES:
                raise InvalidArgument(
                    f"the responses of these items have more than {_MAX_CONVERSATION_BYTES} bytes; "
                    "send the items themselves",
                    f"input[{i}].id",
                )
            if stored is not None:
                items = await PARSING.run(
                    fairness_id, size, _conversation, stored, f"input[{i}].id"
                )
                for item in items:
                    found.setdefault(item["id"], item)
        if reference.id not in found:
            raise InvalidArgument(
                "no item of this id is stored here; send the item itself", f"input[{i}].id"
            )
    named = {i: found[item_id] for item_id, i in places.items()}
    await PARSING.run(fairness_id, size, _replace, body.input, named)
    return size


def _replace(items: list[Any], by_place: Mapping[int, dict[str, Any]]) -> None:
    """Puts stored items to their places in the input."""
    for i, item in by_place.items():
        items[i] = _ITEM.validate_python(item)


def _response_of(item_id: str) -> str:
    """Returns the id of the response that has made an item: `resp_a` of the item `msg_a_0`."""
    return f"resp_{item_id.partition('_')[2].rpartition('_')[0]}"


def _size(stored: StoredResponse) -> int:
    return len(stored.body) + len(stored.items)


def _translate(
    parsed: ResponsesFields, request_id: str, earlier: list[dict[str, Any]]
) -> ResponsesRequest:
    return translate_responses(parsed, request_id, _ITEMS.validate_python(earlier))


def _conversation(stored: StoredResponse, field: str) -> list[dict[str, Any]]:
    """Returns the items of a response's input and output. Raises InvalidArgument for `field`."""
    try:
        check_json_elements(stored.items)
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field) from None
    items: list[dict[str, Any]] = json.loads(stored.items)
    try:
        items += json.loads(stored.body)["output"]
    except KeyError:
        raise InternalError("a stored response has no output") from None
    return items


def _named_items(
    body: ResponsesFields, request_id: str, earlier: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the items of the input that have an effect, each with an id of its own.

    An item that the conversation has already, such as one that is referred to, gets another id:
    the id tells where the next page of items begins. So does an item with an id that the output of
    this response may have. Raises InvalidArgument if the conversation has a response of this id.
    """
    own = f"resp_{request_id}"
    taken = {each["id"] for each in earlier}
    if own in map(_response_of, taken):
        raise InvalidArgument(
            "is the id of an earlier request of this conversation; choose another id for each "
            "request, or send none",
            REQUEST_ID,
        )
    if isinstance(body.input, str):
        items: list[dict[str, Any]] = [
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": body.input}],
            }
        ]
    else:
        items = [  # Pydantic would warn of the other types of the union
            item.model_dump(by_alias=True, exclude_none=True, warnings=False)
            for item in body.input
            if not isinstance(item, LeftOutItem)
        ]
    for i, item in enumerate(items):
        item_id = item.get("id")
        if not item_id or item_id in taken or _response_of(item_id) == own:
            item["id"] = f"item_{request_id}_{i}"
        taken.add(item["id"])
        if item["type"] == "message" and isinstance(item["content"], str):
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": item["content"]}]
    return items
