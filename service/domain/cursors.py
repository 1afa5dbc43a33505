"""Opaque cursors: a place in a listing, as text that only the call that gave it understands."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from typing import Any

from service.domain.errors import BadCursor

_CHECK_BYTES = 6
_MAX_CURSOR_CHARS = 64 * 1024
_MAX_PLAIN_BYTES = 1 << 20


def _check(scope: str, packed: bytes) -> bytes:
    return hashlib.sha256(scope.encode() + b"\0" + packed).digest()[:_CHECK_BYTES]


def _as_text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def encode_cursor(scope: str, place: Any) -> str:
    """`place` (JSON data) as text; `scope` names the listing it belongs to."""
    packed = zlib.compress(json.dumps(place, separators=(",", ":")).encode(), 6)
    return _as_text(_check(scope, packed) + packed)


def decode_cursor(scope: str, cursor: str) -> Any:
    """The place that `encode_cursor` was given for the same scope; BadCursor for anything else.

    The check catches accidents and cursors of other listings. A place grants nothing, so a forged
    one is no danger: it must only not be an error of the server.
    """
    try:
        if len(cursor) > _MAX_CURSOR_CHARS:
            raise ValueError("too long")
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        check, packed = raw[:_CHECK_BYTES], raw[_CHECK_BYTES:]
        if check != _check(scope, packed) or _as_text(raw) != cursor:
            raise ValueError("not for this listing")
        unpacker = zlib.decompressobj()
        plain = unpacker.decompress(packed, _MAX_PLAIN_BYTES)
        if not unpacker.eof:
            raise ValueError("too large")
        return json.loads(plain)
    except (ValueError, binascii.Error, zlib.error, RecursionError) as error:
        raise BadCursor(
            "the cursor is not one that this listing gave out",
            hint="take next_cursor from the page before, unchanged, or leave it out",
        ) from error
