"""Where built kernels are kept; the compiler is replaced."""

import ctypes
import shlex
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tandem.workers.model.kernels.c import build


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Yields the libraries that were built; those in the folder `home/x` cannot be."""
    made: list[Path] = []

    def make(compiler: Sequence[str], library: Path) -> None:
        library.parent.mkdir(parents=True, exist_ok=True)
        library.write_text(shlex.join(compiler))
        made.append(library)

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(build, "_build", make)
    monkeypatch.setattr(build, "_fingerprint", lambda compiler: f"of-{shlex.join(compiler)}")
    monkeypatch.setattr(ctypes, "CDLL", lambda path: f"loaded {path}")
    monkeypatch.setenv("CC", "")
    build.library.cache_clear()
    yield made
    build.library.cache_clear()


def test_in_the_home_of_tandem(
    built: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TANDEM_HOME", "~/home")
    assert str(build.library()) == f"loaded {tmp_path}/home/kernels/of-cc.so"
    assert built == [tmp_path / "home" / "kernels" / "of-cc.so"]


def test_in_a_temporary_folder_of_the_user_where_the_home_cannot_be_written(
    built: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    assert str(build.library()).startswith(f"loaded {tmp_path}/temporary/tandem-kernels-")
    (library,) = built
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    build.library.cache_clear()
    assert build.library() is not None
    assert len(built) == 1, "the second process loads what the first has built"


def test_nothing_is_loaded_from_a_folder_where_others_may_write(
    built: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    build.library()
    built[0].parent.chmod(0o770)
    build.library.cache_clear()
    assert build.library() is None
