"""Tests folders without tokenizer.json, and all places of chat templates in folders of the hub."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers import AutoTokenizer

from tandem.cluster.config import TandemConfig
from tandem.cluster.store import store
from tandem.cluster.store.checked import checked_folder
from tandem.cluster.store.store import resolve_model
from tandem.proto import inference_pb2
from tandem.proto.home import tokenizer_file
from tandem.router.frontend.tekken import SPLIT
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_tokenizer import make_tokenizer
from tandem.workers.model.config import CheckpointError
from tandem.workers.model.sampling.grammar_cache import GrammarCache

PLAIN, TOOLS = "{{ messages[0].content }} plain", "{{ messages[0].content }} tools"
TEXT = "The capital of France,  2024: naïve 日本?"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("TANDEM_HOME", str(path))
    return path


def put_in_config(folder: Path, template: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))


@pytest.mark.parametrize("place", ["config", "list", "file", "folder", "processor"])
def test_a_chat_template_is_found_in_every_place(folder: Path, place: str) -> None:
    assert Tokenizer.load(folder).chat_template(tools=False) == ""
    if place == "config":
        put_in_config(folder, PLAIN)
    elif place == "list":
        put_in_config(
            folder,
            [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOLS}],
        )
    elif place == "processor":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": PLAIN}))
    else:
        (folder / "chat_template.jinja").write_text(PLAIN)
    if place == "folder":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.chat_template(tools=False) == PLAIN
    assert tokenizer.chat_template(tools=True) == (TOOLS if place in ("list", "folder") else PLAIN)


def without_json(folder: Path) -> Path:
    """Returns a folder with the files of GPT-2's tokenizer from before tokenizer.json existed."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("".join(" ".join(merge) + "\n" for merge in model["merges"]))
    (folder / "tokenizer.json").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {
        "tokenizer_class": "Qwen2Tokenizer"
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_a_tokenizer_of_vocabulary_and_merges_is_converted_once_into_our_own_cache(
    folder: Path, home: Path
) -> None:
    """The model's folder stays unchanged; the result serves texts, checks and grammars."""
    expected = AutoTokenizer.from_pretrained(without_json(folder)).encode(TEXT)
    before = content(folder)
    assert resolve_model(str(folder)) == folder
    (made,) = home.rglob("tokenizer.json")
    made_at = made.stat().st_mtime_ns
    assert tokenizer_file(folder) == made
    assert Tokenizer.load(folder)._encode(TEXT, True) == expected
    vocab_size = len(make_tokenizer()) + 1  # the class of the tokenizer adds a token
    grammar = json.dumps({"grammars": [{"lark_grammar": 'start: "yes"'}]})
    assert GrammarCache(folder, vocab_size, [0]).load(grammar).mask.any()
    assert resolve_model(str(folder)) == folder
    assert made.stat().st_mtime_ns == made_at
    assert content(folder) == before


def test_a_folder_whose_files_have_changed_gets_another_tokenizer_and_few_are_kept(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_model(str(without_json(folder)))
    first = tokenizer_file(folder)
    (folder / "merges.txt").write_text((folder / "merges.txt").read_text().rpartition("\n")[0])
    assert tokenizer_file(folder) == folder / "tokenizer.json"  # which is not there
    resolve_model(str(folder))
    assert tokenizer_file(folder) not in (first, folder / "tokenizer.json")
    assert len(list(home.rglob("tokenizer.json"))) == 2
    monkeypatch.setattr(store, "_MAX_TOKENIZERS", 1)
    os.utime(folder / "merges.txt", (0, 0))
    resolve_model(str(folder))
    assert list(home.rglob("tokenizer.json")) == [tokenizer_file(folder)]


@pytest.mark.skipif(
    os.geteuid() == 0 and not shutil.which("unshare"), reason="root may write everywhere"
)
def test_a_model_on_a_disk_that_cannot_be_written_is_resolved(folder: Path, home: Path) -> None:
    without_json(folder)
    resolve = (
        "import sys; from tandem.cluster.store.store import resolve_model; "
        "print(resolve_model(sys.argv[1]))"
    )
    command = [sys.executable, "-c", resolve, str(folder)]
    if os.geteuid() == 0:
        mount = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", mount, "sh", str(folder), *command]
    else:
        folder.chmod(0o500)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(folder)), done.stderr
    assert tokenizer_file(folder).is_relative_to(home)


def test_a_converted_tokenizer_on_a_disk_that_cannot_be_written_is_taken(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_model(str(without_json(folder)))

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    assert resolve_model(str(folder)) == folder


def test_a_tokenizer_that_cannot_be_converted_is_refused_in_a_line(
    folder: Path, home: Path
) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError) as failure:
        resolve_model(str(folder))
    assert str(failure.value).startswith(
        "tokenizer.json: not found, and cannot be made of tokenizer.model: "
    )
    assert not re.search(r"Traceback|\n", str(failure.value))
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert not list(home.rglob("tokenizer*/*/*"))


def test_a_sentencepiece_model_is_converted(tmp_path: Path, home: Path) -> None:
    SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT, "The river and the capital answer the question. " * 3]),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=400,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    resolve_model(str(tmp_path))
    expected = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model")).encode(TEXT)
    assert Tokenizer.load(tmp_path)._encode(TEXT, True) == [1, *expected]


