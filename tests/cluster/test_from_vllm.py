"""vLLM's names of settings: flags, the configuration file, `LLM`, and docs/from-vllm.md."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
import typer
from typer.testing import CliRunner

from tandem.cluster.cli import serve
from tandem.cluster.cli.main import app
from tandem.cluster.config import TandemConfig, load_config
from tandem.cluster.local import llm
from tandem.cluster.local.llm import LLM, LocalSettings
from tandem.cluster.parser_names import REASONING_ALIASES, TOOL_CALL_ALIASES
from tandem.cluster.settings import (
    ALWAYS_ON,
    DEFAULT_DTYPE,
    NO_EFFECT,
    REFUSED,
    SAME_VALUES,
    SETTINGS,
    Setting,
    local_keys,
)
from tandem.proto.errors import InvalidArgument
from tandem.router.api.server.http_server import HttpServer
from tandem.router.api.service import GenerationService
from tandem.router.frontend.formats.calls import CALL_FORMATS
from tandem.router.frontend.formats.chat_format import ChatFormat
from tandem.router.frontend.formats.reasoning import REASONING_FORMATS
from tandem.router.frontend.served_model import ServedModel
from tandem.tests.router.fake_source import FakeTokenSource, byte_tokenizer

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "from-vllm.md").read_text()
FORMATS_PAGE = (DOCS / "clients" / "structured.md").read_text()
VALUES: dict[str, Any] = {
    "tp": 2,
    "kv_cache_dtype": "int8",
    "quantization": "int8",
    "dtype": "float32",
    "prefix_caching": False,
    "speculative": '{"method": "ngram", "num_speculative_tokens": 3}',
    "model_impl": "transformers",
    "generation_config": "none",
    "tool_call_parser": "hermes",
    "reasoning_parser": "deepseek_r1",
    "chat_template": "{{ messages[0].content }}",
    "sampling_defaults": '{"temperature": 0.5}',
    "chat_template_kwargs": '{"enable_thinking": false}',
    "adapters": "a=/x",
    "host": "::1",
    "cors_origin": '["https://a.example", "*"]',
    "gpu_memory_utilization": 0.5,
}
"""A value of each setting that is not the default; 7 of the others that are numbers."""

COMMAND = typer.main.get_command(app)
"""Built once: that takes ten times as long as parsing a command line."""

RENAMED = [setting for setting in SETTINGS if setting.vllm]


def flag(name: str) -> str:
    return ("-" if name in ("dp", "pp", "O") else "--") + name.replace("_", "-")


def value_of(setting: Setting) -> Any:
    return VALUES.get(setting.name, 7 if setting.kind is int else "text")


def serve_m(*flags: str) -> None:
    COMMAND(["serve", "m", *flags], standalone_mode=False)


def served(monkeypatch: pytest.MonkeyPatch, *flags: str) -> TandemConfig:
    """Returns the configuration that `tandem serve m` makes of these flags."""
    found: list[TandemConfig] = []

    def keep(config: TandemConfig) -> TandemConfig:
        found.append(config)
        raise InvalidArgument("enough")

    monkeypatch.setattr(serve, "local_host", lambda _: "")
    monkeypatch.setattr(serve, "with_draft_folder", keep)
    with pytest.raises(InvalidArgument, match="enough"):
        serve_m(*flags)
    return found[0]


def refuse_to_start(config: TandemConfig) -> NoReturn:
    raise InvalidArgument(f"enough: {config.model}")


def configured(tmp_path: Path, text: str) -> TandemConfig:
    file = tmp_path / "service.yaml"
    file.write_text(f"model: m\n{text}\n")
    return load_config(file)


def with_value(name: str, setting: Setting) -> list[str]:
    value = value_of(setting)
    if setting.kind is bool:
        return [flag(name if value else f"no_{name}")]
    return [flag(name), str(value)]


@pytest.mark.parametrize("setting", RENAMED, ids=lambda setting: setting.name)
def test_vllm_s_name_sets_what_ours_sets(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours = served(monkeypatch, *with_value(setting.name, setting))
    assert ours != load_config(None, {"model": "m"})
    for name in setting.vllm:
        assert served(monkeypatch, *with_value(name, setting)) == ours
        for key in (name, name.replace("_", "-")):
            assert configured(tmp_path, f"{key}: {json.dumps(value_of(setting))}") == ours


def test_short_flags_are_vllm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    config = served(monkeypatch, "-tp", "2", "-q", "int8", "-asc", "3")
    assert (config.prefill.tp, config.decode.tp, config.quantization) == (2, 2, "int8")
    assert config.router.replicas == 3


@pytest.mark.parametrize("name", ALWAYS_ON)
def test_a_switch_that_is_always_on_has_no_effect(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = load_config(None, {"model": "m"})
    assert served(monkeypatch, flag(name)) == plain
    assert configured(tmp_path, f"{name.replace('_', '-')}: true") == plain
    with pytest.raises(InvalidArgument, match=f"must be true: {ALWAYS_ON[name]}"):
        configured(tmp_path, f"{name}: false")


def test_flags_win_over_aliases_in_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("model: m\nmax-model-len: 512\ntensor-parallel-size: 4\nenable-lora: true\n")
    config = served(monkeypatch, "--config", str(file), "--context-tokens", "256")
    assert (config.context_tokens, config.prefill.tp, config.decode.tp) == (256, 4, 4)


def test_an_absent_flag_leaves_the_list_of_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "service.yaml"
    lists = {
        "adapters": {"a": "/x"},
        "auth": {"key_hashes": ["0" * 64]},
        "router": {"host_names": ["a.example"], "cors_origins": ["https://a.example"]},
        "served_model_name": ["b", "c"],
    }
    file.write_text(json.dumps({"model": "m"} | lists))
    assert served(monkeypatch, "--config", str(file)) == load_config(file)
    config = served(monkeypatch, "--config", str(file), "--host-name", "b")
    assert (config.router.host_names, config.adapters) == (("b",), {"a": "/x"})


def test_every_form_of_adapters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = {"a": "/x", "b": "/y"}
    second = '{"name": "b", "path": "/y"}'
    flags = ("--lora-modules", "a=/x", "--lora-modules", second, "--enable-lora")
    assert served(monkeypatch, *flags).adapters == expected
    assert configured(tmp_path, f"lora-modules: ['a=/x', {second}]").adapters == expected
    for wrong in ("a", "{", '{"name": "a"}'):
        with pytest.raises(InvalidArgument, match="adapters: must be NAME=FOLDER, got"):
            serve_m("--adapters", wrong)


@pytest.mark.parametrize(
    ("setting", "aliases", "formats"),
    [
        ("tool_call_parser", TOOL_CALL_ALIASES, CALL_FORMATS),
        ("reasoning_parser", REASONING_ALIASES, REASONING_FORMATS),
    ],
)
def test_names_of_vllm_s_parsers_mean_formats_of_ours(
    setting: str,
    aliases: Mapping[str, str],
    formats: Mapping[str, ChatFormat],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    assert not aliases.keys() & formats.keys()
    assert {*aliases.values()} <= formats.keys()
    for alias, name in aliases.items():
        expected = load_config(None, {"model": "m", setting: name})
        assert served(monkeypatch, flag(setting), alias) == expected
        assert configured(tmp_path, f"{setting}: {alias}") == expected
        assert f"`{alias}`" in FORMATS_PAGE
    with pytest.raises(InvalidArgument, match=rf"^{setting}: must be 'auto'.*, got 'nothing'$"):
        serve_m(flag(setting), "nothing")


def test_every_form_of_an_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    by_flag = served(monkeypatch, "--default-chat-template-kwargs", '{"enable_thinking": false}')
    for text in (
        "chat_template_kwargs: {enable_thinking: false}",
        "default-chat-template-kwargs: {enable_thinking: false}",
    ):
        assert configured(tmp_path, text) == by_flag
    assert by_flag.chat_template_kwargs == {"enable_thinking": False}
    with pytest.raises(InvalidArgument, match="sampling_defaults: must be a JSON object"):
        serve_m("--override-generation-config", "{")
    with pytest.raises(InvalidArgument, match="sampling_defaults: must hold keys and values"):
        serve_m("--sampling-defaults", "[]")


def test_several_names_of_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = ("--served-model-name", "a", "--served-model-name", "b")
    assert served(monkeypatch, *flags).served_names == ("a", "b")
    assert configured(tmp_path, "served-model-name: [a, b]").served_names == ("a", "b")


def test_host_names_and_origins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = served(monkeypatch, "--host-name", "a.example", "--host-name", "b")
    assert config.router.host_names == ("a.example", "b")
    expected = ("https://a.example", "https://b.example")
    many = ("--cors-origin", expected[0], "--allowed-origins", json.dumps(expected[1:]))
    assert served(monkeypatch, *many).router.cors_origins == expected
    as_list = f"allowed-origins: {json.dumps(expected)}"
    assert configured(tmp_path, as_list).router.cors_origins == expected
    for flags, words in (
        (("--cors-origin", "["), "cors_origin: must be an origin or a JSON list"),
        (("--cors-origin", "a.example"), r"router\.cors_origins\.0: must be an origin such as"),
        (("--host-name", "http://a"), r"router\.host_names\.0: must be a host name"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            serve_m(*flags)


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_only_vllm_has_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    words = f"not supported: {re.escape(REFUSED[name])}; docs/from-vllm.md lists vLLM's flags$"
    for args in ([flag(name), "7"], [f"{flag(name)}=7"], [f"--no-{name.replace('_', '-')}"]):
        with pytest.raises(InvalidArgument, match=f"^{args[0].partition('=')[0]}: {words}"):
            serve_m(*args)
    for joined in ("-O3", "-O.mode=3") if name == "O" else ():
        with pytest.raises(InvalidArgument, match=f"^-O: {words}"):
            serve_m(joined)
    if name == "model":  # a key of ours, and the first argument of LLM
        return
    key = name.replace("_", "-")
    with pytest.raises(InvalidArgument, match=f"^{key}: {words}"):
        configured(tmp_path, f"{key}: 7")
    with pytest.raises(InvalidArgument, match=f"^{name}: {words}"):
        LLM("m", **cast(Any, {name: 7}))


@pytest.mark.parametrize("name", NO_EFFECT)
def test_a_switch_without_effect_is_taken_with_the_reason(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = load_config(None, {"model": "m"})
    off = f"--no-{name.replace('_', '-')}"
    assert served(monkeypatch, flag(name), "--tp", "1", off) == plain
    assert configured(tmp_path, f"{name.replace('_', '-')}: true") == plain
    monkeypatch.setattr(llm, "_start", refuse_to_start)
    with pytest.raises(InvalidArgument, match="enough"):
        LLM("m", **cast(Any, {name: True}))
    shown = (flag(name), off, f"{name.replace('_', '-')}: True", f"{name}=True")
    assert caplog.messages == [f"{each} has no effect: {NO_EFFECT[name]}" for each in shown]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in SAME_VALUES.items() for value in values]
)
def test_a_value_without_effect_is_taken_with_the_reason(
    name: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = load_config(None, {"model": "m"})
    reason = REFUSED.get(name, DEFAULT_DTYPE)
    assert served(monkeypatch, flag(name), value, f"{flag(name)}={value}", "--tp", "1") == plain
    assert configured(tmp_path, f"{name}: {value}") == plain
    monkeypatch.setattr(llm, "_start", refuse_to_start)
    with pytest.raises(InvalidArgument, match="enough"):
        LLM("m", **cast(Any, {name: value}))
    shown = (*[f"{flag(name)} {value}"] * 2, f"{name}: {value}", f"{name}={value!r}")
    assert caplog.messages == [f"{each} has no effect: {reason}" for each in shown]
    assert f"`{flag(name)} {value}`" in PAGE
    assert f"| {reason} |" in PAGE


def test_a_command_of_a_model_card_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    command = (
        "--tensor-parallel-size 8 --enable-expert-parallel --tool-call-parser glm47 "
        "--reasoning-parser glm45 --enable-auto-tool-choice --served-model-name glm --dtype auto "
        "--trust-remote-code --seed 0 --load-format auto --max-model-len 4096"
    )
    config = served(monkeypatch, *command.split())
    assert (config.decode.tp, config.context_tokens) == (8, 4096)
    assert (config.tool_call_parser, config.reasoning_parser) == ("glm45", "qwen3")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "max_model_len: 7\ncontext_tokens: 8",
            "max_model_len: sets context_tokens, which another",
        ),
        ("max_model_len: 7\nmax-model-len: 8", "max-model-len: sets context_tokens, which another"),
        ("port: 7\nrouter: {http_port: 8}", "port: sets router.http_port, which another key sets"),
        ("max_model_lenn: 7", "max_model_lenn: unknown key"),
        ("enable-chunked-prefill: false", "enable-chunked-prefill: must be true: prompts are"),
        ("max_num_seqs: x", "prefill.max_sequences: must be a valid integer, got 'x'"),
    ],
)
def test_a_wrong_alias_in_the_file_is_named(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        configured(tmp_path, text)
    assert str(caught.value).startswith(words)


def test_an_unknown_argument_of_an_llm_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        LLM("m", nothing=1)  # type: ignore[call-arg]


def test_the_table_is_consistent() -> None:
    names = [setting.name for setting in SETTINGS]
    aliases = [name for setting in SETTINGS for name in setting.vllm]
    assert len(set(names)) == len(names)
    assert len(set(aliases)) == len(aliases)
    assert not (set(names) | set(aliases)) & (REFUSED.keys() | ALWAYS_ON.keys() | NO_EFFECT.keys())
    assert len(REFUSED | ALWAYS_ON | NO_EFFECT) == len(REFUSED) + len(ALWAYS_ON) + len(NO_EFFECT)
    assert SAME_VALUES.keys() - REFUSED.keys() == {"dtype"}
    for setting in SETTINGS:
        assert setting.name in setting.vllm or setting.name not in aliases
        for key in setting.keys:
            section: Any = TandemConfig
            for part in key.split("."):
                field = section.model_fields[part]
                section = field.annotation
    known = {name for setting in SETTINGS for name in (setting.name, *setting.vllm)}
    assert LocalSettings.__annotations__.keys() <= known
    assert local_keys({"max_num_seqs": 1, "dtype": "x"}) == {
        "max_num_seqs": "decode.max_sequences",
        "dtype": "dtype",
    }


def flags_of(command: Any) -> set[str]:
    return {each for option in command.params for each in (*option.opts, *option.secondary_opts)}


def test_every_flag_of_ours_on_the_page_exists() -> None:
    """Flags of vLLM stand in the first column; all others on the page are Tandem's."""
    commands = COMMAND.commands  # type: ignore[attr-defined]
    ours = flags_of(commands["serve"]) | flags_of(commands["plan"].commands["memory"])
    rows = re.findall(r"^\|(.*?)\|(.*)\|$", PAGE, re.MULTILINE)
    named = {each for _, rest in rows for each in re.findall(r"(?<![\w-])--?[a-z][\w-]*", rest)}
    prose = re.sub(r"^\|.*\|$", "", PAGE, flags=re.MULTILINE)
    named |= set(re.findall(r"(?<=`)--?[a-z][\w-]*", prose)) | set(
        re.findall(r"--[a-z][\w-]*", "".join(re.findall(r"`tandem .*`|^tandem .*$", prose, re.M)))
    )
    assert named
    assert named - ours == set()


