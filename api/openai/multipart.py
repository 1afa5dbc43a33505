"""Forms with a file (multipart/form-data, RFC 7578)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser

from api.problems import Refused

MULTIPART = "multipart/form-data"
MAX_PARTS = 32
MAX_HEADER_BYTES = 16 << 10
MAX_FIELD_BYTES = 64 << 10


@dataclass(frozen=True)
class Form:
    fields: dict[str, str]
    """The parts without a file name."""
    file_name: str
    file: bytes


def parse(body: bytes, content_type: str) -> Form:
    """Return the parts of a form with one part `file`. Raises Refused."""
    try:
        return _parsed(body, content_type)
    except ValueError as error:  # a name in an encoding that can't be decoded
        raise _malformed(f"a header of the form can't be decoded: {error}") from None


def _parsed(body: bytes, content_type: str) -> Form:
    given = Message()
    given["Content-Type"] = content_type
    boundary = given.get_boundary()
    if not boundary:
        raise _malformed("the content type has no boundary")
    fields: dict[str, str] = {}
    name, content = None, b""
    for header, start, end in _parts(body, boundary.encode("latin-1", "replace")):
        disposition = HeaderParser().parsestr(header)
        found = disposition.get_param("name", header="content-disposition")
        if disposition.get_content_disposition() != "form-data" or not isinstance(found, str):
            raise _malformed("a part of the form has no name")
        if found == "file":
            if name is not None:
                raise _malformed("the form has several parts `file`")
            name, content = disposition.get_filename() or "file.jsonl", body[start:end]
        else:
            if end - start > MAX_FIELD_BYTES:
                raise _malformed(f"the field {found[:64]!r} is too long")
            fields[found] = body[start:end].decode("utf-8", "replace")
    if name is None:
        raise Refused("invalid_document", "the form has no part `file`", "/file")
    return Form(fields, name, content)


def _parts(body: bytes, boundary: bytes) -> list[tuple[str, int, int]]:
    """Return the header of each part, and where its content begins and ends in the body."""
    begin = b"--" + boundary
    line = re.compile(rb"(?:\r\n)?" + re.escape(begin) + rb"(--)?[ \t]*(?:\r\n|$)")
    found: list[tuple[str, int, int]] = []
    mark = line.match(body) or _next(line, begin, body, 0)
    while mark is not None and mark[1] is None:
        start = mark.end()
        # One line break can both end a boundary and begin the next one.
        following = _next(line, begin, body, start - 2 if mark[0].endswith(b"\r\n") else start)
        if following is None:
            raise _malformed("the form is incomplete: its last boundary is missing")
        head = body.find(b"\r\n\r\n", start, start + MAX_HEADER_BYTES)
        if not start <= head <= following.start():
            raise _malformed("a part of the form has no header")
        if len(found) >= MAX_PARTS:
            raise _malformed(f"the form has more than {MAX_PARTS} parts")
        header = body[start:head].decode("utf-8", "replace")
        found.append((header, head + 4, following.start()))
        mark = following
    if mark is None:
        raise _malformed("the form has no parts")
    return found


def _next(line: re.Pattern[bytes], begin: bytes, body: bytes, start: int) -> re.Match[bytes] | None:
    """Return the first line from `start` with a boundary. `bytes.find` is much faster than a search
    with a regular expression."""
    at = body.find(b"\r\n" + begin, start)
    while at >= 0:
        if (mark := line.match(body, at)) is not None:
            return mark
        at = body.find(b"\r\n" + begin, at + 1)
    return None


def _malformed(detail: str) -> Refused:
    return Refused("malformed_request", detail)
