"""Bounds what parsing a message costs, and parses large messages off the event loop.

The parsers of protobuf and of JSON hold Python's lock until they have made an object of each
element: 4 MiB of empty elements would stop everything else of the process for half a second and
take hundreds of MiB. So elements are counted before, which is cheap, and of large messages the
thread below parses one at a time.
"""

from functools import cache
from typing import NoReturn, TypeVar, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from ...proto.errors import InvalidArgument
from ...proto.limits import MAX_MESSAGE_ELEMENTS, MAX_TOKENS
from ..frontend.fair_threads import PARSING

_M = TypeVar("_M", bound=Message)

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protobuf; groups are not in use


def parse_message(kind: type[_M], data: bytes) -> _M:
    """Parses a message of protobuf. Raises InvalidArgument."""
    described = cast(Descriptor, kind.DESCRIPTOR)
    if len(data) >= PARSING.thread_from:
        _scan(data, 0, len(data), described, MAX_MESSAGE_ELEMENTS)
    try:
        return kind.FromString(data)
    except DecodeError:
        _refuse(described)


def check_json_elements(body: bytes) -> None:
    """Raises InvalidArgument if a body of JSON has too many elements. Takes about a millisecond for
    each MB.
    """
    if len(body) < PARSING.thread_from:
        return
    plain = body.replace(b"\\\\", b"").replace(
        b'\\"', b""
    )  # all quotes that are left limit strings
    num_elements, num_values = plain.count(b'"') // 2, 0
    if num_elements <= MAX_MESSAGE_ELEMENTS:
        outside = b"".join(plain.split(b'"')[::2])  # of the strings
        num_elements += sum(map(outside.count, (b"{", b"[", b":")))
        num_values = outside.count(b",")
    if num_elements > MAX_MESSAGE_ELEMENTS or num_values > MAX_MESSAGE_ELEMENTS + MAX_TOKENS:
        raise InvalidArgument(
            f"the body has too many elements; the maximum is {MAX_MESSAGE_ELEMENTS} strings, "
            "lists, objects and "
            f"members together, and {MAX_TOKENS} token ids"
        )


def _scan(data: bytes, at: int, end: int, kind: Descriptor, room: int) -> int:
    """Goes through the fields of the message of this kind at data[at:end], and of those in it;
    returns how many more there may be than it found. Raises InvalidArgument if there are more than
    `room`, or if it is no message.
    """
    inner = _messages_in(kind)
    while at < end:
        if not room:
            raise InvalidArgument(
                f"the message has more than {MAX_MESSAGE_ELEMENTS} fields; send fewer, and token "
                "ids packed"
            )
        room -= 1
        tag, at = data[at], at + 1
        if tag > 127:
            tag, at = _varint(data, at - 1, end, kind)
        wire_type = tag & 7
        if wire_type == _BYTES:
            size, at = _varint(data, at, end, kind)
            if size > end - at:
                _refuse(kind)
            if (found := inner.get(tag >> 3)) is not None:
                room = _scan(data, at, at + size, found, room)
            at += size
        elif wire_type == _VARINT:
            _, at = _varint(data, at, end, kind)
        elif wire_type in (_FIXED64, _FIXED32):
            at += 8 if wire_type == _FIXED64 else 4
        else:
            _refuse(kind)
    if at > end:
        _refuse(kind)
    return room


def _varint(data: bytes, at: int, end: int, kind: Descriptor) -> tuple[int, int]:
    """Returns the number that begins at data[at], and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            _refuse(kind)
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise InvalidArgument(f"the body is not a {kind.full_name}")


@cache
def _messages_in(kind: Descriptor) -> dict[int, Descriptor]:
    """Returns the kinds of the fields that are messages, by their numbers."""
    return {
        field.number: field.message_type for field in kind.fields if field.message_type is not None
    }


def _refuse(kind: Descriptor) -> NoReturn:
    raise InvalidArgument(f"the body is not a {kind.full_name}")
