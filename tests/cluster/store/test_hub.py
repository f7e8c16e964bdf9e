"""Tests hub ids against a small hub on this machine: downloaded files and refusals."""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import huggingface_hub.constants
import pytest

from tandem.cluster.config import load_config
from tandem.cluster.store.store import resolve_config, resolve_model
from tandem.proto.errors import (
    InvalidArgument,
    NotFound,
    PermissionDenied,
    TandemError,
    Unavailable,
)
from tandem.tests.waits import WAIT

SHA = "a" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"hello",
    "additional_chat_templates/tool_use.jinja": b"hello with tools",
    "modules.json": b"[]",
    "1_Pooling/config.json": b'{"pooling_mode": "mean"}',
    "2_Dense/config.json": b"{}",
    "2_Dense/model.safetensors": b"another matrix",
    "merges.txt": b"a b",
    "tokenizer.model": b"model",
    "pytorch_model.bin": b"\x80",
    "modeling_own.py": b"raise SystemExit",
    "consolidated.safetensors": b"the same weights",
    "original/model.safetensors": b"the same weights",
    "original/params.json": b"{}",
}


def etag(name: str) -> str:
    """Returns the hub's name of a file: SHA-256 for large files, git's SHA-1 for others."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(FILES[name]).hexdigest()
    return hashlib.sha1(b"blob %d\0%b" % (len(FILES[name]), FILES[name])).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """Serves `org/tiny` at main, v1 and SHA, with other bytes for the file `changed`.

    `org/gated` is gated, `org/broken` answers 500, everything else does not exist.
    """

    changed = ""

    def do_HEAD(self) -> None:
        self._serve(with_body=False)

    def do_GET(self) -> None:
        self._serve(with_body=True)

    def _serve(self, *, with_body: bool) -> None:
        status, headers, body = self._answer()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _answer(self) -> tuple[int, dict[str, str], bytes]:
        if "org/gated" in self.path:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if "org/broken" in self.path:
            return 500, {}, b"a stack of secrets"
        if self.path.startswith("/api/models/org/tiny/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(FILES[name]), "oid": name}
                for name in FILES
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        revision = self.path.partition("/revision/")[2]
        if revision not in ("", "main", "v1", SHA):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if self.path.startswith("/api/models/org/tiny"):
            info = {
                "id": "org/tiny",
                "sha": SHA,
                "siblings": [{"rfilename": name} for name in FILES],
            }
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        name = re.sub(f"^/org/tiny/resolve/(main|{SHA})/", "", self.path)
        if name in FILES:
            body = FILES[name].swapcase() if name == self.changed else FILES[name]
            return 200, {"ETag": f'"{etag(name)}"', "X-Repo-Commit": SHA}, body
        return 404, {"X-Error-Code": "RepoNotFound"}, b""

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    here = f"http://127.0.0.1:{server.server_port}"
    files = f"{here}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", here)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    yield server
    server.shutdown()
    server.server_close()
    thread.join(WAIT)


def test_a_hub_id_brings_only_what_is_safe_to_load_and_then_works_offline(
    hub: ThreadingHTTPServer,
) -> None:
    folder = resolve_model("org/tiny")
    got = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    unwanted = ("pytorch_model.bin", "modeling_own.py", "consolidated.safetensors")
    assert got == {
        name: FILES[name]
        for name in FILES
        if not name.startswith(("original/", "2_Dense/")) and name not in unwanted
    }
    hub.shutdown()
    hub.server_close()
    assert resolve_model("org/tiny") == folder


def test_a_config_comes_without_weights_and_then_offline(hub: ThreadingHTTPServer) -> None:
    path = resolve_config("org/tiny")
    assert path.read_bytes() == FILES["config.json"]
    assert [each.name for each in path.parent.iterdir()] == ["config.json"]
    for name, kind in (("org/none", NotFound), ("org/gated", PermissionDenied)):
        with pytest.raises(kind, match=f"^model: .*{name}"):
            resolve_config(name)
    hub.shutdown()
    hub.server_close()
    assert resolve_config("org/tiny") == path


@pytest.mark.parametrize("revision", ["v1", SHA])
def test_a_revision_is_pinned(hub: ThreadingHTTPServer, revision: str) -> None:
    folder = resolve_model(f"org/tiny@{revision}")
    assert folder.name == SHA
    assert (folder / "config.json").read_bytes() == FILES["config.json"]
    config = load_config(None, {"model": f"org/tiny@{revision}"})
    assert config.served_name == "tiny"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "additional_chat_templates/tool_use.jinja"]
)
def test_a_file_that_is_not_the_published_one_is_refused(
    hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(FILES, "tokenizer.json", b'{"a": 1}')
    monkeypatch.setattr(Hub, "changed", name)
    with pytest.raises(
        Unavailable, match=f"{Path(name).name} in the cache of the hub is not the published file"
    ):
        resolve_model("org/tiny")


def test_a_file_that_was_changed_in_the_cache_is_refused(hub: ThreadingHTTPServer) -> None:
    (resolve_model("org/tiny") / "model.safetensors").resolve().write_bytes(b"WEIGHTS")
    with pytest.raises(Unavailable, match=r"model\.safetensors"):
        resolve_model("org/tiny")


def test_a_file_of_the_blobs_that_repositories_share_is_checked_by_its_own_hash(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    """The name of a shared blob is a hash of another kind."""
    weights = resolve_model("org/tiny") / "model.safetensors"
    blob, shared = (
        weights.parent / weights.readlink(),
        tmp_path / "hub" / "blobs" / "ab" / ("ab" * 32),
    )
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(shared)
    assert resolve_model("org/tiny") == weights.parent
    shared.write_bytes(b"WEIGHTS")
    with pytest.raises(Unavailable, match=r"model\.safetensors"):
        resolve_model("org/tiny")


@pytest.mark.parametrize(
    ("model", "kind", "text"),
    [
        ("org/tiny@nope", InvalidArgument, "no revision 'nope'"),
        ("org/absent", NotFound, "no public model org/absent"),
        ("org/gated", PermissionDenied, "org/gated is gated"),
        ("org/broken", Unavailable, "cannot be downloaded from the Hugging Face hub"),
    ],
)
def test_a_refusal_ends_in_one_line(
    hub: ThreadingHTTPServer, model: str, kind: type[TandemError], text: str
) -> None:
    with pytest.raises(kind) as failure:
        resolve_model(model)
    assert text in failure.value.message
    assert "\n" not in failure.value.message
    assert "secrets" not in failure.value.message


@pytest.mark.parametrize(
    ("added", "advice"),
    [
        ([], ""),
        (["tiny; ls.gguf"], ""),  # not a name for a command that is copied
        (
            ["BF16/tiny.gguf", "tiny-Q4_0.gguf"],
            ", but GGUF files: `hf download org/tiny BF16/tiny.gguf`, for example, prints the path "
            "to give",
        ),
    ],
)
def test_a_repository_without_safetensors_is_refused_before_the_download(
    hub: ThreadingHTTPServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    added: list[str],
    advice: str,
) -> None:
    for name in ("model.safetensors", "consolidated.safetensors"):
        monkeypatch.delitem(FILES, name)
    for name in added:
        monkeypatch.setitem(FILES, name, b"GGUF")
    with pytest.raises(InvalidArgument) as refused:
        resolve_model("org/tiny")
    assert str(refused.value) == f"model: org/tiny has no safetensors weights on the hub{advice}"
    assert not (tmp_path / "hub").exists()


@pytest.mark.parametrize("resolve", [resolve_model, resolve_config])
@pytest.mark.parametrize("revision", ["", f"@{SHA}"])
def test_without_a_hub_a_hub_id_ends_in_one_line_without_waiting_to_ask_again(
    hub: ThreadingHTTPServer,
    monkeypatch: pytest.MonkeyPatch,
    resolve: Callable[[str], Path],
    revision: str,
) -> None:
    hub.shutdown()
    hub.server_close()
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits to ask again"))
    with pytest.raises(Unavailable) as failure:
        resolve(f"org/tiny{revision}")
    assert failure.value.message == (
        "model: org/tiny is not a local folder, is not in the cache, and cannot be downloaded from "
        "the Hugging Face hub; offline, give a local folder, or set HF_HOME to a cache that has it"
    )


def test_a_cache_that_cannot_be_written(
    hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    with pytest.raises(
        Unavailable, match=r"^model: org/tiny cannot be stored: .*set HF_HOME to"
    ) as refused:
        resolve_model("org/tiny")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "what://127.0.0.1:9"])
def test_a_proxy_that_cannot_be_used(
    hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    huggingface_hub.close_session()  # it has read the environment
    try:
        with pytest.raises(Unavailable, match=r"hub cannot be asked for org/tiny: .*all_proxy"):
            resolve_model("org/tiny")
    finally:
        huggingface_hub.close_session()
