"""Tests the words of errors for wrong fields."""

from typing import Annotated

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tandem.router.fields import error_text, matching


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, matching(r"[a-z]\w{0,9}", "1 to 10 letters, a lowercase one first")] = "a"
    hash: Annotated[str, matching("[0-9a-f]{4}", "4 digits", is_secret=True)] = "0123"
    count: int = Field(default=1, ge=1)
    needed: int


def reason(**fields: object) -> str:
    with pytest.raises(ValidationError) as caught:
        _Entry.model_validate({"needed": 1, **fields})
    (entry,) = caught.value.errors()
    return error_text(entry)


def test_a_text_must_match_as_a_whole() -> None:
    assert _Entry(name="a_1", needed=1).name == "a_1"
    for wrong in ("", "A", "a b", "a\n", "aé", "b" * 11):
        words = "must be 1 to 10 letters, a lowercase one first, got "
        assert reason(name=wrong) == words + repr(wrong)


def test_a_long_text_is_cut_and_a_secret_one_is_not_shown() -> None:
    assert len(reason(name="b" * 1_000)) < 140
    assert reason(hash="tandem-key") == "must be 4 digits"


def test_pydantics_words_become_those_of_the_other_errors() -> None:
    assert reason(count=0) == "must be greater than or equal to 1"
    assert reason(other=1) == "unknown key"
    with pytest.raises(ValidationError) as caught:
        _Entry.model_validate({})
    assert error_text(caught.value.errors()[0]) == "missing"
