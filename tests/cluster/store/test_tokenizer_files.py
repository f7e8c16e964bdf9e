"""Tests folders without tokenizer.json, and all places of chat templates in folders of the hub."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tandem.cluster.config import TandemConfig
from tandem.cluster.store import store
from tandem.cluster.store.checked import checked_folder
from tandem.cluster.store.store import resolve_model
from tandem.proto.home import tokenizer_file
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
