"""Tests the command line: its help, and what it refuses and how."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import tandem
from tandem.cluster.cli import main, serve
from tandem.cluster.cli.demo import command as demo
from tandem.cluster.config import TandemConfig
from tandem.cluster.settings import SETTINGS
from tandem.cluster.store import checked
from tandem.proto.errors import InvalidArgument, Unavailable
from tandem.tests.imported import imported
from tandem.tests.tiny import make_tiny_model

Done = tuple[int, str, str]
"""Of a command: its exit code, and what it has written to stdout and stderr."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs a command in this process."""

    def run(*args: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["tandem", *args])
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `tandem serve` start no Ray of its own, which takes ten seconds, and fail at its use."""

    @contextmanager
    def start(config: TandemConfig) -> Iterator[Callable[[], None]]:
        yield lambda: pytest.fail("Ray is used")

    monkeypatch.setattr("tandem.cluster.serve.launch.local_ray", start)


def test_the_command_line_loads_neither_ray_nor_torch() -> None:
    found = imported("import tandem.cluster.cli.main")
    assert not {"ray", "torch", "transformers", "sacrebleu"} & found


def test_help_names_every_command(run: Callable[..., Done]) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for command in (
        "serve",
        "generate",
        "chat",
        "status",
        "demo",
        "drain",
        "model",
        "plan",
        "eval",
        "check-config",
        "quantize",
    ):
        assert re.search(rf"^  {command}\b", out, re.MULTILINE), command


def test_the_version_is_the_package_s(run: Callable[..., Done]) -> None:
    assert run("--version") == (0, f"tandem {tandem.__version__}\n", "")


def test_check_config_says_ok(run: Callable[..., Done], tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_text("model: m\n")
    assert run("check-config", str(path)) == (0, f"{path}: ok\n", "")


def test_check_config_refuses_an_interface_without_keys(
    run: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "open.yaml"
    path.write_text("model: m\nrouter: {bind: 0.0.0.0}\n")
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    code, out, error = run("check-config", str(path))
    assert (code, out) == (2, "")
    assert error.startswith("error: host: 0.0.0.0 is not loopback: ")
    monkeypatch.setenv("TANDEM_API_KEY", "a-key")
    assert run("check-config", str(path)) == (0, f"{path}: ok\n", "")


def test_check_config_notes_what_only_ray_serve_accepts(
    run: Callable[..., Done], tmp_path: Path
) -> None:
    path = tmp_path / "scaled.yaml"
    path.write_text("model: m\ndecode: {autoscaling: {max_replicas: 2}}\n")
    code, out, told = run("check-config", str(path))
    assert (code, out) == (0, f"{path}: ok\n")
    assert told.startswith("note: autoscaling: needs a configuration of Ray Serve")


def test_the_help_of_serve_has_the_default_of_each_setting() -> None:
    command: Any = typer.main.get_command(main.app)
    helps = {option.name: option.help for option in command.commands["serve"].params}
    config = TandemConfig(model="m")
    for setting in SETTINGS:
        default, *others = (attrgetter(key)(config) for key in setting.keys)
        assert all(each == default for each in others), setting.name  # the help has one
        is_told = isinstance(default, str | int | float) and default is not False
        assert ("[default: " in helps[setting.name]) == is_told, setting.name
    for name, text in (
        ("http_port", "8080"),
        ("tp", "1"),
        ("device", "cpu"),
        ("gpu_memory_utilization", "0.9"),
        ("prefix_caching", "on"),
    ):
        assert helps[name].endswith(f" [default: {text}]")


def test_check_config_tells_each_mistake_in_a_line(
    run: Callable[..., Done], tmp_path: Path
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("model: m\nprefil: {}\n")
    assert run("check-config", str(path)) == (
        2,
        "",
        "error: prefil: unknown key; did you mean prefill?\n",
    )


def test_check_config_refuses_weights_rounded_for_a_gpu(
    run: Callable[..., Done], tmp_path: Path
) -> None:
    path = tmp_path / "rounded.yaml"
    path.write_text("model: m\ndevice: cuda\nquantization: int8\n")
    code, _, error = run("check-config", str(path))
    assert code == 2
    assert error.startswith("error: quantization: int8 has kernels on cpu only")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve"], "model: missing"),
        (["serve", "/no/such/folder"], "/no/such/folder"),
        (["serve", "m", "--decode", "0"], "decode.replicas: must be at least 1"),
        (["serve", "m", "--dtype", "int3"], "dtype: must be 'float32'"),
        (["serve", "m", "--decode-tp", "0"], "decode.tp: must be greater than or equal to 1"),
        (
            ["serve", "m", "--grpc-port", "70000"],
            "router.grpc_port: must be less than or equal to 65535",
        ),
        (["model", "get", "no-such-model"], "no-such-model"),
    ],
)
def test_bad_input_ends_in_one_line_and_code_2(
    run: Callable[..., Done], args: list[str], words: str
) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


def test_a_truncated_model_is_refused_before_ray_starts(
    run: Callable[..., Done], tiny_model: Path, tmp_path: Path
) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, out, err = run("serve", str(tmp_path))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert "model.safetensors" in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("no_ray")
def test_a_split_that_the_heads_do_not_allow_is_refused_before_ray_is_used(
    run: Callable[..., Done], tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "split.yaml"
    file.write_text("model: ignored\nprefill: {tp: 3}\n")
    wrong = "tp: 3 does not divide the model's 4 query heads\n"
    for args, lines in (
        (["--prefill-tp", "3"], f"prefill.{wrong}"),
        (["--tp", "3", "--prefill-tp", "2"], f"decode.{wrong}"),
        (["--tp", "3"], f"prefill.{wrong}decode.{wrong}"),
        (["--config", str(file), "--decode-tp", "4"], f"prefill.{wrong}"),
    ):
        assert run("serve", str(tiny_model), *args) == (2, "", f"error: {lines}"), args


@pytest.mark.usefixtures("no_ray")
def test_the_check_of_a_service_resolves_the_model_no_second_time(
    run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    """It would ask the hub again and read all weights again."""
    monkeypatch.setattr(checked, "resolve_model", lambda *_, **__: pytest.fail("resolved again"))
    code, _, err = run("serve", str(tiny_model), "--tp", "3")
    assert code == 2
    assert "tp: 3 does not divide" in err
    with pytest.raises(pytest.fail.Exception, match="Ray is used"):  # after the check
        demo._serve(str(tiny_model), {}, lambda *_: [])


@pytest.mark.parametrize(
    ("flags", "split"),
    [
        ([], (2, 4)),
        (["--tp", "3"], (3, 3)),
        (["--decode-tp", "3"], (2, 3)),
        (["--tp", "1", "--prefill-tp", "5"], (5, 1)),
    ],
)
def test_flags_split_both_pools_or_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str], split: tuple[int, int]
) -> None:
    asked: list[tuple[int, int]] = []

    def refuse(config: TandemConfig) -> Path:
        asked.append((config.prefill.tp, config.decode.tp))
        raise InvalidArgument("enough")

    monkeypatch.setattr(serve, "local_host", lambda _: "")
    monkeypatch.setattr(serve, "with_draft_folder", refuse)
    file = tmp_path / "split.yaml"
    file.write_text("model: m\nprefill: {tp: 2}\ndecode: {tp: 4}\n")
    assert isinstance(
        CliRunner().invoke(main.app, ["serve", "--config", str(file), *flags]).exception,
        InvalidArgument,
    )
    assert asked == [split]


@pytest.mark.usefixtures("no_ray")
def test_a_collector_of_traces_without_its_packages_is_refused_first(
    run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(serve, "resolve_model", lambda *_, **__: pytest.fail("fetched"))
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    file = tmp_path / "traced.yaml"
    file.write_text("model: m\ntracing: {endpoint: 'http://collector'}\n")
    error = "error: tracing.endpoint: needs the extra tandem-llm[otel]; install it\n"
    assert run("serve", "--config", str(file)) == (2, "", error)


def test_only_our_line_is_on_stdout_whatever_else_writes_there() -> None:
    code = (
        "import subprocess, typer\n"
        "from tandem.cluster.cli.serve import _own_stdout\n"
        "with _own_stdout() as stdout:\n"
        "    print('a library')\n"
        "    subprocess.run(['echo', 'a process'])\n"
        "    typer.echo('tandem ready', file=stdout)\n"
        "print('after')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "tandem ready\nafter\n"
    assert sorted(done.stderr.splitlines()) == ["a library", "a process"]


def test_clients_say_in_one_line_that_nobody_answers(run: Callable[..., Done]) -> None:
    for args in (
        ["status", "--url", "http://127.0.0.1:1"],
        ["generate", "hi", "--url", "127.0.0.1:1"],
    ):
        code, out, err = run(*args)
        assert (code, out) == (1, ""), args
        assert err.startswith("error: ")
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "method", "model"),
    [
        (None, "draft_model", "small"),
        ("draft=other=model", "draft_model", "other=model"),
        ("ngram", "ngram", None),
    ],
)
def test_a_flag_names_the_draft_model_or_drops_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flag: str | None,
    method: str,
    model: str | None,
) -> None:
    asked: list[TandemConfig] = []

    def refuse(config: TandemConfig) -> TandemConfig:
        asked.append(config)
        raise InvalidArgument("enough")

    monkeypatch.setattr(serve, "local_host", lambda _: "")
    monkeypatch.setattr(serve, "with_draft_folder", refuse)
    file = tmp_path / "draft.yaml"
    file.write_text("model: m\nspeculative: {model: small, num_speculative_tokens: 3}\n")
    flags = ["--speculative", flag] if flag else []
    CliRunner().invoke(main.app, ["serve", "--config", str(file), *flags])
    found = asked[0].speculative
    assert found is not None
    assert (found.method, found.model, found.num_speculative_tokens) == (method, model, 3)


@pytest.mark.usefixtures("no_ray")
def test_a_draft_model_that_cannot_be_used_is_refused_in_a_line(
    run: Callable[..., Done], tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_tiny_model(tmp_path / "other", vocab_size=600)
    capsys.readouterr()  # the bar of what writes the model
    sizes = "the draft model has 600 tokens in its vocabulary and the model 512"
    for model, line in (
        (str(other), f"speculative.model: {sizes}; they must be the same"),
        (str(tmp_path), "speculative.model: config.json: not found"),
        (f"{tmp_path}/none", f"speculative.model: there is no folder {tmp_path}/none"),
        ("", "speculative.model: must have at least 1 character, got ''"),
    ):
        assert run("serve", str(tiny_model), "--speculative", f"draft={model}") == (
            2,
            "",
            f"error: {line}\n",
        ), model


FAILURES = (
    (OSError(28, "No space left on device"), "No space left on device"),
    (PermissionError(13, "Permission denied", "/a", None, "/b"), "/a: /b: Permission denied"),
    (ValueError("one\n  two"), "ValueError: one two (TANDEM_TRACEBACK=1 shows where)"),
    (Unavailable("not now"), "not now"),
)


@pytest.mark.parametrize(("error", "line"), FAILURES)
def test_any_failure_is_one_line(
    run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, error: Exception, line: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(main, "app", fail)
    monkeypatch.setattr(main, "_drop_output", lambda: None)
    assert run() == (1, "", f"error: {line}\n")
    if not isinstance(error, Unavailable):
        monkeypatch.setenv("TANDEM_TRACEBACK", "1")
        with pytest.raises(type(error)):
            main.main()


def run_in_shell(command: str) -> "subprocess.CompletedProcess[str]":
    """Runs a command line in which "$@" is the start of a tandem command."""
    tandem_command = [sys.executable, "-c", "from tandem.cluster.cli.main import main; main()"]
    shell = ["sh", "-c", command, "sh", *tandem_command]
    return subprocess.run(shell, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_commands_run_without_standard_files(closed: str) -> None:
    """Nothing else may get their numbers: a file that is opened first would receive the output."""
    done = run_in_shell(
        f'"$@" model list {closed}; "$@" generate --url 127.0.0.1:1 --timeout 1 {closed}'
    )
    lines = done.stderr.splitlines()
    assert done.returncode in (1, 2)
    assert len(lines) == (0 if "2>&-" in closed else 1), done.stderr
    assert all(line.startswith("error: ") for line in lines)


def test_a_full_disk_is_one_line() -> None:
    done = run_in_shell('"$@" --version > /dev/full')
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


def test_a_reader_that_leaves_is_no_error() -> None:
    done = run_in_shell('("$@" serve --help; echo "ended with $?" >&2) | true')
    assert done.stderr in ("ended with 1\n", "ended with 0\n")


def test_the_environment_is_checked_before_the_model_is_fetched(
    run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    monkeypatch.setattr(serve, "resolve_model", lambda *_, **__: pytest.fail("fetched"))
    code, out, err = run("serve", "org/name")
    assert (code, out) == (2, "")
    assert err.startswith(
        "error: RAY_ADDRESS: http://127.0.0.1:8265 is an address of Ray's dashboard"
    )


@pytest.mark.parametrize(
    ("lines", "code", "reason"),
    [
        ("host: 0.0.0.0", 2, "host: 0.0.0.0 is not loopback"),
        ("host: 192.0.2.1\nauth: {allow_anonymous: true}", 1, "192.0.2.1:0 cannot be bound"),
        ("status_port: 8080", 2, "router.http_port: must differ from status_port, 8080"),
        ("decode: {autoscaling: {max_replicas: 2}}", 2, "autoscaling: needs a configuration of"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_the_model_is_fetched(
    run: Callable[..., Done],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    lines: str,
    code: int,
    reason: str,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(serve, "resolve_model", lambda *_, **__: pytest.fail("fetched"))
    file = tmp_path / "service.yaml"
    file.write_text(f"model: org/name\n{lines}\n")
    found, out, err = run("serve", "--config", str(file))
    assert (found, out) == (code, "")
    assert reason in err


@pytest.mark.parametrize(
    ("option", "value"), [("--tp", "3"), ("--context-tokens", "1"), ("--max-sequences", "0")]
)
def test_an_error_of_a_batch_names_the_option(
    run: Callable[..., Done], tiny_model: Path, tmp_path: Path, option: str, value: str
) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_text(
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
    )
    args = ["batch", str(requests), str(tmp_path / "answers.jsonl"), "--model", str(tiny_model)]
    code, out, err = run(*args, option, value)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {option}: ")
