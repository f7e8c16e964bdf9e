"""The commands that measure transfers run and tell what they were asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

from tandem.tests.tiny import make_tiny_model


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("options", [[], ["--peer-tls"]])
def test_every_transport_is_measured(options: list[str]) -> None:
    names = ["grpc", "shared", "gloo"]
    done = run("tandem.workers.bench.transfer", "--sizes", "1", "--repeat", "1", *options, "--transports", *names)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    rates = {words[1]: float(words[3]) for words in lines if len(words) > 3 and words[1] in names}
    assert rates.keys() == set(names)
    assert all(rate > 0 for rate in rates.values())


def test_the_overlap_is_measured(tmp_path: Path) -> None:
    folder = str(make_tiny_model(tmp_path))
    done = run("tandem.workers.bench.overlap", "--model", folder, "--prompt-tokens", "300", "--repeat", "1")
    assert done.returncode == 0, done.stderr
    assert "300 prompt tokens, 0.1 MB of KV cache over grpc" in done.stdout
    assert "share that is left" in done.stdout


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    done = run("tandem.workers.bench.overlap", "--model", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == "bench_overlap: config.json: cannot be read (No such file or directory)\n"
