"""Frames of a transfer: how they are cut, and that no other sequence of frames passes for it."""

import random
from collections import Counter
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tandem.tests.workers.engine.fake import FakeKv
from tandem.tests.workers.spans import read_now, span
from tandem.tests.workers.transfer.played import one_table
from tandem.workers.kv_cache.layout import KvLayout, LayerGeometry
from tandem.workers.kv_cache.reshard import Piece
from tandem.workers.kv_cache.tables import SequenceKv, TableBlocks
from tandem.workers.model.kv.store import PagedKv
from tandem.workers.transfer.connector import TransferContext
from tandem.workers.transfer.frames import FRAME_BYTES, Commit, Data, FetchTarget, TransferError
from tandem.workers.transfer.sender import plan_frames
from tandem.workers.transfer.shard_stream import ShardWriter

LAYOUT = KvLayout.uniform(
    num_layers=3, num_heads=4, num_kv_heads=4, head_dim=4, dtype="float32", model="fake"
)
NUM_TOKENS, NUM_CACHED, BLOCK = 44, 16, 16
BLOCKS = (5, 2, 7)
TARGET = FetchTarget(one_table(BLOCKS), NUM_CACHED)
PIECE = Piece(source_rank=0, source_slots=range(2), target_slots=range(1, 3))
PIN = Piece(source_rank=0, source_slots=range(0), target_slots=range(0))
COMMIT = Commit(num_frames=0, num_tokens=NUM_TOKENS, prefix_hash=b"hash", tokens=[42], logprobs=[])

Frame = tuple[Data, memoryview]


def memory() -> FakeKv:
    return FakeKv(8, BLOCK, LAYOUT)


def source() -> FakeKv:
    kv = memory()
    whole = span(kv, 0, NUM_TOKENS)
    kv.write(BLOCKS, whole, memoryview(random.Random(1).randbytes(whole.size(LAYOUT))))
    return kv


def cut(kv: FakeKv) -> list[Frame]:
    """The frames of one transfer, in bursts as layers and chunks of a prefill become ready."""
    frames: list[Frame] = []
    sent = dict.fromkeys(range(3), 16)
    steps = [[30, 16, 16], [30, 30, 30], [31, 31, 31], [44, 44, 31], [44, 44, 44]]
    for burst, ready in enumerate(dict(enumerate(step)) for step in steps):
        for part in plan_frames(LAYOUT, 0, PIECE.source_slots, sent, ready, 5 * 64):
            payload = read_now(kv, BLOCKS, part)
            data = Data(
                index=len(frames), num_bytes=payload.nbytes, burst=burst, age=0.0, **asdict(part)
            )
            frames.append((data, payload))
        sent = ready
    return frames


SOURCE = source()


def transfer(frames: list[Frame], commit: Commit) -> FakeKv:
    """Writes the frames; returns the memory written. Raises TransferError unless all of them are
    right.
    """
    kv = memory()
    writer = ShardWriter(NUM_TOKENS, b"hash", TARGET, TransferContext(kv=kv), PIECE)
    for frame, payload in frames:
        writer.write(frame, payload)
    assert writer.finish(commit) == commit.first_tokens
    return kv


def arrived(kv: FakeKv) -> bool:
    """Whether every byte is in its place, and nothing anywhere else: in slots of others, or in what
    was cached.
    """
    found, there = (
        np.frombuffer(read_now(store, BLOCKS, span(store, 0, NUM_TOKENS)), np.uint8).reshape(
            3, 2, NUM_TOKENS, 4, -1
        )
        for store in (kv, SOURCE)
    )
    expected = np.zeros_like(found)
    expected[:, :, NUM_CACHED:, 1:3] = there[:, :, NUM_CACHED:, :2]
    return bool((found == expected).all())


@given(
    st.integers(1, 40),
    st.sampled_from([range(1), range(2, 3), range(1, 13), range(64)]),
    st.sampled_from([1, 32, 128]),
    st.integers(0, 500),
    st.integers(0, 1500),
    st.tuples(st.integers(0, 40), st.integers(0, 300)),
    st.tuples(st.integers(0, 40), st.integers(0, 300)),
)
def test_a_plan_covers_every_layer_of_every_token_once(
    layers: int,
    slots: range,
    head_dim: int,
    start: int,
    count: int,
    sent_ahead: tuple[int, int],
    ready_ahead: tuple[int, int],
) -> None:
    """What was sent and what is ready both may reach further in the first layers."""
    layout = KvLayout.uniform(
        num_layers=layers,
        num_heads=4,
        num_kv_heads=4,
        head_dim=head_dim,
        dtype="float32",
        model="fake",
    )
    seen: Counter[tuple[int, int]] = Counter()
    sent = {
        layer: start + (sent_ahead[1] if layer < sent_ahead[0] else 0) for layer in range(layers)
    }
    ready = {
        layer: start + count + (ready_ahead[1] if layer < ready_ahead[0] else 0)
        for layer in range(layers)
    }
    ready = {layer: max(sent[layer], ready[layer]) for layer in range(layers)}
    ends = dict(sent)
    assume(layers * (count + 300) < 9000)
    for part in plan_frames(layout, 0, slots, sent, ready, FRAME_BYTES):
        assert part.size(layout) <= max(FRAME_BYTES, len(slots) * layout.groups[0].part.slot_bytes)
        assert range(part.first_slot, part.first_slot + part.num_slots) == slots
        for layer in range(part.first_layer, part.first_layer + part.num_layers):
            assert ends[layer] == part.first_token
            ends[layer] += part.num_tokens
            seen.update(
                (layer, token)
                for token in range(part.first_token, part.first_token + part.num_tokens)
            )
    assert seen == Counter(
        (layer, token) for layer in range(layers) for token in range(sent[layer], ready[layer])
    )


