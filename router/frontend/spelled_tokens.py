"""Encodes special tokens that a caller spells as text, so that no text of a chat becomes a role.

A chat template writes special tokens around the callers' texts, and a tokenizer cannot tell who
wrote them. So the callers' spellings are escaped before the template renders them: one character of
each is replaced by a private-use character that occurs nowhere else. That keeps lengths, spaces and
JSON as they are. All tokens that the rendered text then spells are the template's. They get new
names, the escaped characters are put back, and the whole text is encoded once, by a copy of the
tokenizer that knows the special tokens by the new names only. Pre-tokenization sees the original
text, so a chat without such spellings has the same ids either way.

Knows nothing of chats except that they are JSON.
"""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, Final

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from ...proto.errors import InvalidArgument, PromptTooLong
from ...proto.limits import MAX_TOKENS

_PIECE_CHARACTERS: Final = 8_192
"""Of one call of `re` or `str`, which holds the interpreter's lock (GIL): below 2 ms."""

_PAUSE_SECONDS: Final = 1e-6
"""Between two pieces. Without a pause, a thread that waits for the lock gets it after 5 ms."""

_PRIVATE_USE: Final = range(0xE000, 0xF900)
_PRIVATE_CHARACTER: Final = re.compile("[\ue000-\uf8ff]")
_RENAMED: Final = 0xF0000  # the first character of the private-use planes
_OPEN: Final = "\U0010fffe"  # before a new name; a noncharacter, as is _CLOSE
_CLOSE: Final = "\U0010ffff"
_SOLID: Final = re.compile(r"\S")
_FIELD: Final = "prompt.chat"


