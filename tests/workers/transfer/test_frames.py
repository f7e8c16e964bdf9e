"""KV frames: what goes in comes out, and everything else is refused with TransferError and nothing
else.
"""

import struct
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.workers.engine.plan import FirstTokens
from tandem.workers.transfer.frames import (
    MAX_FIRST_TOKENS,
    Ack,
    Announce,
    BlockTable,
    Commit,
    Data,
    Message,
    Open,
    Pull,
    TransferError,
    TransferKey,
    checksum_of,
    decode,
    encode,
)

COUNTS = st.integers(0, 2**63)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
NAMES = st.text(max_size=9)
WORDS = st.dictionaries(NAMES, st.integers(0, 99) | NAMES, max_size=8)
KEYS = st.builds(TransferKey, transfer_id=st.binary(min_size=16, max_size=16), epoch=COUNTS)


def commit_of(first: list[tuple[int, float]], scored: bool, **values: Any) -> Commit:
    logprobs = [logprob for _, logprob in first] if scored else []
    return Commit(**values, tokens=[token for token, _ in first], logprobs=logprobs)


MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(BlockTable, first=COUNTS, entry=COUNTS, number=COUNTS),
    st.builds(
        Pull,
        first_token=COUNTS,
        group=COUNTS,
        first_slot=COUNTS,
        num_slots=COUNTS,
        connection=st.binary(max_size=16),
        stream=COUNTS,
    ),
    st.builds(Ack),
    st.builds(
        Data,
        index=COUNTS,
        first_layer=COUNTS,
        num_layers=COUNTS,
        first_token=COUNTS,
        num_tokens=COUNTS,
        first_slot=COUNTS,
        num_slots=COUNTS,
        num_bytes=COUNTS,
        burst=COUNTS,
        age=st.floats(0, 1e9),
    ),
    st.builds(
        commit_of,
        first=st.lists(st.tuples(COUNTS, FLOATS), min_size=1, max_size=40),
        scored=st.booleans(),
        num_frames=COUNTS,
        num_tokens=COUNTS,
        prefix_hash=st.binary(max_size=32),
    ),
    st.builds(
        Open, layout=st.binary(max_size=16), transports=st.dictionaries(NAMES, WORDS, max_size=4)
    ),
    st.builds(Announce, stream=COUNTS, num_bytes=COUNTS, checksum=COUNTS),
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
)
DATA_FRAME = encode(
    TransferKey(transfer_id=b"0123456789abcdef", epoch=7),
    Data(
        index=1,
        first_layer=0,
        num_layers=1,
        first_token=0,
        num_tokens=2,
        first_slot=0,
        num_slots=1,
        num_bytes=8,
        burst=0,
        age=0.5,
    ),
    b"kv bytes",
)


def seal(body: bytes) -> bytes:
    """A frame whose checksum is right, whatever it says."""
    return struct.pack(">I", checksum_of(body)) + body


def frame_of(header: object) -> bytes:
    packed = msgpack.packb(header)
    return seal(struct.pack(">I", len(packed)) + packed)


@given(KEYS, MESSAGES, st.binary(max_size=200))
def test_a_frame_comes_back_as_it_went(key: TransferKey, message: Message, payload: bytes) -> None:
    found_key, found, found_payload = decode(encode(key, message, payload))
    assert (found_key, found, bytes(found_payload)) == (key, message, payload)


def test_every_flipped_bit_is_seen() -> None:
    for bit in range(8 * len(DATA_FRAME)):
        frame = bytearray(DATA_FRAME)
        frame[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TransferError):
            decode(bytes(frame))


def test_every_truncation_is_seen() -> None:
    for length in range(len(DATA_FRAME)):
        with pytest.raises(TransferError):
            decode(DATA_FRAME[:length])


@given(st.binary(max_size=300))
def test_bytes_of_somebody_else_are_refused(body: bytes) -> None:
    for frame in (body, seal(body)):
        with pytest.raises(TransferError):
            decode(frame)


@given(st.lists(VALUES, max_size=5) | VALUES)
def test_a_sealed_header_of_any_shape_is_refused(header: object) -> None:
    with pytest.raises(TransferError):
        decode(frame_of(header))


