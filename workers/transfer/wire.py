"""KV frames on the wire: crc32c, length of the header, msgpack header, raw bytes.

    | crc32c of all that follows: u32 | header length: u32 | header | payload |

A transfer: the puller says Open, then Pull, and in the end, on one stream, Ack; the exporter says Data, ..., Data,
Commit, and before them, if the puller is to read the cache itself, Offer. Every frame names the transfer id and the
epoch of the worker that holds the cache, so that a reused number or a restarted worker is never mistaken.
A connection, which two ranks have for as long as both live: the puller says Hello, the exporter Welcome, Sample, ...,
Sample; then the puller Try and the exporter Trial for each way there might be, and the puller Choice. From then on the
exporter says what goes through the pair. Here the id is the pair's, and the epoch 0 until the Welcome names it.
Knows the form of frames only; `export.py` and `pull.py` hold the one conversation, `accept.py` and `connect.py` the
other.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, get_args

import msgpack
from crc32c import crc32c

from ...proto import limits
from ..engine.plan import FirstTokens
from ..kv_cache.layout import KvSpan

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PULL_METHOD: Final = "/tandem.v1.KvTransfer/Pull"
CONNECT_METHOD: Final = "/tandem.v1.KvTransfer/Connect"
PAIR_GONE: Final = "KV pair gone"
"""The text in which an exporter ends a transfer whose pair it does not know, or not any more."""
FRAME_BYTES: Final = 1024 * 1024
"""Payload size to aim at; the fastest for gRPC streams of Python bytes on loopback (measured 64 KiB to 4 MiB)."""
SLICE_BYTES: Final = 1024 * 1024
"""The same where a frame says only what is there, and what is read or copied at once: long enough to be fast, short
enough for an event loop (a fifth of a millisecond)."""

MAX_OPENING_TOKENS: Final = limits.MAX_BEAM_WIDTH + 2 * limits.MAX_STOP_TOKEN_IDS
"""A beam search opens with a candidate for each beam and for each token that could end one; some the model adds."""

_PREFIX = struct.Struct(">II")
_MAX_HEADER_BYTES: Final = 4096 + 14 * MAX_OPENING_TOKENS  # 5 bytes for a token, 9 for its log probability


class TransferError(Exception):
    """A transfer that did not end well. Nothing of it may be used. The text is safe to show."""


class TransportError(TransferError):
    """It was the way's fault, not the cache's: another way may still bring it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Pins the cache before it is wanted: as long as the stream lives, the exporter keeps it."""

    layout: dict[str, Any]  # a KvLayout's fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The exporter's first answer to a Pull whose puller is to read the cache itself. Its payload is the block table,
    int32, little endian."""

    line: int  # of the ledger,
    number: int  # which it holds as long as the blocks are the export's; 0: nobody can tell, so it comes as payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Asks for all layers of the tokens from `first_token` on, what lies before is cached at the puller, in the
    exporter's KV slots [first_slot, +num_slots). No slots at all is a stream that only pins the cache."""

    first_token: int
    first_slot: int
    num_slots: int
    transport: str = "grpc"  # by any other Data says what is there, and carries nothing
    pair: bytes = b""  # the connection by whose transport it is to go
    stream: int = 0  # tells the transfers of a pair apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Every rank of the puller's group has its part of the cache, verified; the exporter's group may let go. Said by
    rank 0 to rank 0; other streams just end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data(KvSpan):
    """A span of the exporter's KV cache, in canonical form as payload or wherever the transport has it."""

    index: int  # counts the data frames of a stream from 0
    num_bytes: int  # of KV
    burst: int  # frames that were ready at the same time share a number
    age: float  # seconds since the exporter began to read the burst


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The end: only now may the cache be used."""

    num_frames: int
    num_tokens: int
    prefix_hash: bytes
    tokens: list[int]  # of the opening, at least one;
    logprobs: list[float]  # none, or one for each

    @property
    def opening(self) -> FirstTokens:
        """What the decode goes on with."""
        return FirstTokens(tokens=tuple(self.tokens), logprobs=tuple(self.logprobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Whoever is to pull introduces itself."""

    layout: dict[str, Any]  # a KvLayout's fields
    host: str  # its `host_id`
    transports: list[str]  # that it would use


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The exporter's answer."""

    transports: list[str]  # that it has for this puller
    checksum: int  # crc32c of its sample, which is SAMPLE_BYTES long


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A piece of the sample, as payload."""

    index: int
    count: int  # pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """Asks for the sample by another way."""

    transport: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How the sample is to be had so. The payload is more of that, if it is long."""

    transport: str
    info: dict[str, Any]  # empty: not at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The way that the puller keeps; the exporter may forget the others."""

    transport: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The next message that goes through the pair."""

    stream: int
    num_bytes: int
    checksum: int  # crc32c


Message = Open | Offer | Pull | Ack | Data | Commit | Hello | Welcome | Sample | Try | Trial | Choice | Sent
_TYPES: dict[str, type[Message]] = {cls.__name__: cls for cls in get_args(Message)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferKey:
    """Which transfer a frame belongs to."""

    transfer_id: bytes  # 128 random bits
    epoch: int


def checksum_of(data: bytes | memoryview, before: int = 0) -> int:
    """Its crc32c, going on after what has the checksum `before`."""
    return crc32c(data, before)


def encode(key: TransferKey, message: Message, payload: bytes | memoryview = b"") -> bytes:
    """One frame, ready to send."""
    header = msgpack.packb([type(message).__name__, key.transfer_id, key.epoch, asdict(message)])
    head = struct.pack(">I", len(header)) + header
    return b"".join((struct.pack(">I", checksum_of(payload, checksum_of(head))), head, payload))


def decode(frame: bytes) -> tuple[TransferKey, Message, memoryview]:
    """The inverse of `encode`; the payload is a view of `frame`. Raises TransferError for anything else."""
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
            view[_PREFIX.size : end], max_map_len=32, max_array_len=MAX_OPENING_TOKENS
        )
        cls = _TYPES[name]
        message = cls(**values)
        key = TransferKey(transfer_id=transfer_id, epoch=epoch)
    except (ValueError, TypeError, KeyError) as error:
        raise TransferError("KV frame with an unreadable header") from error
    check_types(key)
    check_types(message)
    if isinstance(message, Commit) and not (message.tokens and len(message.logprobs) in (0, len(message.tokens))):
        raise TransferError("KV frame with a bad opening")
    return key, message, view[end:]


_LISTS: Final[dict[object, tuple[type, Callable[[Any], bool]]]] = {
    list[str]: (str, lambda item: True),
    list[int]: (int, lambda item: item >= 0),
    list[float]: (float, math.isfinite),
}


def check_types(part: "DataclassInstance") -> None:
    """Raises TransferError unless every field is what its class says, for what came from a peer."""
    for field in fields(part):
        value = getattr(part, field.name)
        good = type(value) is field.type
        if field.type is int:
            good = good and value >= 0
        elif field.type is float:
            good = good and math.isfinite(value) and value >= 0
        elif field.type in _LISTS:
            item_type, fits = _LISTS[field.type]
            good = type(value) is list and all(type(item) is item_type and fits(item) for item in value)
        elif field.type not in (bytes, str):
            good = type(value) is dict
        if not good:
            raise TransferError(f"KV frame with a bad {field.name}")
