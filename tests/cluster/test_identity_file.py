import stat
from pathlib import Path

import pytest

from tandem.cluster.serve.identity_file import identity_path, kept_identity, read_identity
from tandem.proto.errors import NotFound
from tandem.proto.identity import PeerIdentity

URL = "http://127.0.0.1:8000/tandem"
IDENTITY = PeerIdentity.generate()


def test_it_is_there_for_the_user_while_the_service_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    with kept_identity(IDENTITY, URL):
        assert stat.S_IMODE(identity_path(URL).stat().st_mode) == 0o600
        assert read_identity(URL).secret == IDENTITY.secret
    with pytest.raises(NotFound):
        read_identity(URL)


def test_a_service_runs_without_it_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "file"))
    with kept_identity(IDENTITY, URL):
        (line,) = caplog.messages
        assert line.startswith("`tandem drain` will not work: ")
        assert line.endswith("Not a directory; set TANDEM_HOME to a folder that can be written")
    with pytest.raises(NotFound):
        read_identity(URL)