def write_tekken(folder: Path, **fields: object) -> None:
    """Writes the bytes and two words in Mistral's format; their ids follow ten special tokens."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"th", b"the"]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    config = {
        "pattern": SPLIT,
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": 10 + len(tokens),
        "default_num_special_tokens": 10,
        "version": "v7",
    }
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab} | fields))


async def test_mistrals_tekken_json_is_converted(tmp_path: Path, home: Path) -> None:
    """Texts begin with <s>, and chat templates know the names of the special tokens."""
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    write_tekken(
        tmp_path,
        special_tokens=[
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(special)
        ],
    )
    resolve_model(str(tmp_path))
    template = "{{ bos_token }}[INST]{{ messages[0].content }}{{ eos_token }}"
    tokenizer = Tokenizer.load(tmp_path, chat_template=template)
    the, blank, two = 10 + 257, 10 + ord(" "), 10 + ord("2")
    assert tokenizer._encode("the the22", True) == [1, the, blank, the, two, two]
    message = inference_pb2.ChatMessage(role="user", content="the")
    assert await tokenizer.encode_chat(inference_pb2.Chat(messages=[message])) == [1, 3, the, 2]
    assert tokenizer.decode([1, the, blank, two]) == "the 2"


def test_a_tekken_json_without_special_tokens_names_the_package_that_knows_them(
    tmp_path: Path, home: Path
) -> None:
    write_tekken(tmp_path)
    with pytest.raises(CheckpointError) as failure:
        resolve_model(str(tmp_path))
    assert str(failure.value).startswith(
        "tokenizer.json: not found, and cannot be made of tekken.json: transformers "
    )
    assert "mistral-common" in str(failure.value)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for m in messages %}{{ m.content",
            "is not valid Jinja in line 1 (unexpected end of template, expected 'end of print "
            "statement'.): it cannot render a chat of one message",
        ),
        (
            "{{ messages[0].content | nothing }}",
            "is not valid Jinja in line 1 (No filter named 'nothing'.): it cannot render a chat of "
            "one message",
        ),
        ("{{ nothing() }}", "refuses these messages: it cannot render a chat of one message"),
        ("{{ raise_exception('a system message is needed') }}", ""),
        ("{{ messages[0].content }}", ""),
        (None, ""),
    ],
)
def test_a_chat_template_that_cannot_render_is_refused_at_the_start(
    tmp_path: Path, template: str | None, reason: str
) -> None:
    folder = make_tiny_model(tmp_path / "model")
    put_in_config(folder, template)
    config = TandemConfig(model=str(folder))
    if not reason:
        assert checked_folder(config) == folder
        return
    with pytest.raises(CheckpointError) as failure:
        checked_folder(config)
    assert str(failure.value) == f"the model's chat template {reason}"
