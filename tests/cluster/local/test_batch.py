"""`tandem batch`: its files, and what is asked again. No process, no service: both are in
test_batch_runs.py.
"""

import asyncio
import errno
import json
import os
import re
import socket
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.local import batch, batch_senders
from tandem.cluster.local.batch import (
    BatchAnswer,
    BatchOutput,
    answer_requests,
    read_requests,
)
from tandem.proto.errors import InvalidArgument, Unavailable
from tandem.router.api.batches.lines import BatchRequest
from tandem.router.client import ClientTls
from tandem.tests.damaged import NUM_INPUTS, damaged


def line(custom_id: object = "a", **changes: Any) -> str:
    whole = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "x"},
    }
    return json.dumps(whole | changes)


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{each}\n" for each in lines))
    return path


@pytest.mark.parametrize(
    ("lines", "number", "words"),
    [
        (["{"], 1, "Invalid JSON"),
        ([line(), "", line()], 3, "custom_id: 'a' is already in line 1"),
        ([line(), line("b", method="GET")], 2, "method: "),
        ([line(url="/v1/tokenize")], 1, "url: "),
        ([line(body="x")], 1, "body: "),
        ([line(custom_id="")], 1, "custom_id: "),
        ([line(custom_id=3)], 1, "custom_id: "),
        ([line(more=1)], 1, "more: "),
        ([line(body={"stream": True})], 1, "body.stream: "),
        (['{"custom_id": "a"}'], 1, "method: "),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, lines: list[str], number: int, words: str) -> None:
    path = write(tmp_path / "in.jsonl", *lines)
    with pytest.raises(InvalidArgument, match=words.replace("(", ".")) as caught:
        read_requests(path)
    assert caught.value.field == f"{path}:{number}"


def test_five_hundred_damaged_files_are_refused_or_read(tmp_path: Path) -> None:
    """Requests, and answers of an earlier run; a file that is refused stays as it is."""
    answer = {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": {"status_code": 200, "body": {}},
        "error": None,
    }
    files = {name: tmp_path / name for name in ("in.jsonl", "out.jsonl")}
    seeds = {"in.jsonl": f"{line()}\n{line('b')}\n", "out.jsonl": f"{json.dumps(answer)}\n"}
    for name, path in files.items():
        reasons = []
        for data in damaged([seeds[name].encode()]):
            path.write_bytes(data)
            try:
                if name == "in.jsonl":
                    assert {each.url for each in read_requests(path)} == {"/v1/completions"}
                else:
                    with BatchOutput(path, ["a", "b"]):
                        pass
            except InvalidArgument as error:
                reasons.append(error.message)
                assert path.read_bytes() == data
        assert NUM_INPUTS // 3 < len(reasons) <= NUM_INPUTS
        assert not re.search(r"Traceback|\.py\b|0x[0-9a-f]{6}", "".join(reasons))


def test_an_empty_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="has no lines"):
        read_requests(write(tmp_path / "in.jsonl"))


def test_a_line_may_hold_every_other_separator(tmp_path: Path) -> None:
    text = json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False)
    path = tmp_path / "in.jsonl"
    path.write_text(line().replace('{"prompt": "x"}', text) + "\r\n", newline="")
    assert read_requests(path)[0].body == {"prompt": "a\u2028b\x85c"}


def requests(*ids: str) -> list[BatchRequest]:
    return [BatchRequest.model_validate_json(line(each)) for each in ids]


async def echo(request: BatchRequest) -> BatchAnswer:
    return BatchAnswer(status=200, body={"of": request.custom_id}, request_id="r")


async def run(
    path: Path,
    wanted: Sequence[BatchRequest],
    send: batch.SendRequest = echo,
    patience: float = 0.0,
) -> Any:
    with BatchOutput(path, [each.custom_id for each in wanted]) as output:
        return await answer_requests(wanted, output, send, concurrency=3, patience_seconds=patience)


