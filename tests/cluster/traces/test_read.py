"""Tests the readers of traces; pure."""

import gzip
import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.traces.read import TracedRequest, TraceScale, parse_scale, read_trace
from tandem.proto.errors import InvalidArgument

MOONCAKE = """\
{"timestamp": 5000, "input_length": 700, "output_length": 50, "hash_ids": [7, 8]}
{"timestamp": 7500, "input_length": 1024, "output_length": 3, "hash_ids": [7, 9], "extra": 1}

{"timestamp": 6000, "input_length": 1, "output_length": 1}
"""
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:03.9799600,4808,10\r\n"
    "2023-11-16 18:17:04.0319600,3180,0\r\n"
)


def write(folder: Path, text: str, *, zipped: bool = False) -> Path:
    path = folder / "trace"
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    return path


@pytest.mark.parametrize("zipped", [False, True])
def test_lines_of_mooncake(tmp_path: Path, zipped: bool) -> None:
    requests = read_trace(write(tmp_path, MOONCAKE, zipped=zipped))
    assert [each.time for each in requests] == [0.0, 1.0, 2.5]  # sorted, from the first one on
    assert [each.input_length for each in requests] == [700, 1, 1024]
    assert [each.output_length for each in requests] == [50, 1, 3]
    assert [each.block_hashes for each in requests] == [(7, 8), (), (7, 9)]
    assert {each.block_tokens for each in requests} == {512}


@pytest.mark.parametrize("zipped", [False, True])
def test_csv_of_azure(tmp_path: Path, zipped: bool) -> None:
    first, second = read_trace(write(tmp_path, AZURE, zipped=zipped))
    assert (first.time, first.input_length, first.output_length) == (0.0, 4808, 10)
    assert second.time == pytest.approx(0.052)
    assert second.output_length == 1  # a request generates at least one token
    assert (first.block_hashes, second.block_hashes) == ((), ())


def test_lengths_blocks_and_times_are_scaled(tmp_path: Path) -> None:
    scale = TraceScale(lengths=parse_scale("1/8"), speed=0.05)
    first, _, last = read_trace(write(tmp_path, MOONCAKE), scale)
    assert first == TracedRequest(
        time=0.0, input_length=88, output_length=6, block_hashes=(7, 8), block_tokens=64
    )
    assert (last.time, last.input_length, last.output_length) == (50.0, 128, 1)


@pytest.mark.parametrize(
    ("times", "spread"),
    [
        ([3, 3, 3, 6, 6, 8], [0, 1, 2, 3, 4, 5]),  # the last one has the interval before it
        ([0, 3, 3], [0, 3, 4.5]),
        ([2, 2], [0, 0]),  # no other time
        ([4], [0]),
    ],
)
def test_requests_with_equal_times_are_spread(
    tmp_path: Path, times: list[float], spread: list[float]
) -> None:
    lines = [
        json.dumps({"timestamp": 1000 * time, "input_length": 1, "output_length": 1})
        for time in times
    ]
    path = write(tmp_path, "\n".join(lines))
    requests = read_trace(path, TraceScale(speed=0.5, spread=True))
    assert [each.time / 2 for each in requests] == pytest.approx(spread)
    assert [each.time for each in read_trace(path)] == [time - times[0] for time in times]


@given(st.integers(1, 100_000), st.sampled_from([512, 64, 16]), st.integers(0, 4))
def test_a_scaled_prompt_keeps_its_number_of_blocks(length: int, block: int, halvings: int) -> None:
    num_blocks = math.ceil(length / block)
    request = TracedRequest(
        time=0.0,
        input_length=length,
        output_length=1,
        block_hashes=tuple(range(num_blocks)),
        block_tokens=block,
    )
    scaled = TraceScale(lengths=Fraction(1, 2**halvings)).apply(request)
    assert scaled.block_tokens == block / 2**halvings
    assert math.ceil(scaled.input_length / scaled.block_tokens) == num_blocks


def test_a_block_size_of_its_own(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 33, "output_length": 1, "hash_ids": [1, 2, 3]}
    (request,) = read_trace(write(tmp_path, json.dumps(line | {"block_size": 16})))
    assert request.block_tokens == 16


GOOD = '{"timestamp": 0, "input_length": 1, "output_length": 1}\n'
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD + '{"timestamp": -1}', "trace:2: timestamp: must be greater than or equal"),
        (GOOD + "{", "trace:2: Invalid JSON"),
        (GOOD.replace("0", "NaN"), "trace:1: timestamp"),
        (GOOD.replace('"input_length": 1', '"input_length": 1.5'), "trace:1: input_length"),
        (
            GOOD.replace("}", ', "hash_ids": [1, 2]}'),
            "trace:1: has 2 hash_ids; 1 tokens are 1 blocks of 512",
        ),
        ("a,b\n", "trace:1: must be lines of JSON in Mooncake's form, or CSV with the columns"),
        ("", "trace: has no requests"),
        (HEADER + '2023-11-16,1,"' + 200_000 * "1", "trace:2: field larger than field limit"),
        (HEADER, "trace: has no requests"),
        (HEADER + "2023-11-16,1,1\nx,1,1\n", "trace:3: TIMESTAMP must be a date and time, got 'x'"),
        (HEADER + "2023-11-16,1\n", "trace:2: must have 3 columns, got 2"),
        (HEADER + "2023-11-16,1,-1\n", "trace:2: GeneratedTokens must be from 0 to 100000000"),
        (HEADER + "2023-11-16,0,1\n", "trace:2: ContextTokens must be at least 1, got 0"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_trace(write(tmp_path, text))
    assert words in str(caught.value)
    assert str(caught.value).startswith("--trace: ")


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="No such file"):
        read_trace(tmp_path / "absent")
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(MOONCAKE.encode())[:-9])
    with pytest.raises(InvalidArgument, match="not a whole gzip file"):
        read_trace(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgument, match="not UTF-8"):
        read_trace(path)


def test_a_byte_order_mark_is_no_part_of_a_trace(tmp_path: Path) -> None:
    path = write(tmp_path, "\ufeff" + HEADER + "2023-11-16,3,1\n")
    assert [each.input_length for each in read_trace(path)] == [3]


@pytest.mark.parametrize("text", ["", "x", "1/0", "0", "-1", "nan", "1e9"])
def test_scales_have_bounds(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--length-scale: must be"):
        parse_scale(text)


def test_a_block_has_whole_tokens(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="1/3 times a block of 512 tokens must be a whole"):
        read_trace(write(tmp_path, MOONCAKE), TraceScale(lengths=Fraction(1, 3)))
    assert read_trace(write(tmp_path, AZURE), TraceScale(lengths=Fraction(1, 3)))
