"""Tests the chat template that an operator gives in place of the model's."""

from pathlib import Path

import pytest

from tandem.cluster.chat_template import read_chat_template
from tandem.cluster.config import TandemConfig, load_config
from tandem.cluster.store.checked import checked_folder
from tandem.cluster.text_files import MAX_FILE_BYTES
from tandem.proto.errors import InvalidArgument
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.cluster.test_from_vllm import served
from tandem.tests.router.frontend.test_chat import chat
from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_tokenizer import make_tokenizer

SHOUT = "{% for m in messages %}<{{ m.role }}> {{ m.content | upper }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def config_with(template: object, folder: Path | str = "m") -> TandemConfig:
    return load_config(None, {"model": str(folder), "chat_template": template})


def test_a_template_is_a_file_or_a_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "shout.jinja"
    file.write_text(SHOUT)
    yaml = tmp_path / "service.yaml"
    yaml.write_text(f"model: m\nchat-template: {file}\n")
    by_flag = served(monkeypatch, "--chat-template", str(file))
    monkeypatch.chdir(tmp_path)
    configs = (by_flag, load_config(yaml), config_with("shout.jinja"), config_with(SHOUT))
    file.unlink()  # other nodes do not have it
    assert {config.chat_template for config in configs} == {SHOUT}
    assert served(monkeypatch, "--chat-template", "{{ messages }}").chat_template == (
        "{{ messages }}"
    )
    assert config_with(None).chat_template is None


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (r"{{ a }}\n{{ b }}\t", "{{ a }}\n{{ b }}\t"),
        (
            r"{{ '\n' }}{% if a == '\\' %}\\n{% endif %}",
            "{{ '\\n' }}{% if a == '\\\\' %}\\n{% endif %}",
        ),
        ("{{ a }}\\n\n", "{{ a }}\\n\n"),  # more than one line: as it is
        (r"\nabla {{ a }} naïve \x", "\nabla {{ a }} naïve \\x"),
    ],
)
def test_escapes_between_the_tags_of_one_line_are_replaced(given: str, read: str) -> None:
    assert read_chat_template(given) == read


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    contents = {"empty": b" \n", "bytes": b"\xff\xfe", "large": b"x" * (MAX_FILE_BYTES + 1)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    reasons = {
        "absent": "No such file or directory",
        "{absent}": "No such file or directory",
        "": "Is a directory",
        "empty": "is empty",
        "bytes": "not UTF-8",
        "large": f"must have at most {MAX_FILE_BYTES} bytes",
    }
    for name, reason in reasons.items():
        with pytest.raises(InvalidArgument) as caught:
            config_with(str(tmp_path / name))
        assert str(caught.value) == f"chat_template: {tmp_path / name}: {reason}"
    for wrong in ("", "{" * (MAX_FILE_BYTES + 1), 7):
        with pytest.raises(InvalidArgument, match=r"^chat_template: must [^\n]*$"):
            config_with(wrong)


@pytest.mark.io
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for m in messages %}\n{{ m.content",
            "is not valid Jinja in line 2 (unexpected end of template, expected 'end of print "
            "statement'.)",
        ),
        ("{{ messages | nothing }}", "is not valid Jinja in line 1 (No filter named 'nothing'.)"),
        (
            "{% for m in messages %}",
            "is not valid Jinja in line 1 (Unexpected end of template. Jinja was looking for the "
            "following tags: 'endfor' or 'else'. The innermost block that needs to be closed is "
            "'for'.)",
        ),
        ("{{ nothing() }}", "refuses these messages"),
        ("{{ messages[0].content * 1000000 }}", "renders more than"),
        ("{{ range(10**9) | list }}", "re"),  # refused by the sandbox, or out of memory
        ("{{ ''.__class__.__mro__ }}{{ nothing() }}", "refuses these messages"),
    ],
)
def test_a_template_that_cannot_render_is_refused_at_the_start(
    folder: Path, template: str, reason: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        checked_folder(config_with(template, folder))
    text = str(caught.value)
    assert text.startswith(f"chat_template: {reason}")
    assert text.endswith(": it cannot render a chat of one message")
    assert "\n" not in text


@pytest.mark.io
def test_a_template_that_refuses_one_message_with_a_reason_is_good(folder: Path) -> None:
    template = "{{ raise_exception('a system message is needed') }}"
    assert checked_folder(config_with(template, folder)) == folder


@pytest.mark.io
@pytest.mark.parametrize("own", ["none", "one", "broken"])
async def test_the_template_replaces_all_templates_of_the_model(own: str, tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    if own != "one":
        (tmp_path / "chat_template.jinja").unlink()
    if own == "broken":
        (tmp_path / "chat_template.json").write_text("{")
    tokenizer = Tokenizer.load(tmp_path, chat_template=SHOUT)
    ids = await tokenizer.encode_chat(chat(("user", "hi"), ("assistant", "ho")))
    assert await tokenizer.detokenize(ids) == "<user> HI\n<assistant> HO\n"
    for tools in (False, True):
        assert tokenizer.chat_template(tools=tools) == SHOUT


@pytest.mark.io
def test_the_format_of_calls_is_found_in_the_template(folder: Path) -> None:
    mistral = "{{ messages[0].content }}{% if tools %}[TOOL_CALLS]{{ tools | tojson }}{% endif %}"
    found = {
        Tokenizer.load(folder, chat_template=template).call_format for template in (SHOUT, mistral)
    }
    assert len(found) == 2
