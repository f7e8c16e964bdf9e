"""Tests ranks in processes over gloo: the same tokens, and no endless wait for a lost rank."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.tests.tiny import make_tiny_model
from tandem.tests.waits import NEVER, WAIT, line_of
from tandem.tests.workers.model.helpers import Driver, load, mixed_steps, prompt
from tandem.workers.engine.plan import (
    PENDING_TOKEN,
    CpuShare,
    DelegatingExecutor,
    Executor,
    SamplingParams,
    SequenceStep,
    StatePlan,
    StepPlan,
    Watermark,
)
from tandem.workers.kv_cache.tables import TableBlocks
from tandem.workers.serve.watchdog import WatchedExecutor
from tandem.workers.tp.draft_model import DraftingExecutor
from tandem.workers.tp.nice_executor import NiceExecutor
from tandem.workers.tp.process_group import TpExecutor, TpGroup, decode_plan, encode_plan
from tandem.workers.transfer.backend import join_store

T = TypeVar("T")

RANK = """
import json, sys, time
from pathlib import Path
from typing import Any, TypeVar
from tandem.tests.workers.model.helpers import Driver, mixed_steps, prompt
from tandem.workers.tp.process_group import TpGroup
from tandem.workers.model.loader import open_checkpoint
from tandem.workers.model.runner import ModelRunner
folder, dtype, size, rank = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
where = {"host": "127.0.0.1", "size": size, "device": "cpu", "timeout": float(sys.argv[5])}
where["start_timeout"] = 120
if rank:
    group = TpGroup.join(sys.stdin.readline().strip(), rank=rank, **where)
else:
    group = TpGroup.listen(**where)
    print(json.dumps(group.address), flush=True)
checkpoint = open_checkpoint(Path(folder))
runner = ModelRunner.load(
    checkpoint, dtype=dtype, device="cpu", num_blocks=128, block_size=16, group=group
)
group.connect()
print(json.dumps([mixed_steps(runner), Driver(runner).generate(9, prompt(70, 2), 24)]), flush=True)
sys.stdin.readline()
began = time.monotonic()
try:
    Driver(runner).generate(10, prompt(20), 4)
except RuntimeError:
    print(time.monotonic() - began, flush=True)
