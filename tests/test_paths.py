"""Checks the paths of paths.py: their functions exist and are linked."""

from pathlib import Path

import pytest

from tandem.tests.paths import PATHS, count, parse, problems


@pytest.mark.parametrize("name", PATHS)
def test_every_function_of_a_path_exists_and_is_linked_to_the_one_before(name: str) -> None:
    assert problems(parse(PATHS[name][0])) == []


@pytest.mark.parametrize("name", PATHS)
def test_a_path_is_short(name: str) -> None:
    path, most_functions, most_files = PATHS[name]
    functions, files = count(parse(path))
    assert (functions <= most_functions, files <= most_files) == (True, True), (functions, files)


SOURCE = """
class Server:
    def __init__(self): self.queue = []
    def handle(self, x): return check(self.put(x))
    def put(self, x): self.queue.append(x)
    def take(self): return self.queue.pop()

def check(x): return x
def make(): return Server()
"""


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("a:Server.handle\na:Server.put\na:Server.take ~ queue\na:check < Server.handle", ""),
        ("a:Server.put\na:Server.handle", ""),  # what it returns
        ("a:make\na:Server.__init__", ""),
        ("a:Server.handle\na:Server.gone", "a:Server.gone does not exist"),
        ("a:Server.handle\nb:check", "b:check does not exist"),
        ("a:Server.handle\na:Server.take", "Server.take is not linked to Server.handle"),
        ("a:Server.handle\na:Server.put ~ queue", "Server.put is not linked to Server.handle"),
        ("a:Server.handle\na:Server.put\na:check", "check is not linked to Server.put"),
    ],
)
def test_what_is_not_linked_is_found(path: str, wrong: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    assert problems(parse(path), tmp_path) == ([wrong] if wrong else [])


def test_functions_and_files_are_counted_once() -> None:
    assert count(parse("a:f\nb:g\na:f < g\na:h")) == (3, 2)