def test_without_slots_there_are_no_frames_and_none_is_taken() -> None:
    assert (
        plan_frames(
            LAYOUT,
            0,
            range(0),
            dict.fromkeys(range(3), 0),
            dict.fromkeys(range(3), 44),
            FRAME_BYTES,
        )
        == []
    )
    kv = memory()
    writer = ShardWriter(NUM_TOKENS, b"hash", TARGET, TransferContext(kv=kv), PIN)
    for frame, payload in cut(SOURCE)[:1]:
        for first_token in (frame.first_token, NUM_TOKENS - frame.num_tokens, NUM_TOKENS):
            for message in (frame, replace(frame, num_slots=0, num_bytes=0)):
                with pytest.raises(TransferError):
                    writer.write(
                        replace(message, first_token=first_token), payload[: message.num_bytes]
                    )
    assert writer.finish(COMMIT).tokens == (42,)
    with pytest.raises(TransferError, match="incomplete"):
        writer.finish(replace(COMMIT, num_frames=1))


def test_the_frames_as_cut_are_taken() -> None:
    frames = cut(SOURCE)
    assert arrived(transfer(frames, replace(COMMIT, num_frames=len(frames))))


EDITS = st.lists(
    st.tuples(st.sampled_from(["drop", "repeat", "swap", "move"]), *[st.integers(0, 20)] * 2),
    max_size=3,
)


@given(EDITS, st.booleans(), st.booleans())
def test_no_other_sequence_of_frames_passes(
    edits: list[tuple[str, int, int]], renumber: bool, recount: bool
) -> None:
    """Even if the sender numbers and counts what it sends: then it may pass, but only with every
    byte in its place.
    """
    frames = cut(SOURCE)
    original = list(frames)
    for edit, a, b in edits:
        i, j = a % len(frames), b % len(frames)
        if edit == "drop":
            del frames[i]
        elif edit == "repeat":
            frames.insert(j, frames[i])
        elif edit == "swap":
            frames[i], frames[j] = frames[j], frames[i]
        else:
            frames.insert(j, frames.pop(i))
    if renumber:
        frames = [(replace(frame, index=i), payload) for i, (frame, payload) in enumerate(frames)]
    commit = replace(COMMIT, num_frames=len(frames) if recount else len(original))
    same = frames == original
    try:
        kv = transfer(frames, commit)
    except TransferError:
        assert not same
        return
    assert same or renumber
    assert arrived(kv)


@given(
    st.integers(0, 20),
    st.sampled_from([field.name for field in fields(Data) if field.name not in ("burst", "age")]),
    st.sampled_from([-1, 1, 2, 3, 2**62]),
)
def test_a_frame_that_names_another_place_is_refused(position: int, field: str, shift: int) -> None:
    frames = cut(SOURCE)
    frame, payload = frames[position % len(frames)]
    value = max(0, getattr(frame, field) + shift)
    assume(value != getattr(frame, field))
    frames[position % len(frames)] = (replace(frame, **{field: value}), payload)
    with pytest.raises(TransferError):
        transfer(frames, replace(COMMIT, num_frames=len(frames)))


@given(st.integers(0, 20), st.integers(-64, 64).filter(bool))
def test_a_frame_of_another_size_is_refused(position: int, change: int) -> None:
    frames = cut(SOURCE)
    position %= len(frames)
    frame, payload = frames[position]
    resized = memoryview((bytes(payload) + bytes(64))[: payload.nbytes + change])
    for num_bytes in (frame.num_bytes, resized.nbytes):
        frames[position] = (replace(frame, num_bytes=num_bytes), resized)
        with pytest.raises(TransferError, match="wrong length"):
            transfer(frames, replace(COMMIT, num_frames=len(frames)))


@pytest.mark.parametrize(
    "change", [{"num_frames": 3}, {"num_tokens": 43}, {"num_tokens": 45}, {"prefix_hash": b"other"}]
)
def test_a_commit_of_something_else_is_refused(change: dict[str, object]) -> None:
    frames = cut(SOURCE)
    commit = replace(COMMIT, num_frames=len(frames))
    with pytest.raises(TransferError):
        transfer(frames, replace(commit, **change))  # type: ignore[arg-type]


def test_a_frame_before_its_window_is_refused() -> None:
    """A sender that also sends what has left the window, and one whose window is a token short."""
    layer = LayerGeometry(num_heads=4, num_kv_heads=4, head_dim=4, window=10)
    layout = KvLayout(layers=(layer,) * 3, dtype="float32", model="fake")
    kv = PagedKv(layout, num_blocks=8, block_size=BLOCK, device=torch.device("cpu"))
    target = FetchTarget(SequenceKv((TableBlocks((5, 2), 1),)), 0)
    first = NUM_TOKENS - 9  # the next token sees nine tokens and itself
    for wrong in (first - 1, first, first + 1):
        writer = ShardWriter(NUM_TOKENS, b"hash", target, TransferContext(kv=kv), PIECE)
        sent, ready = dict.fromkeys(range(3), wrong), dict.fromkeys(range(3), NUM_TOKENS)
        (part,) = plan_frames(layout, 0, PIECE.source_slots, sent, ready, FRAME_BYTES)
        size = part.size(layout)
        data = Data(index=0, num_bytes=size, burst=0, age=0.0, **asdict(part))
        if wrong == first:
            writer.write(data, memoryview(bytes(size)))
            assert writer.finish(replace(COMMIT, num_frames=1)).tokens == (42,)
        else:
            with pytest.raises(TransferError, match="out of order"):
                writer.write(data, memoryview(bytes(size)))
            with pytest.raises(TransferError, match="incomplete"):
                writer.finish(COMMIT)