"""


def start(
    folder: Path, size: int, timeout: float, dtype: str = "float32"
) -> list[subprocess.Popen[str]]:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), dtype, str(size), str(rank), str(timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]
    address = said(ranks[0])
    for rank in ranks[1:]:
        print(address, file=rank.stdin, flush=True)
    return ranks


def said(process: subprocess.Popen[str]) -> object:
    return json.loads(line_of(process))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_agree_and_notice_a_lost_or_silent_one(tmp_path: Path, how: signal.Signals) -> None:
    folder = make_tiny_model(tmp_path, num_attention_heads=8, num_key_value_heads=2)
    whole = load(folder)
    expected = [mixed_steps(whole), Driver(whole).generate(9, prompt(70, 2), 24)]
    timeout = NEVER if how is signal.SIGKILL else 10.0  # the loss ends the wait before
    ranks = start(folder, 2, timeout)
    try:
        assert [said(rank) for rank in ranks] == [expected] * 2
        ranks[1].send_signal(how)
        print(file=ranks[0].stdin, flush=True)
        assert isinstance(said(ranks[0]), float)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate(timeout=WAIT)


IDS = st.integers(0, 2**20)
TOKENS = st.lists(IDS, max_size=5).map(tuple)
COUNTS = st.none() | st.integers(0, 20)
WATERMARK_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "key": st.binary(min_size=16, max_size=16),
    "gamma": st.floats(0.01, 0.99),
    "delta": st.floats(0.1, 20),
    "context_width": st.integers(1, 8),
}
SAMPLING_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2),
    "top_k": IDS,
    "top_p": st.floats(0.01, 1),
    "min_p": st.floats(0, 1),
    "typical_p": st.floats(0.01, 1),
    "seed": st.integers(0, 2**64 - 1),
    "repetition_penalty": st.floats(0.01, 10),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.lists(st.tuples(IDS, st.floats(-100, 100)), max_size=5).map(tuple),
    "bad_words": st.lists(TOKENS, max_size=5).map(tuple),
    "watermark": st.none() | st.builds(Watermark, **WATERMARK_FIELDS),
    "stop_ids": TOKENS,
    "min_length": IDS,
    "grammar": st.text(max_size=20),
    "grammar_owner": st.binary(max_size=32),
    "logprobs": COUNTS,
    "prompt_logprobs": COUNTS,
    "processed_logprobs": st.booleans(),
    "pooling": st.sampled_from([None, "last", "mean"]),
}
STEP_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "sequence_id": st.integers(0, 2**63 - 1),
    "token_ids": st.lists(st.integers(PENDING_TOKEN, 2**20), min_size=1).map(tuple),
    "start": IDS,
    "new_blocks": st.lists(st.builds(TableBlocks, TOKENS, IDS), max_size=3).map(tuple),
    "num_samples": st.integers(0, 3),
    "state": st.none() | st.builds(StatePlan, COUNTS, st.lists(st.tuples(IDS, IDS)).map(tuple)),
    "num_draft": st.integers(0, 3),
    "adapter": IDS,
    "next_prompt_token": st.none() | IDS,
}
KNOWN = st.fixed_dictionaries(STEP_FIELDS | {"sampling": st.none()})
FIRST = STEP_FIELDS | {
    "history": TOKENS,
    "num_prompt": IDS,
}  # what is said of a sequence in its first step only
NEW = st.fixed_dictionaries(
    FIRST | {"sampling": st.fixed_dictionaries(SAMPLING_FIELDS).map(lambda s: SamplingParams(**s))}
)
PLAN_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "sequences": st.lists((KNOWN | NEW).map(lambda step: SequenceStep(**step)), max_size=5).map(
        tuple
    ),
    "dropped": st.lists(st.integers(0, 2**63 - 1)).map(tuple),
    "copies": st.lists(st.tuples(IDS, IDS)).map(tuple),
    "saved": st.lists(st.tuples(IDS, IDS)).map(tuple),
    "loaded": st.lists(st.tuples(IDS, IDS)).map(tuple),
    "saved_states": st.lists(st.tuples(IDS, IDS)).map(tuple),
    "loaded_states": st.lists(st.tuples(IDS, IDS)).map(tuple),
    "unloaded": st.lists(IDS).map(tuple),
    "is_expedited": st.booleans(),
    "share": st.none() | st.builds(CpuShare, IDS, IDS),
}
PLANS = st.fixed_dictionaries(PLAN_FIELDS).map(lambda plan: StepPlan(**plan))


def test_the_plans_under_test_set_every_field() -> None:
    assert {field.name for field in fields(SamplingParams)} == set(SAMPLING_FIELDS)
    assert {field.name for field in fields(Watermark)} == set(WATERMARK_FIELDS)
    assert {field.name for field in fields(SequenceStep)} == {
        *STEP_FIELDS,
        "sampling",
        "history",
        "num_prompt",
    }
    assert {field.name for field in fields(StepPlan)} == set(PLAN_FIELDS)


@given(PLANS)
def test_a_plan_comes_as_it_was_sent(plan: StepPlan) -> None:
    assert decode_plan(encode_plan(plan)) == plan


WHERE: dict[str, Any] = {
    "host": "127.0.0.1",
    "size": 2,
    "device": "cpu",
    "timeout": WAIT,
    "start_timeout": WAIT,
}


def on_ranks(*works: Callable[[TpGroup], T]) -> tuple[T, ...]:
    """Runs each function on a rank of one group."""
    where = WHERE | {"size": len(works)}
    first = TpGroup.listen(**where)

    def other(rank: int) -> T:
        group = TpGroup.join(first.address, rank=rank, **where)
        group.connect()
        return works[rank](group)

    with ThreadPoolExecutor(len(works)) as threads:
        results = [threads.submit(other, rank) for rank in range(1, len(works))]
        first.connect()
        return works[0](first), *(result.result(WAIT) for result in results)


def test_messages_of_any_length_come_whole() -> None:
    messages = (
        [bytes(range(256)) * n for n in (1, 15, 16, 17, 400)]
        + [b"x" * n for n in (4091, 4092, 4093)]
        + [b""]
    )

    def send(group: TpGroup) -> list[bytes]:
        for message in messages:
            group.broadcast_message(message)
        return messages

    sent, received = on_ranks(send, lambda group: [group.receive_message() for _ in messages])
    assert sent == received


def test_a_tensor_of_rank_0_is_broadcast_in_place() -> None:
    def broadcast(group: TpGroup) -> list[int]:
        tokens = torch.arange(5) + 100 * group.rank  # [5]
        assert group.broadcast(tokens) is tokens
        return tokens.tolist()

    assert on_ranks(broadcast, broadcast) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_sum_of_a_row_does_not_depend_on_the_rows_beside_it(size: int) -> None:
    terms = torch.randn(size, 7, 576).bfloat16()  # [ranks, rows, dim]

    def reduce(group: TpGroup) -> tuple[torch.Tensor, list[torch.Tensor]]:
        own = terms[group.rank]
        return group.all_reduce(own.clone()), [group.all_reduce(row.clone()) for row in own]

    for together, alone in on_ranks(*[reduce] * size):
        assert torch.equal(together, torch.stack(alone))
        assert torch.allclose(together.float(), terms.float().sum(0), rtol=0.01, atol=0.05)


def test_a_blocking_abort_does_not_block_the_caller() -> None:
    """NCCL's abort may spin for as long as CUDA graphs refer to its communicator."""
    release, aborted, ended = threading.Event(), threading.Event(), threading.Event()

    class Nccl:
        def abort(self) -> None:
            aborted.set()
            release.wait(WAIT)
            ended.set()

    group = TpGroup.listen(**WHERE)
    group._tensors = Nccl()
    group.abort()
    assert not ended.is_set()
    assert aborted.wait(WAIT)
    release.set()


