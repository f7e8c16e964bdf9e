"""Commands with what they cannot mean: exit code 2, the reason on stderr, no traceback; no service
is asked.
"""

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tandem.cluster.cli.main import app, main
from tandem.cluster.text_files import check_writable
from tandem.proto.errors import InvalidArgument

BAD_NUMBERS = ("-5", "x", "nan", "9" * 40, "")
NUMBER = re.compile(r"\b(int|float)\b")
NO_NUMBERS = ("x", "", "1,5", "1e", "0x1g")
OPTIONS = (
    "--max-tokens",
    "--temperature",
    "--top-k",
    "--top-p",
    "--min-p",
    "--typical-p",
    "--repetition-penalty",
    "--presence-penalty",
    "--frequency-penalty",
    "--seed",
    "--n",
    "--best-of",
    "--beam-width",
    "--length-penalty",
    "--min-tokens",
    "--stop-token-id",
    "--logprobs",
    "--prompt-logprobs",
    "--priority",
    "--timeout",
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
    *(
        ["serve", model]
        for model in (
            "",
            "a b",
            "\x7f",
            "x" * 5_000,
            "no-such-model",
            "./no/such/folder",
            "/dev/null",
        )
    ),
    *(["check-config", path] for path in ("", "no-such-file", "/", "x" * 5_000)),
    *(["model", "get", name] for name in ("", "../x", "nothing", "x" * 5_000)),
    *(["plan", "memory", model] for model in ("", "no-such-model", "/dev/null", "./nothing")),
    *(["plan", "memory", "m", "--tp", value] for value in BAD_NUMBERS),
    *(["plan", "cost", model] for model in ("", "no-such-model", "/dev/null", "./nothing")),
    *(["plan", "cost", "m", "--prompt", value] for value in BAD_NUMBERS),
    ["drain"],
    ["drain", "all", "--timeout", "x"],
    *(
        [command, *arguments, "--timeout", value]
        for command, *arguments in (["drain", "all"], ["role", "w", "decode"])
        for value in ("-1", "inf", "86401")
    ),
    ["role", "w", "both"],
    ["status", "--nothing"],
    *(["bench", "--concurrency", value] for value in BAD_NUMBERS),
    *(
        [command, "--url", url]
        for command in ("status", "dashboard", "drain all")
        for url in (
            "",
            "garbage",
            "ftp://x/",
            "file:///etc/passwd",
            "http://",
            "http://[::1/",
            "http://x:99999/t",
        )
    ),
]


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize("arguments", COMMANDS, ids=range(len(COMMANDS)))
def test_a_command_that_means_nothing(
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    code = run(
        [part for word in arguments[:1] for part in word.split()] + arguments[1:], monkeypatch
    )
    captured = capsys.readouterr()
    assert code == 2, captured
    assert captured.err
    assert not re.search(r"Traceback|File \"", captured.err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "--url", "http://h:1", "--rate", "1", "--json"],
        ["explain", "A prompt", "--html"],
        ["eval", "generate", "cases.jsonl", "--output"],
        ["plan", "measure", "m", "--out"],
        *(
            ["plan", "service", "m", "--slo", "ttft=1s", "--rate", "1", "--measure", "60s", option]
            for option in ("--json", "--plot", "--write")
        ),
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "/no/folder/file"], monkeypatch) == 2
    assert capsys.readouterr().err == (
        f"error: {arguments[-1]}: /no/folder/file cannot be written: there is no folder "
        "/no/folder; create it first\n"
    )


def test_a_folder_of_a_quantized_model_that_cannot_be_made_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    for out, problem in {
        tmp_path: f"{tmp_path} exists; give a folder that does not exist",
        file / "out": f"{file} is not a folder that you may write into",
    }.items():
        assert run(["quantize", "no-such-model", str(out)], monkeypatch) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: OUT: ")
        assert problem in error


def test_files_that_may_be_written(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text("kept")
    check_writable({"--json": tmp_path / "new", "--plot": old, "--html": None})
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert old.read_text() == "kept"
    for path, problem in {
        tmp_path: "it is a folder; give the name of a file",
        tmp_path / "none" / "new": f"there is no folder {tmp_path}/none; create it first",
        old / "new": "Not a directory",
        tmp_path / ("x" * 5_000): "File name too long",
    }.items():
        with pytest.raises(InvalidArgument) as refused:
            check_writable({"--json": None, "--plot": path})
        assert str(refused.value) == f"--plot: {path} cannot be written: {problem}"


@pytest.mark.parametrize(("option", "value"), list(itertools.product(OPTIONS, ("x", ""))))
def test_an_option_that_is_no_number(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "hi", option, value], monkeypatch) == 2
    assert "Traceback" not in capsys.readouterr().err


def generated() -> Iterator[list[str]]:
    """Yields, for every command: options that it lacks, words too many, each of its options without
    a value, flags with one, and numbers that are none.
    """

    def walk(command: Any, path: list[str]) -> Iterator[list[str]]:
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, [*path, name])
        yield from ([*path, *rest] for rest in (["--no-such-option"], ["-Z"], ["word"] * 9))
        for option in command.params:
            if not option.opts[0].startswith("-") or "--help" in option.opts:
                continue
            name = option.opts[0]
            if option.is_flag:
                yield [*path, f"{name}=yes"]
                continue
            yield [*path, name]
            if NUMBER.search(str(option.type_descriptor.annotation)):
                yield from ([*path, name, value] for value in NO_NUMBERS)

    yield from walk(get_command(app), [])


def test_five_hundred_commands_that_mean_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    command: Any = get_command(app)

    def outcome(arguments: list[str]) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            command.main(arguments, prog_name="tandem")
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    good = outcome(["generate", "--help"])
    assert good[0] == 0
    tried = list(generated())
    assert len(tried) >= 500
    for arguments in tried:
        code, _, told = outcome(arguments)
        assert (code, bool(told)) == (2, True), (arguments, told)
        assert not re.search(r"Traceback|File \"|\.py\b|0x[0-9a-f]{6}", told), (arguments, told)
    assert outcome(["generate", "--help"]) == good
