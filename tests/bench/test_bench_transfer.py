"""The commands that measure transfers run and report the requested transports."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.tests.bench.engine import overlap, transfer
from tandem.tests.tiny import make_tiny_model


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """Restores the number of threads, because the commands run in the process of the tests."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "options",
    [["--transports", "grpc", "shared", "gloo"], ["--peer-tls", "--transports", "grpc"]],
    ids=" ".join,
)
def test_every_transport_is_measured(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert transfer.main(["--sizes", "1", "--repeat", "1", *options]) == 0
    names = set(options) & {"grpc", "shared", "gloo"}
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rates = {words[1]: float(words[3]) for words in lines if len(words) > 3 and words[1] in names}
    assert rates.keys() == names
    assert all(rate > 0 for rate in rates.values())


def test_the_overlap_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(make_tiny_model(tmp_path))
    assert overlap.main(["--model", folder, "--prompt-tokens", "300", "--repeat", "1"]) == 0
    out = capsys.readouterr().out
    assert "300 prompt tokens, 0.1 MB of KV cache over grpc" in out
    assert "remaining share" in out


def test_a_folder_without_a_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert overlap.main(["--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "bench_overlap: config.json: not found\n"