def test_gloo_needs_no_abort() -> None:
    TpGroup.listen(**WHERE).abort()


def test_a_stranger_in_the_place_of_a_rank_gets_nothing() -> None:
    """A stranger at the store's port can join the group, but does not know the address's secret."""
    first = TpGroup.listen(**WHERE)
    place = first.address.partition("/")[0]

    def intrude() -> str:
        stranger = TpGroup.join(f"{place}/{'0' * 64}", rank=1, **WHERE)
        with pytest.raises(RuntimeError) as refused:
            stranger.connect()
        return str(refused.value)

    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(intrude)
        with pytest.raises(RuntimeError, match=r"^a rank does not know the group's secret$"):
            first.connect()
        assert "secret" in result.result(WAIT)


def test_a_stranger_at_the_ports_of_a_running_group_changes_nothing() -> None:
    """The stranger sends noise to the ports of the store and of gloo, and rewrites the store."""
    before = listening()

    def gather(group: TpGroup) -> list[list[int]]:
        group.receive_message() if group.rank else group.broadcast_message(b"begin")
        if group.rank == 0:
            place, _, _ = group.address.partition("/")
            intrude(place, listening() - before | {int(place.rpartition(":")[2])})
        return [part.tolist() for part in group.all_gather(torch.full((3,), group.rank))]

    assert on_ranks(gather, gather) == ([[0] * 3, [1] * 3],) * 2


def listening() -> set[int]:
    """Returns the loopback ports at which this process listens."""
    found = psutil.Process().net_connections("tcp4")
    return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}


def intrude(store: str, ports: set[int]) -> None:
    assert len(ports) >= 2, "the store's and gloo's"
    for port in ports:
        for noise in (b"", b"\xff" * 1_000, b"\0" * 1_000, b"GET / HTTP/1.1\r\n\r\n"):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 10) as connection:
                connection.sendall(noise)
    host, _, port_text = store.rpartition(":")
    client: Any = join_store(host, int(port_text), 10)
    for key in client.list_keys():
        client.delete_key(key)
        client.set(key, "noise")


def test_a_delegating_executor_passes_on_all_calls() -> None:
    """A missing call would do nothing, because the calls of Executor have defaults."""
    calls = {name for name in vars(Executor) if not name.startswith("_")} - {
        "execute"
    }  # which calls launch
    assert calls == {"launch", "prepare_masks", "propose", "expedite"}
    assert calls <= vars(DelegatingExecutor).keys()
    for wrapper in (WatchedExecutor, TpExecutor, NiceExecutor, DraftingExecutor):
        assert issubclass(wrapper, DelegatingExecutor)
