"""Ranks that are processes, over gloo: the same tokens, and no wait without end when one is lost."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.tests.tiny import make_tiny_model
from tandem.tests.workers.model.helpers import Driver, load, mixed_steps, prompt

RANK = """
import json, sys, time
from pathlib import Path
from tandem.tests.workers.model.helpers import Driver, mixed_steps, prompt
from tandem.workers.group import ProcessGroup
from tandem.workers.model.runner import ModelRunner
folder, port, rank, size = sys.argv[1], *map(int, sys.argv[2:5])
group = ProcessGroup(host="127.0.0.1", port=port, rank=rank, size=size, timeout=5)
runner = ModelRunner.load(Path(folder), dtype=sys.argv[5], device="cpu", num_blocks=128, block_size=16, group=group)
print(json.dumps([mixed_steps(runner), Driver(runner).generate(9, prompt(70, 2), 24)]), flush=True)
sys.stdin.readline()
began = time.monotonic()
try:
    Driver(runner).generate(10, prompt(20), 4)
except RuntimeError:
    print(time.monotonic() - began, flush=True)
"""


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def start(folder: Path, size: int, dtype: str = "float32") -> list[subprocess.Popen[str]]:
    port, environment = free_port(), os.environ | {"OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), str(port), str(rank), str(size), dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(size)
    ]


def said(process: subprocess.Popen[str]) -> object:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_agree_and_notice_a_lost_or_silent_one(tmp_path: Path, how: signal.Signals) -> None:
    folder = make_tiny_model(tmp_path, num_attention_heads=8, num_key_value_heads=2)
    whole = load(folder)
    expected = [mixed_steps(whole), Driver(whole).generate(9, prompt(70, 2), 24)]
    ranks = start(folder, 2)
    try:
        assert [said(rank) for rank in ranks] == [expected] * 2
        ranks[1].send_signal(how)
        began = time.monotonic()
        print(file=ranks[0].stdin, flush=True)
        waited = said(ranks[0])
        assert isinstance(waited, float)
        assert waited < (1 if how is signal.SIGKILL else 7)
        assert time.monotonic() - began < 10
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
