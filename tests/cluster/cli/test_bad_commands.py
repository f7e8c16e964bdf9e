"""Commands with what they cannot mean: exit code 2, the reason on stderr, no traceback; no service is asked."""

import itertools
import re
import sys
from pathlib import Path

import pytest

from tandem.cluster.cli.main import main

BAD_NUMBERS = ("-5", "x", "nan", "9" * 40, "")
OPTIONS = (
    *("--max-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--typical-p", "--repetition-penalty"),
    *("--presence-penalty", "--frequency-penalty", "--seed", "--n", "--best-of", "--beam-width", "--length-penalty"),
    *("--min-tokens", "--stop-token-id", "--logprobs", "--prompt-logprobs", "--priority", "--timeout"),
)
COMMANDS: list[list[str]] = [
    *(
        [command, *rest]
        for command in ("nothing", "--nothing", "serve --nothing", "model nothing")
        for rest in ([], ["x"])
    ),
    *(
        ["serve", "m", option, value]
        for option in ("--prefill", "--decode", "--tp", "--routers")
        for value in BAD_NUMBERS
    ),
    *(["serve", model] for model in ("", "a b", "\x7f", "x" * 5_000, "no-such-model", "./no/such/folder", "/dev/null")),
    *(["check-config", path] for path in ("", "no-such-file", "/", "x" * 5_000)),
    *(["model", "get", name] for name in ("", "../x", "nothing", "x" * 5_000)),
    *(["plan", "memory", model] for model in ("", "no-such-model", "/dev/null", "./nothing")),
    *(["plan", "memory", "m", "--tp", value] for value in BAD_NUMBERS),
    *(["drain"], ["drain", "all", "--timeout", "x"], ["drain", "all", "--timeout", "-1"], ["status", "--nothing"]),
    *(["bench", "--concurrency", value] for value in BAD_NUMBERS),
]


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize("arguments", COMMANDS, ids=range(len(COMMANDS)))
def test_a_command_that_means_nothing(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code = run([part for word in arguments[:1] for part in word.split()] + arguments[1:], monkeypatch)
    captured = capsys.readouterr()
    assert code == 2, captured
    assert captured.err
    assert not re.search(r"Traceback|File \"", captured.err)


@pytest.mark.parametrize(("option", "value"), list(itertools.product(OPTIONS, ("x", ""))))
def test_an_option_that_is_no_number(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "hi", option, value], monkeypatch) == 2
    assert "Traceback" not in capsys.readouterr().err
