"""KV frames on the wire: crc32c, length of the header, msgpack header, raw bytes.

    | crc32c of all that follows: u32 | header length: u32 | header | payload |

The puller says Open, then Pull, and in the end, on one stream, Ack; the exporter says Data, ..., Data, Commit, and
before them, if the Open names a host, Offer. Every frame names the transfer id and the epoch of the worker that holds
the cache, so that a reused number or a restarted worker is never mistaken.
Knows the form of frames only; `export.py` and `pull.py` hold the conversation.
"""

import math
import struct
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import google_crc32c
import msgpack

from ..engine.plan import KvSpan

PULL_METHOD: Final = "/tandem.v1.KvTransfer/Pull"
FRAME_BYTES: Final = 256 * 1024
"""Payload size to aim at; the fastest for gRPC streams of Python bytes on loopback (measured 64 KiB to 4 MiB)."""

_PREFIX = struct.Struct(">II")
_MAX_HEADER_BYTES: Final = 4096


class TransferError(Exception):
    """A transfer that did not end well. Nothing of it may be used. The text is safe to show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Pins the cache before it is wanted: as long as the stream lives, the exporter keeps it."""

    layout: dict[str, Any]  # a KvLayout's fields
    host: str = ""  # where the puller runs, to be offered shared memory; empty if it wants none


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The exporter's answer to an Open with a host. Its payload is the block table, int32, little endian."""

    token: bytes  # what the memory's ledger begins with
    pid: int
    fd: int
    num_blocks: int
    block_size: int
    num_slots: int  # KV slots of the exporter
    line: int  # of the ledger,
    number: int  # which it holds as long as the blocks are the export's; 0: there is nothing to map


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Asks for all layers of the tokens from `first_token` on, what lies before is cached at the puller, in the
    exporter's KV slots [first_slot, +num_slots). No slots at all is a stream that only pins the cache."""

    first_token: int
    first_slot: int
    num_slots: int
    shared: bool = False  # the puller reads the memory itself: Data says what is there, and carries nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Every rank of the puller's group has its part of the cache, verified; the exporter's group may let go. Said by
    rank 0 to rank 0; other streams just end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data(KvSpan):
    """A span of the exporter's KV cache, in canonical form as payload or in the exporter's memory."""

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
    first_token: int  # the token that the prefill sampled


Message = Open | Offer | Pull | Ack | Data | Commit
_TYPES: dict[str, type[Message]] = {cls.__name__: cls for cls in (Open, Offer, Pull, Ack, Data, Commit)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferKey:
    """Which transfer a frame belongs to."""

    transfer_id: bytes  # 128 random bits
    epoch: int


def encode(key: TransferKey, message: Message, payload: bytes | memoryview = b"") -> bytes:
    """One frame, ready to send."""
    header = msgpack.packb([type(message).__name__, key.transfer_id, key.epoch, asdict(message)])
    head = struct.pack(">I", len(header)) + header
    checksum = google_crc32c.extend(google_crc32c.value(head), bytes(payload))
    return b"".join((struct.pack(">I", checksum), head, payload))


def decode(frame: bytes) -> tuple[TransferKey, Message, memoryview]:
    """The inverse of `encode`; the payload is a view of `frame`. Raises TransferError for anything else."""
    if len(frame) < _PREFIX.size:
        raise TransferError("KV frame cut short")
    checksum, header_length = _PREFIX.unpack_from(frame)
    view = memoryview(frame)
    if google_crc32c.value(frame[4:]) != checksum:
        raise TransferError("KV frame with a wrong checksum")
    if header_length > min(_MAX_HEADER_BYTES, len(frame) - _PREFIX.size):
        raise TransferError("KV frame with an impossible header length")
    end = _PREFIX.size + header_length
    try:
        name, transfer_id, epoch, values = msgpack.unpackb(view[_PREFIX.size : end], max_map_len=32, max_array_len=32)
        cls = _TYPES[name]
        message = cls(**values)
        key = TransferKey(transfer_id=transfer_id, epoch=epoch)
    except (ValueError, TypeError, KeyError) as error:
        raise TransferError("KV frame with an unreadable header") from error
    _check_types(key)
    _check_types(message)
    return key, message, view[end:]


def _check_types(part: Message | TransferKey) -> None:
    for field in fields(part):
        value = getattr(part, field.name)
        good = type(value) is field.type
        if field.type is int:
            good = good and value >= 0
        elif field.type is float:
            good = good and math.isfinite(value) and value >= 0
        elif field.type not in (bytes, bool, str):
            good = type(value) is dict
        if not good:
            raise TransferError(f"KV frame with a bad {field.name}")
