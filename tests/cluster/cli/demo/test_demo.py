"""Tests `tandem demo --kill` with a tiny model, as a user runs it: without a terminal."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from tandem.tests.soak.nemesis import MODEL
from tandem.tests.tiny import make_tiny_model

TANDEM = [sys.executable, "-c", "from tandem.cluster.cli.main import main; main()"]
DEADLINE = 240  # seconds, on however busy a machine
OURS = ("RAY_ADDRESS", "RAY_AUTH_MODE")  # what a user's environment does not have
KILL = re.compile(r"kill -9 \d+: (.+); streams cut: (\d+) of (\d+)$", re.MULTILINE)


def processes_with(marker: str) -> list[int]:
    """Returns the processes whose environment has a variable, as those of its Ray inherit it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if marker in process.environ():
                found.append(process.pid)
    return found


def test_no_stream_is_lost_or_altered(tmp_path: Path) -> None:
    # In bfloat16 its logits are the same bits in any batch.
    folder = make_tiny_model(tmp_path / "tiny", dtype="bfloat16", **MODEL)
    marker = f"TANDEM_TEST_{os.getpid()}"
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    command = [*TANDEM, "demo", "--kill", "--model", str(folder), "--tokens", "150"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {marker: ""},
    ) as process:
        try:
            out, error = process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # so that it ends its Ray
            raise
    assert (process.returncode, error) == (0, ""), out + error
    assert processes_with(marker) == []
    killed = KILL.findall(out)
    assert [title for title, _, _ in killed] == [
        "decode worker",
        "prefill worker",
        "router",
        "Serve controller",
    ]
    assert int(killed[0][1]) > 0, out  # the decode worker had streams
    assert int(killed[2][1]) > 0, out  # and so had the router
    for line in (
        "streams lost: 0",
        "streams altered: 0",
        "KV blocks that workers still hold: 0",
        "tokens that differ from an undisturbed run: 0",
    ):
        assert f"\n{line}\n" in out, out
