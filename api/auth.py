"""Who calls: bearer tokens from a file, or, without one, anybody on this machine (see `api.gate`).

The file has a line `name:sha256-of-the-token` for each caller; `#` begins a comment. Only hashes
lie there, and they are compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from pathlib import Path

from fastapi import Request

from api.problems import Refused

LOCAL_OWNER = "default"
"""The owner of jobs on a server without tokens."""


class BadTokensFile(Exception):
    """DRAY_TOKENS_FILE can't be read or has a line that is no token."""


def load_tokens(path: Path) -> dict[str, bytes]:
    """Name -> SHA-256 of the token."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadTokensFile(f"DRAY_TOKENS_FILE {path} can't be read: {error}") from None
    tokens: dict[str, bytes] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"([A-Za-z0-9._@-]{1,128}):([0-9a-fA-F]{64})", text)
        if match is None or match[1] in tokens:
            raise BadTokensFile(
                f"{path}, line {number}: write name:sha256-of-the-token with each name once "
                "(printf %s TOKEN | sha256sum)"
            )
        tokens[match[1]] = bytes.fromhex(match[2])
    if not tokens:
        raise BadTokensFile(f"DRAY_TOKENS_FILE {path} names nobody: add a line for each caller")
    return tokens


class Authority:
    """Decides whose request it is."""

    def __init__(self, tokens: dict[str, bytes] | None) -> None:
        self._tokens = tokens

    def caller(self, request: Request) -> str:
        """Name of who calls; Refused if that is nobody we know."""
        if self._tokens is None:
            return LOCAL_OWNER
        token = _token(request)
        if token is None:
            raise _unauthorized("this server asks for a token", 'Bearer realm="dray"')
        name = self._owner_of(token)
        if name is None:
            challenge = 'Bearer realm="dray", error="invalid_token"'
            raise _unauthorized("the token is not one of this server's", challenge)
        return name

    def knows(self, request: Request) -> bool:
        """Whether `caller` would have a name for it."""
        token = _token(request)
        return self._tokens is None or (token is not None and self._owner_of(token) is not None)

    def _owner_of(self, token: str) -> str | None:
        assert self._tokens is not None
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        name = None
        for known, expected in self._tokens.items():  # all of them, whichever it is
            if hmac.compare_digest(digest, expected):
                name = known
        return name


def _token(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def _unauthorized(detail: str, challenge: str) -> Refused:
    hint = "send `Authorization: Bearer TOKEN`; the SDK and CLI take it from DRAY_TOKEN"
    return Refused("unauthorized", detail, None, hint, {"WWW-Authenticate": challenge})


def is_loopback(host: str) -> bool:
    """Whether an address to bind to is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
