"""Reads the chat template that an operator gives: a file, the text, or the name of one of ours."""

import re
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from .text_files import MAX_FILE_BYTES

_MAX_NAME: Final = 200
"""Characters of a path in an error: a template may be given in its place."""

_NAMED: Final = {
    path.stem: path for path in sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))
}
NAMES: Final = tuple(_NAMED)
"""The names of the templates that come with Tandem."""

_MARKS_OF_TEXT: Final = ("{{", "{%", "{#", "\n")
_TAG: Final = re.compile(r"(\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\})")
_ESCAPE: Final = re.compile(r"\\([nrt\\])")
_ESCAPED: Final = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}


def read_chat_template(given: str) -> str:
    """Returns the text of a chat template. Raises ValueError, which names the setting.

    `given`: one of NAMES, the path of a file or, if it has a tag of Jinja or a line break, the
    template. In a template of one line, escapes of line breaks and tabs between the tags are
    replaced, as in vLLM.
    """
    if given in _NAMED:
        return _NAMED[given].read_text("utf-8")
    if not any(mark in given for mark in _MARKS_OF_TEXT):
        return _read(Path(given))
    if "\n" in given:
        return given
    parts = _TAG.split(given)  # text and tags in turns
    parts[::2] = [_ESCAPE.sub(lambda escape: _ESCAPED[escape[1]], text) for text in parts[::2]]
    return "".join(parts)


ChatTemplate = Annotated[
    str, Field(min_length=1, max_length=MAX_FILE_BYTES), AfterValidator(read_chat_template)
]
"""The text of a template; given as a text, as the path of its file, or by its name."""


def _read(path: Path) -> str:
    name = str(path)[:_MAX_NAME]
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except FileNotFoundError as error:
        named = ", ".join(NAMES)
        raise ValueError(
            f"chat_template: {name}: {error.strerror}, and no template has this name: {named}"
        ) from None
    except OSError as error:
        raise ValueError(f"chat_template: {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"chat_template: {name}: not UTF-8") from None
    except ValueError:  # NUL, or a surrogate
        raise ValueError("chat_template: the path has characters that no path can have") from None
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"chat_template: {name}: must have at most {MAX_FILE_BYTES} bytes")
    if not text.strip():
        raise ValueError(f"chat_template: {name}: is empty")
    return text
