"""`tandem key`: the commands that keep the file of API keys, and `tandem serve` with a wrong
one.
"""

import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cluster.cli.key import key_app
from tandem.cluster.cli.main import app
from tandem.cluster.cli.options import read_api_key
from tandem.cluster.serve.identity_file import read_identity
from tandem.cluster.service_url import ServiceAccess
from tandem.proto.errors import InvalidArgument, NotFound, Unavailable
from tandem.proto.identity import PeerIdentity
from tandem.router.auth.keys import hash_key, load_keys
from tandem.router.client.wire import API_KEY_VARIABLE


def run(*args: str) -> str:
    result = CliRunner().invoke(key_app, args)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_create_list_revoke(tmp_path: Path) -> None:
    path = str(tmp_path / "keys.json")
    secret = run(
        "create", path, "laptop", "--tenant", "ada", "--max-streams", "8", "--expires", "2020-01-31"
    ).strip()
    run("create", path, "bob")
    first, second = load_keys(path)
    assert first.sha256 == hash_key(secret).hex()
    assert (first.tenant, first.max_streams, second.tenant, second.max_streams) == (
        "ada",
        8,
        "bob",
        None,
    )
    listed = run("list", path)
    for text in ("laptop", "ada", "2020-01-31 00:00 UTC (expired)", first.sha256[:12]):
        assert text in listed
    assert secret not in listed
    run("revoke", path, "laptop")
    assert [key.name for key in load_keys(path)] == ["bob"]
    with pytest.raises(NotFound):
        run("revoke", path, "laptop")


@pytest.mark.parametrize("has_more", [True, False])
def test_usage_tells_if_its_sums_are_not_complete(
    monkeypatch: pytest.MonkeyPatch, has_more: bool
) -> None:
    names = ("requests", "failed", "prompt_tokens", "cached_tokens", "generated_tokens")
    row = {"day": "2026-11-27", "key_name": "laptop", "tenant": "ada"} | dict.fromkeys(names, 1)
    found = {"data": [row], "has_more": has_more}
    monkeypatch.setattr(ServiceAccess, "read", lambda access, path: found)
    result = CliRunner().invoke(key_app, ["usage", "--since", "2026-11-01"])
    assert result.exception is None
    assert result.stdout.splitlines()[1].split()[:3] == ["laptop", "ada", "1"]
    told = "only the newest 1 rows are counted, of which the last are of 2026-11-27"
    assert (told in result.stderr) is has_more


def test_serve_refuses_a_wrong_file_before_anything_starts(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "m", "--api-keys", str(tmp_path / "absent.json")])
    assert isinstance(result.exception, InvalidArgument)
    assert "No such file" in result.exception.message


def test_commands_take_the_key_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other users of the machine see the arguments of a command."""
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    assert read_api_key(None) == ""
    monkeypatch.setenv(API_KEY_VARIABLE, "from the environment\n")  # as of a Kubernetes Secret
    assert read_api_key(None) == "from the environment"
    (tmp_path / "key").write_text("from a file\n")
    assert read_api_key(tmp_path / "key") == "from a file"
    for command in ("generate", "chat", "status", "drain", "bench"):
        options = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
        assert "--api-key-file" in options
        assert "--api-key " not in options
        assert "--tls-ca" in options


def test_an_identity_is_made_once_and_read_by_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    run("identity", str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    made = PeerIdentity.from_text(path.read_text())
    assert made.tls is not None
    with pytest.raises(Unavailable, match="exists"):
        run("identity", str(path))
    assert PeerIdentity.from_text(path.read_text()) == made
    run("identity", str(tmp_path / "plain"), "--no-tls")
    assert read_identity("", tmp_path / "plain").tls is None
