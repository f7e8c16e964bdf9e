"""The benchmark of speculative decoding runs, and both engines generate the same tokens."""

import re
from pathlib import Path

import pytest

from tandem.tests.bench.engine import speculative
from tandem.tests.tiny import make_tiny_model


@pytest.mark.parametrize("draft", [False, True])
def test_both_texts_are_generated_by_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], draft: bool
) -> None:
    make_tiny_model(tmp_path, hidden_size=256, head_dim=32)
    arguments = ["--draft", str(tmp_path)] if draft else []
    assert (
        speculative.main(["--model", str(tmp_path), "--tokens", "30", "--rounds", "2", *arguments])
        == 0
    )
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "one sequence, 30 tokens, 2 rounds in turns, medians"
    figures = (
        r" +[0-9.]+ +[0-9.]+ tokens/s, ratio [0-9.]+, "
        r"[0-9]+% of [0-9]+ drafted tokens accepted, same tokens"
    )
    assert all(
        re.fullmatch(name + figures, line)
        for name, line in zip(speculative.TEXTS, said[1:], strict=True)
    )


def test_a_folder_without_a_model_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert speculative.main(["--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "bench_speculative: config.json: not found\n"
