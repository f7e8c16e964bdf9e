"""Encodes and decodes KV frames: crc32c, length of the header, msgpack header, raw bytes.

    | crc32c of all that follows: u32 | header length: u32 | header | payload |

A transfer is one stream for each piece: the receiver sends Open, Pull and in the end, on one stream
of the whole fetch, Ack; the sender sends Data, ..., Data, Commit, and before them BlockTable if the
receiver is to read the blocks itself. A connection, which two ranks have for as long as both live,
chooses their transport: the receiver sends Open with its transports, the sender Open with at most
one of them, then Announce for each message of a two-sided transport. There the transfer id is the
connection's.

Every frame names the transfer id and the epoch of the worker that holds the cache, so that a reused
number or a restarted worker is never mistaken. Knows the form of frames only.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Final, get_args

import msgpack
from crc32c import crc32c

from ...proto import limits
from ..engine.plan import FirstTokens
from ..kv_cache.layout import KvSpan

PULL_METHOD: Final = "/tandem.v1.KvTransfer/Pull"
CONNECT_METHOD: Final = "/tandem.v1.KvTransfer/Connect"
CONNECTION_LOST: Final = "KV connection lost"
"""The text in which a sender ends a transfer whose connection it does not know, or not any more."""
FRAME_BYTES: Final = 1024 * 1024
"""KV of one data frame to aim at: the fastest for gRPC streams of Python bytes on loopback
(measured 64 KiB to 4 MiB), and short enough to be copied at once in an event loop (a fifth of a
millisecond).
"""

MAX_FIRST_TOKENS: Final = limits.MAX_BEAM_WIDTH + 2 * limits.MAX_STOP_TOKEN_IDS
"""A beam search begins with a candidate for each beam and for each token that could end one; some
the model adds.
"""

_PREFIX = struct.Struct(">II")
_MAX_HEADER_BYTES: Final = (
    4096 + 14 * MAX_FIRST_TOKENS
)  # 5 bytes for a token, 9 for its log probability


class TransferError(Exception):
    """Reports a transfer that failed. Nothing of it may be used. The text is safe to show."""


class TransportError(TransferError):
    """Reports a transport that failed, not the cache: another transport may still bring it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferKey:
    """Identifies the transfer that a frame belongs to."""

    transfer_id: bytes  # 128 random bits
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Begins a stream of the receiver, and answers that of a connection. The stream of a transfer
    pins the cache: the sender keeps it as long as the stream lives.
    """

    layout: bytes  # KvLayout.digest
    # Of a connection, by name in order of preference: its capabilities at the receiver, or how the
    # chosen one is reached.
    transports: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Asks for the layers of a group, of the tokens from `first_token` on (the receiver has those
    before), in the sender's KV slots [first_slot, +num_slots). No slots at all is a stream that
    only pins the cache.
    """

    first_token: int
    group: int
    first_slot: int
    num_slots: int
    connection: bytes = b""  # by whose transport it is to go; empty: as payload of Data
    stream: int = 0  # distinguishes the transfers of a connection


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """Answers a Pull over a one-sided transport. Its payload is the block table, int32, little
    endian.
    """

    entry: int  # of the sender's lease table,
    # which it holds as long as the blocks are the transfer's; 0: the table is full, so Data have
    # payload
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Data(KvSpan):
    """Brings a span of the sender's KV cache, in canonical form as payload or wherever the
    transport has it.
    """

    index: int  # counts the data frames of a stream from 0
    num_bytes: int  # of KV
    burst: int  # frames that were ready at the same time share a number
    age: float  # seconds since the sender began to read the burst


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Ends the data: only now may the cache be used."""

    num_frames: int
    num_tokens: int
    prefix_hash: bytes
    tokens: list[int]  # of FirstTokens, at least one;
    logprobs: list[float]  # none, or one for each

    @property
    def first_tokens(self) -> FirstTokens:
        """What the decode continues with."""
        return FirstTokens(tokens=tuple(self.tokens), logprobs=tuple(self.logprobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Confirms that every rank of the receiver's group has its part of the cache, verified; the
    sender's group may free it. Sent by rank 0 to rank 0; other streams just end.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Describes the next message that goes through the connection's two-sided transport."""

    stream: int
    num_bytes: int
    checksum: int  # crc32c


Message = Open | Pull | BlockTable | Data | Commit | Ack | Announce
_TYPES: dict[str, type[Message]] = {cls.__name__: cls for cls in get_args(Message)}


def checksum_of(data: bytes | memoryview, before: int = 0) -> int:
    """Returns the crc32c of data, continued from the checksum `before`."""
    return crc32c(data, before)


def encode(key: TransferKey, message: Message, payload: bytes | memoryview = b"") -> bytes:
    """Returns one frame, ready to send."""
    values = {name: getattr(message, name) for name in _FIELDS[type(message)]}
    header = msgpack.packb([type(message).__name__, key.transfer_id, key.epoch, values])
    head = struct.pack(">I", len(header)) + header
    return b"".join((struct.pack(">I", checksum_of(payload, checksum_of(head))), head, payload))


def decode(frame: bytes) -> tuple[TransferKey, Message, memoryview]:
    """Returns what `encode` was given; the payload is a view of `frame`. Raises TransferError for
    anything else.
    """
    if len(frame) < _PREFIX.size:
        raise TransferError("KV frame cut short")
    checksum, header_length = _PREFIX.unpack_from(frame)
    view = memoryview(frame)
    if checksum_of(view[4:]) != checksum:
        raise TransferError("KV frame with a wrong checksum")
    if header_length > min(_MAX_HEADER_BYTES, len(frame) - _PREFIX.size):
        raise TransferError("KV frame with an impossible header length")
    end = _PREFIX.size + header_length
    try:
        name, transfer_id, epoch, values = msgpack.unpackb(
            view[_PREFIX.size : end], max_map_len=32, max_array_len=MAX_FIRST_TOKENS
        )
        message = _TYPES[name](**values)
        key = TransferKey(transfer_id=transfer_id, epoch=epoch)
    except (ValueError, TypeError, KeyError) as error:
        raise TransferError("KV frame with an unreadable header") from error
    _check_types(key)
    _check_types(message)
    if isinstance(message, Commit) and not (
        message.tokens and len(message.logprobs) in (0, len(message.tokens))
    ):
        raise TransferError("KV frame with bad first tokens")
    return key, message, view[end:]


_CHECKS: Final[dict[object, Callable[[Any], bool]]] = {
    int: lambda value: type(value) is int and value >= 0,
    float: lambda value: type(value) is float and math.isfinite(value) and value >= 0,
    bytes: lambda value: type(value) is bytes,
    list[int]: lambda value: (
        type(value) is list and all(type(item) is int and item >= 0 for item in value)
    ),
    list[float]: lambda value: (
        type(value) is list and all(type(x) is float and math.isfinite(x) for x in value)
    ),
    dict[str, Any]: lambda value: type(value) is dict and all(type(name) is str for name in value),
}
_FIELDS: Final = {
    cls: {each.name: _CHECKS[each.type] for each in fields(cls)}
    for cls in (TransferKey, *_TYPES.values())
}


def _check_types(part: TransferKey | Message) -> None:
    """Raises TransferError unless every field is of the type that its class declares."""
    for name, fits in _FIELDS[type(part)].items():
        if not fits(getattr(part, name)):
            raise TransferError(f"KV frame with a bad {name}")
