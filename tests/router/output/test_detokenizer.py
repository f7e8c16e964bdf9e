from collections.abc import Sequence
from functools import cache
from typing import TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from tandem.router.frontend.tokenizer import Tokenizer
from tandem.router.output.choice import CompletionText
from tandem.router.output.detokenizer import Detokenizer
from tandem.router.stopping.rules import StopRules
from tandem.tests.examples import num_examples
from tandem.tests.router.fake_source import BOS_ID, EOS_ID, byte_tokenizer
from tandem.tests.tiny_tokenizer import make_tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=10)
BYTES = byte_tokenizer()
T = TypeVar("T")


@cache
def merged() -> Tokenizer:
    """Byte-level with merges: tokens that hold parts of characters and several characters."""
    return Tokenizer(make_tokenizer())


@cache
def byte_fallback() -> Tokenizer:
    """Returns a tokenizer as by SentencePiece: a mark for spaces, byte tokens, no leading space."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", "a", "b", "▁a", "ab", "▁Paris", "é"]
    backend = Backend(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True
        )
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))  # type: ignore[no-untyped-call]


def pieces_of(ids: Sequence[T], cuts: Sequence[int]) -> list[Sequence[T]]:
    """`ids` in pieces whose lengths go round `cuts`."""
    pieces: list[Sequence[T]] = []
    start = 0
    while start < len(ids):
        end = start + cuts[len(pieces) % len(cuts)]
        pieces.append(ids[start:end])
        start = end
    return pieces


def run(tokenizer: Tokenizer, prompt: Sequence[int], pieces: Sequence[Sequence[int]]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.flush()]


def check_pieces_make(whole: str, texts: Sequence[str]) -> None:
    """Checks that each shown text begins the final text, so no U+FFFD appears that is not in it."""
    shown = ""
    for text in texts:
        shown += text
        assert whole.startswith(shown)
    assert shown == whole


@given(TEXT, TEXT, CUTS)
@settings(max_examples=num_examples(150))
def test_any_text_at_any_byte_boundary(prompt: str, text: str, cuts: list[int]) -> None:
    ids = list(text.encode())
    check_pieces_make(text, run(BYTES, list(prompt.encode()), pieces_of(ids, cuts)))


@given(st.binary(max_size=60), st.lists(st.integers(0, 257), max_size=80), CUTS)
@example(b"\xe2\x82", [0xAC, 0x41], [1])  # the prompt ends inside a character
@example(b"", [0x80] * 60, [1])
@example(b"", [0xF0, 0x9F, 0x98, 0x80] * 20, [1])
@example(b"", [0xE2, EOS_ID, 0x82, BOS_ID, 0xAC], [1])
@settings(max_examples=num_examples(200))
def test_any_bytes_and_special_tokens(prompt: bytes, ids: list[int], cuts: list[int]) -> None:
    check_pieces_make(BYTES.decode(ids), run(BYTES, list(prompt), pieces_of(ids, cuts)))


@given(TEXT, st.lists(st.integers(0, 511), max_size=60), CUTS)
@settings(max_examples=num_examples(200))
def test_any_tokens_of_a_merged_vocabulary(prompt: str, ids: list[int], cuts: list[int]) -> None:
    check_pieces_make(
        merged().decode(ids), run(merged(), list(prompt.encode()), pieces_of(ids, cuts))
    )


@given(st.text("ab é€🦊", min_size=1, max_size=30), st.text("ab é€🦊", max_size=30), CUTS)
@settings(max_examples=num_examples(150))
def test_byte_fallback_with_the_prompt_as_context(prompt: str, text: str, cuts: list[int]) -> None:
    def ids(value: str) -> list[int]:
        known = {" ": [256], "a": [257], "b": [258], "é": [262]}
        return [i for char in value for i in known.get(char, list(char.encode()))]

    whole = byte_fallback().decode(ids("b" + prompt + text))[len("b" + prompt) :]
    assert whole == text
    check_pieces_make(text, run(byte_fallback(), ids("b" + prompt), pieces_of(ids(text), cuts)))


def test_space_between_prompt_and_answer() -> None:
    assert run(byte_fallback(), [257], [[261]]) == [" Paris", ""]
    assert run(byte_fallback(), [], [[261]]) == ["Paris", ""]


def test_a_character_is_shown_with_its_last_byte() -> None:
    texts = run(BYTES, [], [[byte] for byte in "aé€🦊".encode()])
    assert texts == ["a", "", "é", "", "", "€", "", "", "", "🦊", ""]


def test_a_cut_character_shows_at_the_end_only() -> None:
    assert run(BYTES, [], [[0x61, 0xE2], [0x82]]) == ["a", "", "\ufffd"]


class CountingTokenizer(Tokenizer):
    decoded = 0

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        self.decoded += len(ids)
        return super().decode(ids)


@pytest.mark.parametrize("byte", [0x61, 0x80, 0xFF, 0xE2, EOS_ID])
def test_cost_per_token_does_not_grow(byte: int) -> None:
    backend = BYTES._template
    tokenizer = CountingTokenizer(backend)
    run(tokenizer, [], [[byte]] * 4_000)
    assert tokenizer.decoded < 4_000 * 24


def cut_naively(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Before the stop string that is complete first; of several at one place, the longest."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return (text[: min(found)[1]], True) if found else (text, False)


@given(TEXT, st.lists(TEXT.filter(bool), max_size=3), CUTS, st.data())
@settings(max_examples=num_examples(150))
def test_completion_text_is_the_cut_text(
    text: str, stops: list[str], cuts: list[int], data: st.DataObject
) -> None:
    if text:  # stop strings that do occur
        start = data.draw(st.integers(0, len(text) - 1))
        stops = [*stops, text[start : start + data.draw(st.integers(1, 4))]]
    ids = list(text.encode())
    completion, shown, used, stopped = (
        CompletionText(BYTES, [], StopRules(strings=tuple(stops))),
        "",
        0,
        False,
    )
    for piece in pieces_of(ids, cuts):
        added, num_tokens, stopped = completion.push(piece)
        shown, used = shown + added, used + num_tokens
        if stopped:
            break
    if not stopped:
        shown += completion.finish()[0]
    assert shown == cut_naively(text, stops)[0]
    if stopped:  # the tokens end with the stop string
        end = BYTES.decode(ids[:used])
        assert any(end.endswith(stop) for stop in stops)
    else:
        assert used == len(ids)


def test_stop_string_of_a_replacement_character_at_the_end() -> None:
    completion = CompletionText(BYTES, [], StopRules(strings=("\ufffd",)))
    assert completion.push([0x61, 0xE2])[0] == "a"
    assert completion.finish() == ("", True)
