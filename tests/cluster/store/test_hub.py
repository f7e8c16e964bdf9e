"""Hub ids against a small hub on this machine: what is fetched, and how each refusal ends."""

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import huggingface_hub.constants
import pytest

from tandem.cluster.store.store import resolve_model
from tandem.proto.errors import NotFound, PermissionDenied, TandemError, Unavailable

SHA = "a" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"hello",
    "pytorch_model.bin": b"\x80",
    "modeling_own.py": b"raise SystemExit",
    "consolidated.safetensors": b"the same weights",
    "original/model.safetensors": b"the same weights",
}


class Hub(BaseHTTPRequestHandler):
    """Serves `org/tiny`; `org/gated` is gated, `org/broken` answers 500, everything else does not exist."""

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
            tree = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": name} for name in FILES]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        if self.path.startswith("/api/models/org/tiny"):
            info = {"id": "org/tiny", "sha": SHA, "siblings": [{"rfilename": name} for name in FILES]}
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        name = self.path.removeprefix(f"/org/tiny/resolve/{SHA}/")
        if name in FILES:
            return 200, {"ETag": f'"{name}"', "X-Repo-Commit": SHA}, FILES[name]
        return 404, {"X-Error-Code": "RepoNotFound"}, b""

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


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
    thread.join()


def test_a_hub_id_brings_only_what_is_safe_to_load_and_then_works_offline(hub: ThreadingHTTPServer) -> None:
    folder = resolve_model("org/tiny")
    got = {path.name: path.read_bytes() for path in folder.iterdir()}
    wanted = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
    assert got == {name: FILES[name] for name in wanted}
    hub.shutdown()
    hub.server_close()
    assert resolve_model("org/tiny") == folder


@pytest.mark.parametrize(
    ("model", "kind", "text"),
    [
        ("org/absent", NotFound, "no public model org/absent"),
        ("org/gated", PermissionDenied, "org/gated is gated"),
        ("org/broken", Unavailable, "does not deliver it"),
    ],
)
def test_a_refusal_ends_in_one_line(hub: ThreadingHTTPServer, model: str, kind: type[TandemError], text: str) -> None:
    with pytest.raises(kind) as failure:
        resolve_model(model)
    assert text in failure.value.message
    assert "\n" not in failure.value.message
    assert "secrets" not in failure.value.message


def test_without_a_hub_a_hub_id_ends_in_one_line_at_once(hub: ThreadingHTTPServer) -> None:
    hub.shutdown()
    hub.server_close()
    started = time.monotonic()
    with pytest.raises(Unavailable) as failure:
        resolve_model("org/tiny")
    assert time.monotonic() - started < 5
    assert failure.value.message == (
        "model: org/tiny is no folder here, not in the cache, and the Hugging Face hub does not deliver it (offline?)"
    )