async def test_each_request_has_one_line(tmp_path: Path) -> None:
    path, wanted = tmp_path / "out.jsonl", requests(*map(str, range(10)))
    counts = await run(path, wanted)
    assert (counts.total, counts.skipped, counts.answered, counts.failed) == (10, 0, 10, 0)
    lines = [json.loads(each) for each in path.read_text().splitlines()]
    assert sorted(int(each["custom_id"]) for each in lines) == list(range(10))
    assert len({each["id"] for each in lines}) == 10
    assert lines[0]["response"] == {
        "status_code": 200,
        "request_id": "r",
        "body": {"of": lines[0]["custom_id"]},
    }
    assert lines[0]["error"] is None
    assert (await run(path, wanted)).skipped == 10
    assert len(path.read_text().splitlines()) == 10


@given(cut=st.floats(0, 1), num_lines=st.integers(1, 6))
def test_a_run_that_was_cut_at_any_byte_is_completed(
    tmp_path_factory: pytest.TempPathFactory, cut: float, num_lines: int
) -> None:
    path, wanted = (
        tmp_path_factory.mktemp("cut") / "out.jsonl",
        requests(*map(str, range(num_lines))),
    )
    asyncio.run(run(path, wanted))
    whole = path.read_bytes()
    left = whole[: round(cut * len(whole))]
    path.write_bytes(left)
    counts = asyncio.run(run(path, wanted))
    assert counts.skipped == left.count(b"\n")
    answered = [json.loads(each)["custom_id"] for each in path.read_text().splitlines()]
    assert sorted(answered) == sorted(each.custom_id for each in wanted)
    assert path.read_bytes().startswith(left[: left.rfind(b"\n") + 1])


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([line("a")], "response: "),
        (['{"custom_id": "z", "response": {}, "error": null}'], "'z' is not in the input"),
        (['{"custom_id": "a", "response": {}, "error": null}'] * 2, "'a' has two answers"),
        (["no json"], "Invalid JSON"),
    ],
)
def test_a_file_of_something_else_is_left_as_it_is(
    tmp_path: Path, lines: list[str], words: str
) -> None:
    path = write(tmp_path / "out.jsonl", *lines)
    with path.open("a") as file:
        file.write('{"cut')
    before = path.read_bytes()
    with pytest.raises(InvalidArgument, match=words):
        BatchOutput(path, ["a"])
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", [line("a"), "notes", '{"id": "7"}', "\n{}"])
def test_a_line_without_an_end_that_is_no_answer_is_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match="the last line is not an answer"):
        BatchOutput(path, ["a"])
    assert path.read_text() == text


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with (
        BatchOutput(path, ["a"]),
        pytest.raises(InvalidArgument, match="written by another process"),
    ):
        BatchOutput(path, ["a"])
    with BatchOutput(path, ["a"]):  # which the first has given back
        pass


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be written: Is a directory"):
        BatchOutput(tmp_path, ["a"])


@pytest.mark.timeout(60)
def test_the_output_may_be_a_pipe() -> None:
    """As of `tandem batch INPUT /dev/stdout | ...`."""
    reader, writer = os.pipe()
    counts = asyncio.run(run(Path(f"/dev/fd/{writer}"), requests("a", "b")))
    os.close(writer)
    with open(reader) as file:
        found = sorted(json.loads(each)["custom_id"] for each in file)
    assert (counts.skipped, found) == (0, ["a", "b"])


@pytest.mark.timeout(60)
async def test_a_pipe_whose_reader_has_ended_ends_the_run() -> None:
    reader, writer = os.pipe()

    async def answer(request: BatchRequest) -> BatchAnswer:
        os.close(reader)
        return await echo(request)

    with pytest.raises(InvalidArgument, match="cannot be written: Broken pipe"):
        await run(Path(f"/dev/fd/{writer}"), requests("a"), answer)
    os.close(writer)