def test_every_name_of_the_table_is_on_the_page() -> None:
    rows = dict(re.findall(r"^\| `(--?[\w-]+)`.*?\| (.*) \|$", PAGE, re.MULTILINE))
    for setting in RENAMED:
        for name in setting.vllm:
            expected = f"`{flag(setting.name)}` | {', '.join(f'`{key}`' for key in setting.keys)}"
            assert rows[flag(name)] == expected
    for name, reason in (REFUSED | ALWAYS_ON | NO_EFFECT).items():
        assert rows[flag(name)] == reason


def test_a_flag_that_is_not_on_the_page_is_unknown() -> None:
    result = CliRunner().invoke(app, ["serve", "m", "--mamba-cache-mode", "all"])
    assert result.exit_code == 2
    assert "No such option: --mamba-cache-mode" in result.output


def test_every_endpoint_of_ours_on_the_page_exists() -> None:
    model = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=512)
    server = HttpServer(GenerationService([model], FakeTokenSource()))
    served_paths = {getattr(route, "path", "") for route in server._app().routes}
    table = PAGE.partition("## Endpoints")[2]
    for row in re.findall(r"^\|(.*)\| the same.*\|$", table, re.MULTILINE):
        assert set(re.findall(r"/[\w/.]+", row)) <= served_paths