def encode_text(backend: Backend, text: str, *, add_special_tokens: bool) -> list[int]:
    """Returns the token ids of a text. Raises PromptTooLong if they are too many for a prompt.

    Other threads run meanwhile: `encode_batch_fast` releases the interpreter's lock, `encode` does
    not.
    """
    (found,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return _ids_of(found)


def _ids_of(encoding: Encoding) -> list[int]:
    """Returns the token ids. Raises PromptTooLong, before it makes a list of millions of ids."""
    if len(encoding) > MAX_TOKENS:
        raise PromptTooLong(f"has {len(encoding)} tokens; the maximum is {MAX_TOKENS}", "prompt")
    ids: list[int] = encoding.ids
    return ids


class Spellings:
    """Finds tokens in texts: whole ones, and at a text's ends parts of them."""

    def __init__(self, tokens: Iterable[str]) -> None:
        found = sorted({token for token in tokens if token.strip()}, key=len, reverse=True)
        self._pattern = re.compile(_pattern_of(found) if found else r"(?!)")
        self._begins = {token[:size] for token in found for size in range(1, len(token))}
        self._ends = {token[size:] for token in found for size in range(1, len(token))}
        self._longest = len(found[0]) if found else 0

    def positions(self, text: str) -> set[int]:
        """Returns one position in each spelling; spellings may overlap."""
        positions = {_solid(text, begin) for begin in self._begins_in(text)}
        end = len(text.rstrip())  # a template may trim
        first = len(text) - len(text.lstrip())
        for size in range(1, min(self._longest, end - first) + 1):
            if text[end - size : end] in self._begins:
                positions.add(_solid(text, end - size))
            if text[first : first + size] in self._ends:
                positions.add(first)
        return positions

    def _begins_in(self, text: str) -> Iterator[int]:
        """Yields where whole tokens begin. Other threads run between two pieces of the search."""
        for begin, end in _pieces(text):
            while match := self._pattern.search(text, begin, end + self._longest):
                begin = match.start() + 1
                if begin > end:
                    break  # the next piece finds it as well
                yield match.start()


class SpecialTokenEscaper:
    """Escapes the spellings of tokens in the texts of one chat, and restores them."""

    def __init__(self, everything: str) -> None:
        """`everything`: the chat as JSON, of which no character may be a replacement."""
        self._everything = everything
        self._replacements: dict[str, str] = {}  # by original character

    def escape(self, value: Any, spellings: Spellings) -> Any:
        """Returns a JSON value with all its texts and keys escaped.

        Raises InvalidArgument if there are no free characters left.
        """
        match value:
            case str():
                return self._text(value, spellings)
            case list():
                return [self.escape(item, spellings) for item in value]
            case dict():
                return {
                    self.escape(key, spellings): self.escape(item, spellings)
                    for key, item in value.items()
                }
        return value

    def unescape(self, text: str) -> str:
        """Returns the original text."""
        originals = {
            ord(replacement): character for character, replacement in self._replacements.items()
        }
        if not originals:
            return text
        return "".join(text[begin:end].translate(originals) for begin, end in _pieces(text))

    @property
    def is_active(self) -> bool:
        """True if a character was replaced."""
        return bool(self._replacements)

    def _text(self, text: str, spellings: Spellings) -> str:
        positions = spellings.positions(text)
        if not positions:
            return text
        characters = list(text)
        for position in positions:
            characters[position] = self._replacement(characters[position])
        return "".join(characters)

    @cached_property
    def _free(self) -> Iterator[str]:
        """The private-use characters that do not occur in the chat."""
        used = set[str]()
        for begin, end in _pieces(self._everything):
            used.update(_PRIVATE_CHARACTER.findall(self._everything, begin, end))
        return (chr(code) for code in _PRIVATE_USE if chr(code) not in used)

    def _replacement(self, character: str) -> str:
        if character not in self._replacements:
            free = next(self._free, None)
            if free is None:
                raise InvalidArgument(
                    "has every private-use character, beside the spelling of a special token",
                    _FIELD,
                )
            self._replacements[character] = free
        return self._replacements[character]


class LiteralEncoder:
    """Encodes texts in which some tokens are structure and some are only spelled.

    Immutable and thread-safe.
    """

    def __init__(self, backend: Backend, tokens: Mapping[int, str]) -> None:
        """`tokens`: by id, the tokens that may only be structure."""
        self._backend = backend
        self._tokens = tokens
        self._names = {
            token: f"{_OPEN}{chr(_RENAMED + i)}{_CLOSE}" for i, token in enumerate(tokens)
        }

    def encode(self, rendered: str, escaper: SpecialTokenEscaper) -> list[int]:
        """Returns the ids of a rendered text: spelled tokens are structure, escaped ones are text.

        Raises InvalidArgument if the tokenizer has no other way to write an escaped token.
        """
        (found,) = self._backend.encode_batch([rendered], add_special_tokens=False)
        pieces = []
        structure = []
        end = 0
        for index, token in enumerate(_ids_of(found)):
            if token not in self._tokens:
                continue
            # For few tokens only: a list of all offsets takes long.
            begin, until = found.token_to_chars(index) or (end, end)
            spelled = rendered[begin:until]
            # A normalizer may turn another text into a token, such as a text in full-width letters.
            # That text is only spelled.
            if spelled.strip() == self._tokens[token].strip():
                pieces += [
                    escaper.unescape(rendered[end:begin]),
                    spelled.replace(spelled.strip(), self._names[token]),
                ]
                structure.append(token)
                end = until
        text = "".join([*pieces, escaper.unescape(rendered[end:])])
        if text.count(_OPEN) != len(structure) or text.count(_CLOSE) != len(structure):
            raise InvalidArgument(
                "has a noncharacter beside the spelling of a special token", _FIELD
            )
        ids = [
            self._ids.get(token, token)
            for token in encode_text(self._copy, text, add_special_tokens=False)
        ]
        if [token for token in ids if token in self._tokens] != structure:
            raise InvalidArgument(
                "spells a special token that the tokenizer cannot write as text", _FIELD
            )
        return ids

    def prepare(self) -> None:
        """Makes the copy of the tokenizer.

        With a large vocabulary that holds the interpreter's lock for a second.
        """
        _ = self._ids

    @cached_property
    def _copy(self) -> Backend:
        """The tokenizer with other names for the tokens; it takes the same memory again."""
        tree = json.loads(self._backend.to_str())
        tree["post_processor"] = None
        names = {self._tokens[token]: name for token, name in self._names.items()}
        for added in tree["added_tokens"]:
            if added["content"] in names:
                added |= {
                    "content": names[added["content"]],
                    "normalized": False,
                    "single_word": False,
                }
        _rename(tree["model"], names)
        return Backend.from_str(json.dumps(tree))

    @cached_property
    def _ids(self) -> dict[int, int]:
        """The ids of the added tokens, by the ids of the copy."""
        added = {
            token: text.content for token, text in self._backend.get_added_tokens_decoder().items()
        } | self._names
        copied = ((self._copy.token_to_id(name), token) for token, name in added.items())
        return {copy: token for copy, token in copied if copy is not None}


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Renames tokens in a vocabulary, so that no text becomes one; not tokens that merges make."""
    merges: Sequence[Any] = model.get("merges") or ()
    pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in merges)
    made = {part for left, right in pairs for part in (left, right, left + right) if part in names}
    names = {old: new for old, new in names.items() if old not in made}
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): index for piece, index in vocab.items()}
    elif isinstance(vocab, list):  # Unigram: pieces and scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]


def _pattern_of(tokens: Iterable[str]) -> str:
    """Returns a pattern that matches the texts, in which texts with the same beginning share it.

    A search then tries one branch at each character, not one for each token. A text that begins
    with another one of the texts needs no branch.
    """
    found = list[str]()
    for token in sorted(tokens):
        if not found or not token.startswith(found[-1]):
            found.append(token)
    if len(found) == 1:
        return re.escape(found[0])
    # The first and the last text in order differ where any two do.
    shared = next(i for i, (a, b) in enumerate(zip(found[0], found[-1], strict=False)) if a != b)
    rests = (token[shared:] for token in found)
    branches = (_pattern_of(rest) for _, rest in groupby(rests, key=lambda rest: rest[0]))
    return f"{re.escape(found[0][:shared])}(?:{'|'.join(branches)})"


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Yields where the pieces of a text begin and end; other threads run between two pieces."""
    for begin in range(0, len(text), _PIECE_CHARACTERS):
        if begin:
            time.sleep(_PAUSE_SECONDS)
        yield begin, begin + _PIECE_CHARACTERS


def _solid(text: str, begin: int) -> int:
    """Returns the first position from `begin` that is not a space: a template may trim spaces."""
    match = _SOLID.search(text, begin)
    return match.start() if match else begin
