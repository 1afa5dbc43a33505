"""Downloads of stored files, complete or by range (RFC 9110, section 14)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from api.http.caching import REVALIDATE, is_known, not_modified
from api.problems import Refused
from service.storage.storage import Storage, in_storage_thread

PIECE_BYTES = 1 << 20
BINARY = "application/octet-stream"

_CONTENT = {BINARY: {"schema": {"type": "string", "format": "binary"}}}
DOWNLOAD: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file.", "content": _CONTENT},
    206: {"description": "The requested range of the file.", "content": _CONTENT},
    304: {"description": "The caller already has this version, according to `If-None-Match`."},
}
"""OpenAPI descriptions of the responses to a download, except for problems."""
DOWNLOAD_HEAD: dict[int | str, dict[str, Any]] = {
    200: {"description": "The headers contain the size, type and hash of the file."},
    304: DOWNLOAD[304],
}
"""OpenAPI descriptions of the responses to a HEAD request, except for problems."""


@dataclass(frozen=True)
class StoredFile:
    """A file in the storage."""

    key: str
    size_bytes: int
    sha256: str
    """Hash of the whole file, which is also its ETag."""
    name: str
    """Path of the file; a browser names the download after the last part of the path."""
    media_type: str = BINARY


def download(request: Request, storage: Storage, file: StoredFile) -> Response:
    """Return the file or a range of it; for HEAD, only the headers.

    Raises Refused with `range_not_satisfiable` if the file has no byte in the range.
    """
    etag = f'"{file.sha256}"'
    if is_known(request, etag):
        return not_modified(etag)
    part = _wanted_range(request, file.size_bytes, etag)
    headers = {
        **attachment(file.name),
        "Accept-Ranges": "bytes",
        "ETag": etag,
        "Cache-Control": REVALIDATE,
        "Content-Length": str(part.length if part else file.size_bytes),
    }
    if part:
        headers["Content-Range"] = f"bytes {part.start}-{part.end - 1}/{file.size_bytes}"
    if request.method == "HEAD":
        return Response(headers=headers, media_type=file.media_type)
    pieces = _pieces(storage, file.key, part or Range(0, file.size_bytes))
    return StreamingResponse(pieces, 206 if part else 200, headers, media_type=file.media_type)


def attachment(path: str) -> dict[str, str]:
    """Return headers that make a browser save the content under the last part of this path."""
    name = quote(path.rpartition("/")[2], safe="")
    return {
        "X-Content-Type-Options": "nosniff",
        "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
    }


def _wanted_range(request: Request, size: int, etag: str) -> Range | None:
    """Return the requested range, or None to send the whole file. The whole file is also sent if
    `If-Range` contains the ETag of another version (RFC 9110, 13.1.5)."""
    if request.method != "GET" or request.headers.get("if-range", etag) != etag:
        return None
    try:
        return parse_range(request.headers.get("range"), size)
    except Unsatisfied:
        raise Refused(
            "range_not_satisfiable",
            f"the requested range is outside the file, which has {size} bytes",
            headers={"Content-Range": f"bytes */{size}"},
        ) from None


async def _pieces(storage: Storage, key: str, part: Range) -> AsyncIterator[bytes]:
    for start in range(part.start, part.end, PIECE_BYTES):
        end = min(start + PIECE_BYTES, part.end)
        yield await in_storage_thread(storage.read_bytes, key, start, end)


@dataclass(frozen=True)
class Range:
    start: int
    end: int
    """Offset one past the last byte."""

    @property
    def length(self) -> int:
        return self.end - self.start


class Unsatisfied(Exception):
    """The range is well formed, but contains no byte of the file."""


def parse_range(header: str | None, size: int) -> Range | None:
    """Return the requested range; None means the whole file.

    A header that is not a range of bytes, or has several ranges, is ignored, as the RFC allows.
    Raises Unsatisfied if the file has no byte in the range.
    """
    match = re.fullmatch(r"bytes=\s*([0-9]{0,18})-([0-9]{0,18})\s*", header or "")
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:  # a suffix: the last bytes of the file
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < start:
            return None
    if start >= end:
        raise Unsatisfied
    return Range(start, end)
