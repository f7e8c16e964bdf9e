"""Tests every key of the configuration with values of wrong kinds and out of bounds.

Each is refused in lines that name the key, and a valid file is then read as before.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from tandem.cluster.config import TandemConfig, load_config
from tandem.proto.errors import InvalidArgument

WRONG: tuple[object, ...] = (
    -(10**30),
    10**30,
    -1.5,
    float("nan"),
    float("inf"),
    "\u0000",
    "x" * 10_000,
    [[]],
    {"x": {}},
)
FILES: tuple[bytes, ...] = (
    b"\xff\xfe",
    b"- a",
    b"7",
    b"model: [",
    b"model: !!python/object/apply:os.system [ls]",
    b"a: &a [*a]",
    b"\x00",
    b"{" * 1_000,
    b"model: m\nmodel: {}",
    b"model: m\nrouter: 7",
    b"x" * 2_000_000,
    b"a: &a {}\n<<: *a",
    b"? []\n: 1",
)


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{prefix}{name}.")
        yield prefix + name


@pytest.fixture(scope="module")
def good() -> TandemConfig:
    return load_config(None, {"model": "m"})


def refusal(key: str, value: object) -> str:
    try:
        load_config(None, {"model": "m", key: value})
    except InvalidArgument as error:
        return error.message
    return ""


@pytest.mark.parametrize("key", list(keys(TandemConfig)))
def test_each_key_refuses_what_it_cannot_mean(key: str, good: TandemConfig) -> None:
    refusals = [text for value in WRONG if (text := refusal(key, value))]
    for text in refusals:
        assert text.startswith(key.split(".")[0])
        assert all(len(line) < 500 for line in text.splitlines())
        assert not re.search(r"Traceback|pydantic|https?://errors", text)
    assert len(refusals) >= len(WRONG) - 3  # a text may be any text
    assert load_config(None, {"model": "m"}) == good


@pytest.mark.parametrize("data", FILES, ids=range(len(FILES)))
def test_a_file_that_is_no_configuration(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "service.yaml"
    path.write_bytes(data)
    with pytest.raises(InvalidArgument) as caught:
        load_config(path)
    assert not re.search(r"Traceback|File \"|yaml\.", caught.value.message.replace(str(path), ""))


def test_there_are_five_hundred() -> None:
    assert len(list(keys(TandemConfig))) * len(WRONG) + len(FILES) > 500


def test_what_a_file_says_can_be_written_again() -> None:
    assert load_config(None, yaml.safe_load("model: m"))
