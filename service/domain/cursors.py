"""Opaque cursors: positions in a listing, encoded as strings that only this listing can decode."""

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


def encode_cursor(scope: str, position: Any) -> str:
    """Encode `position`, which is JSON data, as a string. scope: name of the listing."""
    packed = zlib.compress(json.dumps(position, separators=(",", ":")).encode(), 6)
    return _as_text(_check(scope, packed) + packed)


def decode_cursor(scope: str, cursor: str) -> Any:
    """Return the position that was passed to `encode_cursor` with the same scope. Raises BadCursor
    if the cursor is invalid.

    The checksum detects damaged cursors and cursors of other listings. A forged cursor doesn't
    grant access to anything, so it is harmless as long as it doesn't cause a server error.
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
            "the cursor does not belong to this listing",
            hint="pass next_cursor of the previous page unchanged, or omit the cursor",
        ) from error
