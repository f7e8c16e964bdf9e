"""The folder of caches: where it is by the environment, and that every part of Tandem asks here."""

import re
from pathlib import Path

import pytest

from tandem.proto.home import cache_home
from tandem.tests.source import ROOT


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TANDEM_HOME": "/srv/tandem"}, "/srv/tandem"),
        ({"TANDEM_HOME": "~/models", "HOME": "/home/a"}, "/home/a/models"),
        ({"TANDEM_HOME": "", "XDG_CACHE_HOME": "/cache"}, "/cache/tandem"),
    ],
)
def test_the_environment_names_the_folder(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_home() == Path(expected)


def test_one_function_computes_the_folder() -> None:
    readers = [
        str(path.relative_to(ROOT))
        for folder in ("cluster", "proto", "router", "workers")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"environ.*TANDEM_HOME|user_cache_(path|dir)", path.read_text())
    ]
    assert readers == ["proto/home.py"]
