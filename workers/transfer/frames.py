"""Encodes and decodes KV frames: crc32c, header length, msgpack header, raw bytes.

    | crc32c of all that follows: u32 | header length: u32 | header | payload |

A transfer has one stream for each shard. The receiver sends Open and Pull; at the end it sends Ack,
on only one stream of the fetch. The sender sends Data, ..., Data, Commit, and before them
BlockTable if the receiver reads the blocks itself. It sends Alive while the prefill computes tokens
that the stream does not carry.

Two ranks also have one connection, for as long as both live, on which they choose their transport.
The receiver sends Open with its transports, the sender answers Open with at most one of them. The
sender then sends Announce for each message of a two-sided transport. On this stream the transfer id
identifies the connection.

Every frame names the transfer id and the epoch of the worker that holds the cache, so a reused
number or a restarted worker is never mistaken for another. This module only knows the form of
frames, and of the target and the result of a fetch.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, get_args

import msgpack
from crc32c import crc32c

from ...proto import limits, worker_pb2
from ..engine.plan import FirstTokens
from ..kv_cache.layout import CacheGroup, KvSpan
from ..kv_cache.tables import SequenceKv, TableSpec, spec_of

PULL_METHOD: Final = "/tandem.v1.KvTransfer/Pull"
CONNECT_METHOD: Final = "/tandem.v1.KvTransfer/Connect"
CONNECTION_LOST: Final = "KV connection lost"
"""The error text of a sender that ends a transfer because it does not know its connection."""
FRAME_BYTES: Final = 1024 * 1024
"""Target size of the KV in one data frame. It is the fastest for gRPC streams of Python bytes on
loopback (measured from 64 KiB to 4 MiB), and an event loop copies it in a fifth of a millisecond.
"""

MAX_FIRST_TOKENS: Final = limits.MAX_BEAM_WIDTH + 2 * limits.MAX_STOP_TOKEN_IDS
"""A beam search begins with a candidate for each beam and for each stop token, of which the model
itself has some.
"""

_PREFIX = struct.Struct(">II")
# A first token takes 5 bytes, its log probability 9.
_MAX_HEADER_BYTES: Final = 4096 + 14 * MAX_FIRST_TOKENS


class TransferError(Exception):
    """Reports a failed transfer: none of its data may be used. The text may be shown to users."""


class TransportError(TransferError):
    """Reports that the transport failed, not the cache: another transport may still succeed."""


@dataclass(frozen=True, slots=True)
class FetchTarget:
    """Holds the target of a fetch."""

    place: SequenceKv
    # Tokens of the prompt, counted from the first, of which the prefix cache holds everything.
    num_cached: int = 0

    def first_token(self, tables: Sequence[TableSpec], group: CacheGroup, num_tokens: int) -> int:
        """Returns the first token of a group that is fetched for a sequence of `num_tokens`.

        The next token's query sees its own token and the `window - 1` tokens before it.
        """
        if group.part.state:
            return 0
        window = spec_of(tables, group).window
        if window is None:
            return self.num_cached
        return max(self.num_cached, num_tokens - window + 1)


FetchResult = tuple[FirstTokens, worker_pb2.KvReceived]
"""The verified result of a stream or of a whole fetch. The active seconds last from the sender's
read to the receiver's write, without waits for the prefill. The transport of a stream without KV is
empty.
"""


def merge(parts: Sequence[worker_pb2.KvReceived]) -> worker_pb2.KvReceived:
    """Sums up the transfers of several streams or ranks."""
    transports = {name for part in parts for name in part.transport.split("+")}
    return worker_pb2.KvReceived(
        transfer_bytes=sum(part.transfer_bytes for part in parts),
        transfer_active_seconds=max(part.transfer_active_seconds for part in parts),
        transport="+".join(sorted(transports - {""})),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferKey:
    """Identifies the transfer that a frame belongs to."""

    transfer_id: bytes  # 128 random bits
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Begins a receiver's stream; also the sender's answer on a connection's stream.

    The stream of a transfer pins the cache: the sender keeps the blocks for as long as the stream
    lives.
    """

    layout: bytes  # KvLayout.digest
    # Only on a connection's stream, by transport name in order of preference. The receiver sends
    # its capabilities, the sender answers with the description of the chosen transport.
    transports: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Asks for the KV of tokens from `first_token` on, in all layers of a group.

    The receiver has the tokens before, or they have left the window. A state has one token, 0. Asks
    for the sender's KV slots [first_slot, +num_slots). A stream with num_slots 0 only pins the
    cache.
    """

    first_token: int
    group: int
    first_slot: int
    num_slots: int
    connection: bytes = b""  # the connection whose transport is to be used; empty: Data's payload
    stream: int = 0  # distinguishes the transfers of a connection


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """Answers a Pull over a one-sided transport.

    Its payload are the blocks that hold the requested tokens: int32, little endian.
    """

    first: int  # the index of the first of these blocks in the sequence's block table

    # Index of the offer's entry in the sender's lease table.
    entry: int
    # Content of the entry while the transfer owns the blocks. 0: the table is full, so the Data
    # frames carry the KV as payload.
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Data(KvSpan):
    """Carries a span of the sender's KV cache, in canonical form.

    The bytes are the payload, or the connection's transport carries them.
    """

    index: int  # position among the data frames of the stream, from 0
    num_bytes: int  # of KV
    burst: int  # frames that were ready at the same time share a number
    age: float  # seconds since the sender began to read the burst


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """Tells the receiver that the prefill makes progress, although the stream has nothing to send.

    The tokens of a long prompt that leave the window are not sent, and states come last.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Ends the data: only now may the cache be used."""

    num_frames: int
    num_tokens: int
    prefix_hash: bytes
    tokens: list[int]  # of FirstTokens, at least one
    logprobs: list[float]  # empty, or one for each token

    @property
    def first_tokens(self) -> FirstTokens:
        """Returns the tokens that decoding continues with."""
        return FirstTokens(tokens=tuple(self.tokens), logprobs=tuple(self.logprobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Confirms that every rank of the receiver's group has verified its part of the cache.

    The sender's group may then free the blocks. Rank 0 sends it to rank 0; other streams just end.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Describes the next message that goes through the connection's two-sided transport."""

    stream: int
    num_bytes: int
    checksum: int  # crc32c, or `device_checksum` of a message between GPUs


Message = Open | Pull | BlockTable | Data | Alive | Commit | Ack | Announce
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
    """Decodes a frame of `encode`; the payload is a view of `frame`.

    Raises TransferError for anything else.
    """
    if len(frame) < _PREFIX.size:
        raise TransferError("KV frame is truncated")
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
    """Raises TransferError unless every field has the type that its class declares."""
    for name, fits in _FIELDS[type(part)].items():
        if not fits(getattr(part, name)):
            raise TransferError(f"KV frame with a bad {name}")
