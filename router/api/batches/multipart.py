"""Parses a body of type multipart/form-data (RFC 7578), which lies in memory as a whole."""

from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from typing import Final

from ....proto.errors import InvalidArgument

_MAX_PARTS: Final = 32
_MAX_HEAD_BYTES: Final = 8_192


@dataclass(frozen=True, slots=True, kw_only=True)
class FormPart:
    """Holds one field of a form."""

    name: str
    filename: str | None  # None: not a file
    content: bytes


def parse_form(body: bytes, content_type: str) -> dict[str, FormPart]:
    """Returns the fields by name. `content_type`: the header. Raises InvalidArgument."""
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        raise InvalidArgument("must be multipart/form-data with a boundary", "Content-Type")
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode(), _MAX_PARTS + 2)
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise InvalidArgument(
            f"the form is not complete, or has more than {_MAX_PARTS} fields", "Content-Type"
        )
    found: dict[str, FormPart] = {}
    for part in parts[1:-1]:
        head, blank, content = part.partition(b"\r\n\r\n")
        if not blank or len(head) > _MAX_HEAD_BYTES:
            raise InvalidArgument("a field of the form has no head, or one that is too long")
        field = _field(head, content)
        if field.name in found:
            raise InvalidArgument("is given twice", field.name)
        found[field.name] = field
    return found


def _field(head: bytes, content: bytes) -> FormPart:
    headers = HeaderParser().parsestr(head.decode("utf-8", "replace").lstrip())
    name = headers.get_param("name", header="Content-Disposition")
    if not isinstance(name, str) or not name:
        raise InvalidArgument("a field of the form has no name")
    filename = headers.get_param("filename", header="Content-Disposition")
    return FormPart(
        name=name[:64],
        filename=filename if isinstance(filename, str) else None,
        content=content,
    )
