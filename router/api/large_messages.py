"""Bounds the cost of parsing a message.

The parsers of protobuf and of JSON hold Python's lock until they have made an object of each
element: 4 MiB of empty elements would stop the rest of the process for half a second and take
hundreds of MiB. So this module counts the elements first, which is cheap.
"""

from functools import cache
from typing import Final, TypeVar, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from ...proto.errors import InvalidArgument
from ...proto.limits import MAX_MESSAGE_ELEMENTS, MAX_TOKENS
from ..frontend.fair_threads import PARSING

_M = TypeVar("_M", bound=Message)

# Wire types of protobuf; groups are not used.
_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_FIXED32: Final = 5


def parse_message(kind: type[_M], data: bytes) -> _M:
    """Parses a protobuf message. Raises InvalidArgument."""
    described = cast(Descriptor, kind.DESCRIPTOR)
    if len(data) >= PARSING.thread_from:
        _scan(data, 0, len(data), described, MAX_MESSAGE_ELEMENTS)
    try:
        return kind.FromString(data)
    except DecodeError:
        raise _malformed(described) from None


def check_json_elements(body: bytes) -> None:
    """Raises InvalidArgument if a JSON body has too many elements. Takes about 1 ms for each MB."""
    if len(body) < PARSING.thread_from:
        return
    # Without escapes, each quote begins or ends a string.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_elements = plain.count(b'"') // 2
    num_values = 0
    if num_elements <= MAX_MESSAGE_ELEMENTS:
        outside = b"".join(plain.split(b'"')[::2])  # the bytes outside of strings
        num_elements += sum(map(outside.count, (b"{", b"[", b":")))
        num_values = outside.count(b",")
    if num_elements > MAX_MESSAGE_ELEMENTS or num_values > MAX_MESSAGE_ELEMENTS + MAX_TOKENS:
        raise InvalidArgument(
            f"the body has too many elements; the maximum is {MAX_MESSAGE_ELEMENTS} strings, "
            f"lists, objects and members together, and {MAX_TOKENS} token ids"
        )


def _scan(data: bytes, at: int, end: int, kind: Descriptor, room: int) -> int:
    """Counts the fields of the message at data[at:end] and of the messages in it.

    Returns `room` less this number. Raises InvalidArgument if there are more than `room` fields, or
    if the data is not a message of this kind.
    """
    inner = _messages_in(kind)
    while at < end:
        if not room:
            raise InvalidArgument(
                f"the message has more than {MAX_MESSAGE_ELEMENTS} fields; send fewer, and token "
                "ids packed"
            )
        room -= 1
        tag = data[at]
        at += 1
        if tag > 127:
            tag, at = _varint(data, at - 1, end, kind)
        wire_type = tag & 7
        if wire_type == _BYTES:
            size, at = _varint(data, at, end, kind)
            if size > end - at:
                raise _malformed(kind)
            if (found := inner.get(tag >> 3)) is not None:
                room = _scan(data, at, at + size, found, room)
            at += size
        elif wire_type == _VARINT:
            _, at = _varint(data, at, end, kind)
        elif wire_type == _FIXED64:
            at += 8
        elif wire_type == _FIXED32:
            at += 4
        else:
            raise _malformed(kind)
    if at > end:
        raise _malformed(kind)
    return room


def _varint(data: bytes, at: int, end: int, kind: Descriptor) -> tuple[int, int]:
    """Returns the number that begins at data[at], and the index after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise _malformed(kind)
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise _malformed(kind)


@cache
def _messages_in(kind: Descriptor) -> dict[int, Descriptor]:
    """Returns the kinds of the fields that hold messages, by field number."""
    return {
        field.number: field.message_type for field in kind.fields if field.message_type is not None
    }


def _malformed(kind: Descriptor) -> InvalidArgument:
    return InvalidArgument(f"the body is not a {kind.full_name}")