@pytest.mark.parametrize(
    ("number", "is_refused"),
    [
        (errno.EINVAL, False),
        (errno.EROFS, False),
        (errno.EIO, True),
        (errno.ENOSPC, True),
        (errno.EDQUOT, True),
    ],
)
def test_answers_that_did_not_reach_the_disk_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_refused: bool
) -> None:
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    expected = (
        pytest.raises(InvalidArgument, match=r"out\.jsonl cannot be written: ")
        if is_refused
        else nullcontext()
    )
    with expected, BatchOutput(tmp_path / "out.jsonl", ["a"]):
        pass


def test_a_failed_sync_hides_no_other_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(KeyError), BatchOutput(tmp_path / "out.jsonl", ["a"]):
        raise KeyError


async def test_a_refused_request_has_its_refusal_as_answer(tmp_path: Path) -> None:
    async def refuse(request: BatchRequest) -> BatchAnswer:
        return BatchAnswer(status=400, body={"error": {"message": "no"}})

    counts = await run(tmp_path / "out.jsonl", requests("a", "b"), refuse)
    assert (counts.answered, counts.failed) == (2, 2)
    assert (
        json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])["response"]["status_code"]
        == 400
    )


async def test_a_busy_service_is_asked_again(tmp_path: Path) -> None:
    tries: list[str] = []

    async def busy(request: BatchRequest) -> BatchAnswer:
        tries.append(request.custom_id)
        if tries.count(request.custom_id) == 1:
            raise Unavailable("nobody answers", 0.0)
        if tries.count(request.custom_id) == 2:
            return BatchAnswer(status=429, body={}, retry_after=0.0)
        return await echo(request)

    counts = await run(tmp_path / "out.jsonl", requests("a", "b"), busy, patience=60.0)
    assert (counts.answered, counts.failed, sorted(tries)) == (2, 0, ["a"] * 3 + ["b"] * 3)


async def test_a_service_that_stays_away_ends_the_run_and_keeps_what_is_answered(
    tmp_path: Path,
) -> None:
    async def half(request: BatchRequest) -> BatchAnswer:
        if request.custom_id == "b":
            raise Unavailable("nobody answers at URL", 1.0)
        return await echo(request)

    path, wanted = tmp_path / "out.jsonl", requests("a", "b")
    with pytest.raises(Unavailable, match="nobody answers at URL; the answers so far are kept"):
        await run(path, wanted, half)
    assert [json.loads(each)["custom_id"] for each in path.read_text().splitlines()] == ["a"]
    assert (await run(path, wanted)).skipped == 1


async def test_patience_begins_at_the_first_failure(tmp_path: Path) -> None:
    patience, tries = 0.05, []

    async def lost_once(request: BatchRequest) -> BatchAnswer:
        tries.append(request.custom_id)
        if len(tries) > 1:
            return await echo(request)
        until = time.monotonic() + 2 * patience
        while time.monotonic() < until:
            await asyncio.sleep(patience)
        raise Unavailable("the connection is lost", 0.0)

    counts = await run(tmp_path / "out.jsonl", requests("a"), lost_once, patience=patience)
    assert (counts.answered, len(tries)) == (1, 2)


@pytest.mark.parametrize("url", ["", "nothing", "ftp://127.0.0.1", "http://"])
async def test_a_wrong_url_is_refused_at_once(url: str) -> None:
    async with batch_senders.service_sender(url, "", ClientTls()) as send:
        with pytest.raises(InvalidArgument, match=r"--url: must be http\(s\)://HOST:PORT"):
            await send(requests("a")[0])


async def test_a_connection_whose_other_machine_is_gone_fails() -> None:
    address = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 0))
    with batch_senders._open_socket(address) as opened:
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, interval, count, sent = (
            opened.getsockopt(socket.IPPROTO_TCP, option)
            for option in (
                socket.TCP_KEEPIDLE,
                socket.TCP_KEEPINTVL,
                socket.TCP_KEEPCNT,
                socket.TCP_USER_TIMEOUT,
            )
        )
    assert (idle + interval * count, sent) == (60, 60_000)