@given(MESSAGES, st.data(), VALUES)
def test_a_field_of_another_type_is_refused_or_still_of_its_type(
    message: Message, data: st.DataObject, value: Any
) -> None:
    """A peer that seals its frames well may still send anything; nothing but TransferError may come
    of it.
    """
    name, transfer_id, epoch, values = msgpack.unpackb(
        encode(TransferKey(transfer_id=b"t", epoch=1), message)[8:]
    )
    header = [name, transfer_id, epoch, values]
    place = data.draw(st.sampled_from(["transfer_id", "epoch", *values]))
    if place in values:
        values[place] = value
    else:
        header[1 if place == "transfer_id" else 2] = value
    try:
        key, found, _ = decode(frame_of(header))
    except TransferError:
        return
    part = key if place in ("transfer_id", "epoch") else found
    types: dict[str, type] = dict.fromkeys(
        ("transfer_id", "prefix_hash", "connection", "layout"), bytes
    )
    types |= {"tokens": list, "logprobs": list, "transports": dict, "age": float}
    assert type(getattr(part, place)) is types.get(place, int)


@pytest.mark.parametrize("age", [float("nan"), float("inf"), -1.0, "1", None])
def test_an_age_that_no_clock_says_is_refused(age: object) -> None:
    name, transfer_id, epoch, values = msgpack.unpackb(DATA_FRAME[8:-8])
    with pytest.raises(TransferError, match="age"):
        decode(frame_of([name, transfer_id, epoch, values | {"age": age}]))


def test_a_header_longer_than_the_frame_is_refused() -> None:
    with pytest.raises(TransferError, match="header length"):
        decode(seal(struct.pack(">I", 2**32 - 1) + b"\x90"))


@pytest.mark.parametrize("transports", [["a"], "a", None, {b"a": 1}])
def test_transports_without_names_are_refused(transports: object) -> None:
    with pytest.raises(TransferError, match="transports"):
        decode(frame_of(["Open", b"t", 1, {"transports": transports, "layout": b""}]))


KEY = TransferKey(transfer_id=b"0123456789abcdef", epoch=7)


def commit(tokens: object, logprobs: object) -> bytes:
    """A Commit with a right checksum and any first tokens."""
    good = {"num_frames": 0, "num_tokens": 1, "prefix_hash": b"hash"}
    return frame_of(
        ["Commit", KEY.transfer_id, KEY.epoch, good | {"tokens": tokens, "logprobs": logprobs}]
    )


def test_as_many_first_tokens_as_there_can_be_fit_and_keep_every_bit() -> None:
    numbers = np.random.default_rng(1).standard_normal(MAX_FIRST_TOKENS).astype(np.float32)
    tokens, logprobs = (
        [2**31 + n for n in range(MAX_FIRST_TOKENS)],
        [float(number) for number in -abs(numbers)],
    )
    message = Commit(
        num_frames=2**63, num_tokens=2**63, prefix_hash=bytes(64), tokens=tokens, logprobs=logprobs
    )
    found = decode(encode(KEY, message))[1]
    assert isinstance(found, Commit)
    assert found.first_tokens == FirstTokens(tokens=tuple(tokens), logprobs=tuple(logprobs))
    assert np.array_equal(np.array(found.logprobs, np.float32), -abs(numbers))
    with pytest.raises(TransferError):
        decode(encode(KEY, replace(message, tokens=[*tokens, 1], logprobs=[])))


@pytest.mark.parametrize(
    ("tokens", "logprobs"),
    [
        ([], []),
        ([], [-1.0]),
        ([1], [-1.0, -2.0]),
        ([1, 2], [-1.0]),
        ([-1], []),
        ([1.0], []),
        (["1"], []),
        ([True], []),
        (1, []),
        ([1], None),
        ([1], [-1]),
        ([1], [float("nan")]),
        ([1], [float("-inf")]),
        ([1], ["-1"]),
        ({"1": 1}, []),
    ],
)
def test_broken_first_tokens_are_refused(tokens: object, logprobs: object) -> None:
    assert decode(commit([1], [-1.0]))[1]
    with pytest.raises(TransferError):
        decode(commit(tokens, logprobs))
