"""Tests the file of recorded requests, without servers.

test_metrics.py replays a file that a router has recorded.
"""

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.config import load_config
from tandem.cluster.serve.telemetry.trace_file import TraceRecorder, hash_ids
from tandem.cluster.traces.read import read_trace
from tandem.proto import inference_pb2
from tandem.proto.errors import InvalidArgument
from tandem.router.telemetry.requests import EndedRequest, RequestFacts

SALT = b"s" * 32


def ended(*prompt: int, output: int = 3, began: float = 1.7e9, **facts: Any) -> EndedRequest:
    return EndedRequest(
        facts=RequestFacts(
            request_id="r",
            arrived=0.0,
            began=began,
            num_prompt=len(prompt),
            num_choices=1,
            max_tokens=8,
            prompt=prompt,
            **facts,
        ),
        timeline=inference_pb2.Timeline(),
        num_generated=output,
        longest_choice=output,
        finish_reasons=("length",),
    )


def recorded(path: Path, *requests: EndedRequest, **options: Any) -> list[dict[str, Any]]:
    recorder = TraceRecorder(path, **{"salt": SALT} | options)
    for request in requests:
        recorder.record(request)
    recorder.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


Prompt = st.lists(st.integers(0, 2**31), max_size=40)


@given(Prompt.filter(bool), Prompt, Prompt, st.integers(1, 16))
def test_hashes_are_equal_as_far_as_prompts_are(
    common: list[int], one: list[int], other: list[int], block: int
) -> None:
    first, second = [*common, *one], [*common, *other]
    hashes = [hash_ids(prompt, block, SALT) for prompt in (first, second)]
    assert list(map(len, hashes)) == [-(-len(prompt) // block) for prompt in (first, second)]
    for index, pair in enumerate(zip(*hashes, strict=False)):
        begin, end = 0, block * (index + 1)
        assert (pair[0] == pair[1]) == (first[begin:end] == second[begin:end])
    assert set(hashes[0]).isdisjoint(hash_ids(first, block, b"another salt"))
    assert all(0 <= each < 2**53 for each in hashes[0])


def test_a_line_is_in_mooncakes_form(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    late, early = ended(*range(600), began=1.7e9 + 0.25), ended(*range(512), output=9)
    lines = recorded(path, late, early)
    assert [list(line) for line in lines] == [
        ["timestamp", "input_length", "output_length", "hash_ids"]
    ] * 2
    assert [line["timestamp"] for line in lines] == [1_700_000_000_250, 1_700_000_000_000]
    first, second = read_trace(path)
    assert (first.time, first.input_length, first.output_length) == (0.0, 512, 9)
    assert (second.time, second.input_length) == (0.25, 600)
    assert first.block_hashes == second.block_hashes[:1]
    assert path.stat().st_mode & 0o777 == 0o600


def test_blocks_of_another_size_and_tenants_are_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    request = ended(*range(20), tenant="ada")
    (line,) = recorded(path, request, block_tokens=16, has_tenants=True)
    assert (line["block_size"], line["tenant"], len(line["hash_ids"])) == (16, "ada", 2)
    assert read_trace(path)[0].block_tokens == 16


def test_prompts_of_separate_prefix_caches_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    salts = (b"", b"", b"tenant")
    lines = recorded(path, *(ended(1, 2, 3, prefix_salt=salt) for salt in salts))
    one, same, other = (line["hash_ids"] for line in lines)
    assert one == same != other
    (again,) = recorded(tmp_path / "other", ended(1, 2, 3), salt=b"t" * 32)
    assert again["hash_ids"] != one


def test_requests_without_tokens_and_resumed_ones_are_left_out(tmp_path: Path) -> None:
    assert recorded(tmp_path / "trace", ended(1, 2, output=0), ended()) == []


def test_routers_and_restarts_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    recorded(path, ended(1, began=2.0))
    assert len(recorded(path, ended(2, began=1.0))) == 2


def test_the_file_has_a_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace"
    lines = recorded(path, *(ended(*range(4)) for _ in range(100)), max_mb=0.001)
    assert 5 < len(lines) < 20
    assert path.stat().st_size <= 1_000
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "no more requests are recorded: it has reached router.trace_max_mb"
    ]


def test_a_slow_disk_blocks_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()
    line = TraceRecorder._line

    def slow_line(self: TraceRecorder, request: EndedRequest) -> bytes:
        assert goes_on.wait(60)
        return line(self, request)

    monkeypatch.setattr(TraceRecorder, "_line", slow_line)
    path = tmp_path / "trace"
    recorder = TraceRecorder(path, salt=SALT)
    for _ in range(2_000):
        recorder.record(ended(1))
    goes_on.set()
    recorder.close()
    assert 1_024 <= len(path.read_text().splitlines()) <= 1_025
    assert len(caplog.records) == 1
    assert "they end too fast" in caplog.text


def test_a_disk_that_fails_ends_the_record_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        recorder = TraceRecorder(Path("/dev/full"), salt=SALT)
        for _ in range(3):
            recorder.record(ended(1))
        recorder.close()
    assert [record.getMessage() for record in caplog.records] == [
        "/dev/full: no more requests are recorded: No space left on device"
    ]


def test_the_configuration_is_checked(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"router\.trace_file: /.*: Is a directory"):
        TraceRecorder(tmp_path, salt=SALT)
    with pytest.raises(InvalidArgument, match=r"router\.trace_salt: .* at least 16 characters"):
        load_config(None, {"model": "m", "router.trace_salt": "short"})
