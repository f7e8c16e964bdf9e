"""Carries out the recipes of docs/extending.md on toys."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import typer
from typer.testing import CliRunner

from tandem.tests.stub_service import stub_service

PAGE: Final = Path(__file__).parents[1] / "docs" / "extending.md"


def recipe(title: str) -> str:
    """Returns the first code block of a section of the page, without its indentation."""
    section = PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    indentation, code = re.findall(r"^( *)```\n(.*?)^ *```$", section, re.MULTILINE | re.DOTALL)[0]
    return re.sub(f"^{indentation}", "", code, flags=re.MULTILINE)


def load(name: str, source: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """Imports `source` as the module `name` of the package, as if its file lay there."""
    path = folder / f"{name.rpartition('.')[2]}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toy = load("tandem.cluster.cli.count", recipe("A command"), monkeypatch, tmp_path)
    app = typer.Typer()
    app.command()(toy.count)
    assert "Count the tokens of a text." in CliRunner().invoke(app, ["--help"]).output
    with stub_service(lambda request: []) as service:
        found = CliRunner().invoke(app, ["four", "--url", service.address])
    assert (found.exit_code, found.output) == (0, "5\n")  # the stub begins with a special token


TOYS: Final = {
    "A model family": "workers/model/test_extension.py",
    "A linear method": "workers/model/test_extension.py",
    "A sampling parameter": "proto/test_new_parameter.py",
    "A transport": "workers/transfer/test_toy_transport.py",
}


@pytest.mark.parametrize("title", TOYS)
def test_a_recipe_shows_the_code_of_its_toy(title: str) -> None:
    """The tests of these files carry the recipes out."""

    def lines(text: str) -> str:
        return "\n".join(line.strip() for line in text.splitlines())

    assert lines(recipe(title)).strip() in lines((Path(__file__).parent / TOYS[title]).read_text())
