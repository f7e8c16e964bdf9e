"""Tests the chat template that an operator gives in place of the model's."""

from pathlib import Path

import pytest

from tandem.cluster.chat_template import NAMES, read_chat_template
from tandem.cluster.config import TandemConfig, load_config
from tandem.cluster.store.checked import checked_folder
from tandem.cluster.text_files import MAX_FILE_BYTES
from tandem.proto.errors import InvalidArgument
from tandem.router.frontend.template import RENDERER, render
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
    file.write_text(SHOUT, encoding="utf-8-sig")  # as editors on Windows write it
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
    absent = (
        "No such file or directory, and no template has this name: alpaca, chatml, gemma, llama-2, "
        "llama-3, mistral, phi-3, vicuna, zephyr"
    )
    reasons = {
        "absent": absent,
        "{absent}": absent,
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
def test_variables_with_which_a_template_cannot_render_are_refused_at_the_start(
    tmp_path: Path,
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text("{{ nothing() if mood else 'a' }}")
    assert checked_folder(load_config(None, {"model": str(folder)})) == folder
    values = {"model": str(folder), "chat_template_kwargs": {"mood": True}}
    with pytest.raises(InvalidArgument) as caught:
        checked_folder(load_config(None, values))
    text = str(caught.value)
    assert text.startswith("chat_template_kwargs: the model's chat template refuses")
    assert text.endswith(": it cannot render a chat of one message")


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


TURNS = (("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "Who?"))
RENDERED = {  # as in the papers and the model cards; the tokens are those of the tiny tokenizer
    "alpaca": "<bos>Be brief.\n\n### Instruction:\nHi\n\n### Response:\nHello.<eos>\n\n"
    "### Instruction:\nWho?\n\n### Response:\n",
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "gemma": "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    "Hello.<end_of_turn>\n<start_of_turn>user\nWho?<end_of_turn>\n<start_of_turn>model\n",
    "llama-2": "<bos>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello. <eos>"
    "<bos>[INST] Who? [/INST]",
    "llama-3": "<bos><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWho?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<bos>[INST] Be brief.\n\nHi [/INST] Hello.<eos>[INST] Who? [/INST]",
    "phi-3": "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello.<|end|>\n"
    "<|user|>\nWho?<|end|>\n<|assistant|>\n",
    "vicuna": "<bos>Be brief. USER: Hi ASSISTANT: Hello.<eos>USER: Who? ASSISTANT:",
    "zephyr": "<|system|>\nBe brief.<eos>\n<|user|>\nHi<eos>\n<|assistant|>\nHello.<eos>\n"
    "<|user|>\nWho?<eos>\n<|assistant|>\n",
}


def rendered(name: str, *turns: tuple[str, str], bos: str | None = "<bos>") -> str:
    tokens = {} if bos is None else {"bos_token": bos}
    return render(
        RENDERER,
        {
            "conversations": [[{"role": role, "content": text} for role, text in turns]],
            "chat_template": read_chat_template(name),
            "add_generation_prompt": True,
            "eos_token": "<eos>",
            **tokens,
        },
        max_characters=10_000,
        seconds=30.0,
        now=0.0,
    )


@pytest.mark.io
@pytest.mark.parametrize("name", NAMES)
def test_a_known_template_renders_as_published(name: str) -> None:
    assert rendered(name, *TURNS) == RENDERED[name]
    # A tokenizer may have no beginning token, and a chat no system message.
    assert "Hi" in rendered(name, ("user", "Hi"), bos=None)
    assert "Be brief." not in rendered(name, *TURNS[1:])


@pytest.mark.io
@pytest.mark.parametrize("name", NAMES)
def test_a_known_template_drops_no_message_wherever_it_stands(name: str) -> None:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    for letters in ("us", "uas", "s", "ssu", "usu", "suasus", "uss", "suas"):
        turns = [(roles[letter], f"text{i}.") for i, letter in enumerate(letters)]
        text = rendered(name, *turns)
        places = [text.find(content) for _, content in turns]
        assert -1 not in places, letters
        assert places == sorted(places), letters


@pytest.mark.io
def test_a_name_serves_chats_of_a_model_without_a_template(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    assert not list(folder.glob("chat_template*"))
    (tmp_path / "chatml").write_text(SHOUT)
    monkeypatch.chdir(tmp_path)
    config = served(monkeypatch, "--chat-template", "chatml")
    assert config == served(monkeypatch, "--chat-template", read_chat_template("chatml"))
    assert config_with("./chatml").chat_template == SHOUT
    assert checked_folder(config_with("chatml", folder)) == folder
