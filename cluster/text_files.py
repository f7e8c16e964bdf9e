"""Reads and writes the text files that commands name, and parses YAML and lines of JSON.

Errors name the file and the line. Editors on Windows begin files with a byte order mark, which is
not part of the text.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel

from ..proto.errors import InvalidArgument
from ..router.json_lines import number_lines

MAX_FILE_BYTES: Final = 1024 * 1024  # of YAML
_MAX_KEY: Final = 80  # characters of a key in an error

_MARK: Final = "\ufeff"  # a byte order mark

_Line = TypeVar("_Line", bound=BaseModel)


def read_text(path: Path, option: str) -> str:
    """Returns the text of the file that an option names. Raises InvalidArgument."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", option) from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path}: not UTF-8", option) from None


def read_stdin(argument: str) -> str:
    """Returns the text on stdin, for an argument. Raises InvalidArgument."""
    return decoded(sys.stdin.read, argument)


def decoded(read: Callable[[], str], argument: str = "") -> str:
    """Returns the text that `read` takes from stdin. Raises InvalidArgument if it is not UTF-8."""
    try:
        return read().removeprefix(_MARK)
    except UnicodeDecodeError:
        raise InvalidArgument("stdin: not UTF-8", argument) from None


def write_text(path: Path, text: str, option: str) -> None:
    """Writes the file that an option names. Raises InvalidArgument."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be written: {error.strerror}", option) from None


def check_writable(files: Mapping[str, Path | None]) -> None:
    """Raises InvalidArgument for the first file, by its option, that could not be written.

    Writes nothing. Commands call it before they begin, so that no result of long work is lost.
    """
    for option, path in files.items():
        if path is not None and (problem := _write_problem(path)):
            raise InvalidArgument(f"{path} cannot be written: {problem}", option)


def _write_problem(path: Path) -> str:
    """Returns the reason why a file could not be written; empty if it probably could."""
    folder = path.absolute().parent
    try:
        path.stat()
    except FileNotFoundError:
        if not folder.is_dir():
            return f"there is no folder {folder}; create it first"
        if not os.access(folder, os.W_OK | os.X_OK):
            return f"you may not write into the folder {folder}"
        return ""
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    if path.is_dir():
        return "it is a folder; give the name of a file"
    return "" if os.access(path, os.W_OK) else "you may not write to this file"


def parse_lines(text: str, path: Path, line_type: type[_Line]) -> list[_Line]:
    """Returns the lines of a file of JSON objects, without the empty ones.

    Raises InvalidArgument, which names the line of `path`, also for a file without lines.
    """
    return [line for _, line in number_lines(text, path, line_type)]


def _check_keys(root: yaml.Node | None, path: Path) -> None:
    """Raises InvalidArgument for a key that a mapping has twice.

    Readers of YAML would silently keep the last one.
    """
    found: list[yaml.Node] = [root] if root else []
    seen = set()  # aliases name a node again
    while found:
        node = found.pop()
        if id(node) in seen or isinstance(node, yaml.ScalarNode):
            continue
        seen.add(id(node))
        keys = set()
        for entry in node.value:
            key, *children = entry if isinstance(entry, tuple) else (None, entry)
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in keys:
                    where = f"{path}: line {key.start_mark.line + 1}"
                    raise InvalidArgument(f"{where}: {key.value[:_MAX_KEY]} is given twice")
                keys.add((key.tag, key.value))
            found += children


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the keys and values of a YAML file; {} for an empty one. Raises InvalidArgument."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise InvalidArgument(f"{path}: must have at most {MAX_FILE_BYTES} bytes")
        _check_keys(yaml.compose(data, Loader=yaml.SafeLoader), path)
        tree = yaml.safe_load(data)
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror or 'cannot be read'}") from None
    # PyYAML raises the last three for scalars that only look like a date or a number, and for tags
    # of another type.
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, AttributeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        why = ""
        if isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError):
            why = f": {error.problem}"
        raise InvalidArgument(f"{path}: {where}not valid YAML{why}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise InvalidArgument(f"{path}: must hold keys and values at the top level")
    return tree
