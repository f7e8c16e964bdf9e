"""Tests keys of `--api-key` and TANDEM_API_KEY: hashed at once, shown nowhere, refused with
others.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cluster import given_keys
from tandem.cluster.cli.main import app
from tandem.cluster.config import check_interface, load_config
from tandem.cluster.given_keys import hash_given_keys, hide_given_keys
from tandem.proto.errors import InvalidArgument
from tandem.router.auth.keys import create_key, operator_keys
from tandem.router.client.wire import API_KEY_VARIABLE
from tandem.tests.cluster.test_from_vllm import served


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def serve_fails(*args: str) -> str:
    """Returns the error of `tandem serve m` with these arguments."""
    with pytest.raises(InvalidArgument) as caught:
        CliRunner().invoke(app, ["serve", "m", *args], catch_exceptions=False)
    return str(caught.value)


def test_keys_of_flags_and_of_the_file_are_hashed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "service.yaml"
    for text, keys in (
        ("api-key: one", ["one"]),
        ("api_key: [one, two, one]", ["one", "two"]),
        ('api-key: "1"', ["1"]),
    ):
        file.write_text(f"model: m\n{text}\n")
        config = load_config(file)
        assert config.auth.key_hashes == tuple(map(sha256, keys))
        assert "'one'" not in repr(config)
    config = served(monkeypatch, "--config", str(file), "--api-key", "a", "--api-key=b")
    assert config.auth.key_hashes == (sha256("a"), sha256("b"))
    check_interface(config.auth, "0.0.0.0")  # a service with keys may listen anywhere


@pytest.mark.parametrize("wrong", ["", " ", "a b", "sécret", "k" * 257, "line\n"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_quoted(wrong: str) -> None:
    text = "must be 1 to 256 visible ASCII characters without a space"
    assert serve_fails("--api-key", "good", "--api-key", wrong) == f"api_key: {text}"
    with pytest.raises(InvalidArgument, match=f"^x: {text}$"):
        hash_given_keys(wrong, "x")


@pytest.mark.parametrize("wrong", ["api-key: 17", "api-key: [17]", "api-key: {a: b}", "api-key:"])
def test_a_key_of_the_file_must_be_a_text(wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(f"model: m\n{wrong}\n")
    with pytest.raises(InvalidArgument, match=r"^api_key: must be 1 to 256 visible ASCII"):
        load_config(file)


def test_a_service_has_one_source_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    create_key(file, name="ada", tenant="ada")
    assert serve_fails("--api-key", "one", "--api-keys", str(file)) == (
        "auth.key_hashes (--api-key): cannot be set together with auth.keys_file (--api-keys)"
    )
    assert serve_fails("--api-key", "one", "--allow-anonymous") == (
        "auth.allow_anonymous: cannot be set together with auth.key_hashes"
    )
    for hashes in (["A" * 64], ["a" * 63], ["a" * 64] * 65):
        with pytest.raises(InvalidArgument, match=r"^auth\.key_hashes"):
            load_config(None, {"model": "m", "auth.key_hashes": hashes})


def test_the_key_of_the_environment_counts_where_nothing_else_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "keys.json"
    create_key(file, name="ada", tenant="ada")
    for flags, keys in (
        ((), ("own",)),
        (("--api-key", "one"), ("one",)),
        (("--api-keys", str(file)), ()),
        (("--allow-anonymous",), ()),
    ):
        monkeypatch.setenv(API_KEY_VARIABLE, "own\n")
        config = served(monkeypatch, *flags)
        assert config.auth.key_hashes == tuple(map(sha256, keys))
        assert API_KEY_VARIABLE not in os.environ  # Ray's processes inherit it
    for empty in ("", " "):
        monkeypatch.setenv(API_KEY_VARIABLE, empty)
        assert not served(monkeypatch).auth.needs_key
    monkeypatch.setenv(API_KEY_VARIABLE, "a b")
    assert serve_fails().startswith(f"{API_KEY_VARIABLE}: must be 1 to 256")


def test_a_given_key_has_the_rights_of_an_operator() -> None:
    keys = operator_keys([sha256("one"), sha256("two")])
    assert [(key.name, key.tenant, key.operator) for key in keys] == [
        ("api-key-1", "default", True),
        ("api-key-2", "default", True),
    ]
    assert keys[0].requests_per_minute is keys[0].max_streams is None
    assert keys[0].expires is None


HIDE = """
import json
from pathlib import Path

import psutil
from ray._private.utils import get_entrypoint_name

from tandem.cluster.given_keys import hide_given_keys

before = psutil.Process().cmdline()
hide_given_keys()
after = psutil.Process().cmdline()
print(json.dumps([before, after, get_entrypoint_name()]))
"""


@pytest.mark.io
def test_the_command_line_does_not_show_the_keys() -> None:
    """Ray records it as the entry point of the driver, which its dashboard shows."""
    flags = ["m", "--api-key", "first", "--api-key=second", "--host", "first", "--api-keys", "f"]
    done = subprocess.run(
        [sys.executable, "-c", HIDE, *flags, "--api-key"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    before, after, entrypoint = json.loads(done.stdout)
    shown = ["m", "--api-key", "*****", "--api-key=******", *flags[4:], "--api-key"]
    assert before[3:] == [*flags, "--api-key"]
    assert (after[:3], after[3:]) == (before[:3], shown)
    assert entrypoint.endswith(" ".join(shown))
    assert "second" not in entrypoint


def test_a_key_that_cannot_be_hidden_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(given_keys, "_PROCESS", tmp_path)
    for content in (None, "1 (python) S 1"):
        if content is not None:
            (tmp_path / "stat").write_text(content)
        with pytest.raises(InvalidArgument, match=r"^--api-key: cannot be hidden in the command"):
            hide_given_keys()
