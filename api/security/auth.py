"""Who calls: bearer tokens from a file, or, without one, anybody on this machine (see
`api.security.gate`).

The file has a line `name:sha256-of-the-token` for each caller; `#` begins a comment. Only hashes
lie there, and they are compared in constant time. A change of the file holds from the next request
on.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import logging
import re
import time
from pathlib import Path

from fastapi import Request

from api.problems import Refused
from service.domain.events import ANONYMOUS

logger = logging.getLogger(__name__)

SETTLED_NS = 1_000_000_000
LOCAL_OWNER = "default"
"""The owner of jobs on a server without tokens."""


class BadTokensFile(Exception):
    """DRAY_TOKENS_FILE can't be read or has a line that is no token."""


def load_tokens(path: Path) -> dict[str, bytes]:
    """Name -> SHA-256 of the token. BadTokensFile if it can't be read, is wrong, or has none."""
    try:
        tokens, mistakes = read_tokens(path)
    except OSError as error:
        raise BadTokensFile(f"DRAY_TOKENS_FILE {path} can't be read: {error}") from None
    if mistakes:
        raise BadTokensFile(mistakes[0])
    if not tokens:
        raise BadTokensFile(f"DRAY_TOKENS_FILE {path} names nobody: add a line for each caller")
    return tokens


def read_tokens(path: Path) -> tuple[dict[str, bytes], list[str]]:
    """The tokens, and what is wrong with lines that hold none. OSError if it can't be read."""
    tokens: dict[str, bytes] = {}
    mistakes = []
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = re.fullmatch(r"([A-Za-z0-9._@-]{1,128}):([0-9a-fA-F]{64})", entry)
        if match is None or match[1] in tokens:
            mistakes.append(
                f"{path}, line {number}: write name:sha256-of-the-token with each name once "
                "(printf %s TOKEN | sha256sum)"
            )
        else:
            tokens[match[1]] = bytes.fromhex(match[2])
    return tokens, mistakes


class Authority:
    """Decides whose request it is, by the tokens file as it is at that moment.

    A mistake made in the file while the server runs spoils its own line alone, so that a token
    that was removed is refused all the same; without the file nobody is let in.
    """

    def __init__(self, path: Path | None) -> None:
        """BadTokensFile if the file is wrong; None of a server without tokens."""
        self._path = path
        self._seen: tuple[int, ...] | None = None
        self._tokens = {} if path is None else load_tokens(path)

    def caller(self, request: Request) -> str:
        """Name of who calls; Refused if that is nobody we know."""
        if self._path is None:
            return LOCAL_OWNER
        return self._owner(self._path, _token(request), 'Bearer realm="dray"')

    def reader(self, request: Request) -> str:
        """The same for pages, where the token may also be a password that a browser asks for.

        Nothing else takes that: browsers send such a password along with what other pages cause.
        """
        if self._path is None:
            return LOCAL_OWNER
        token = _token(request) or _password(request)
        return self._owner(self._path, token, 'Basic realm="dray", charset="UTF-8"')

    def _owner(self, path: Path, token: str | None, challenge: str) -> str:
        if token is None:
            raise _unauthorized("this server asks for a token", challenge)
        self._refresh(path)
        name = self._owner_of(token)
        if name is None:
            challenge += ', error="invalid_token"' if challenge.startswith("Bearer") else ""
            raise _unauthorized("the token is not one of this server's", challenge)
        return name

    def actor(self, caller: str) -> str:
        """The caller's name for the records; without tokens everybody has the same."""
        return ANONYMOUS if self._path is None else caller

    def knows(self, request: Request) -> bool:
        """Whether `caller` would have a name for it."""
        try:
            self.caller(request)
        except Refused:
            return False
        return True

    def _refresh(self, path: Path) -> None:
        try:
            stat = path.stat()
            version = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
            if version == self._seen:
                return
            self._tokens, mistakes = read_tokens(path)
        except OSError as error:
            logger.error("nobody is let in: DRAY_TOKENS_FILE can't be read: %s", error)
            detail = "the server can't read the file of its tokens"
            raise Refused("unavailable", detail, None, "its log says why") from None
        for mistake in mistakes:
            logger.error("this line of DRAY_TOKENS_FILE is left out: %s", mistake)
        # A file that was written just now may change once more without a later time.
        is_settled = abs(time.time_ns() - stat.st_mtime_ns) > SETTLED_NS
        self._seen = version if is_settled else None

    def _owner_of(self, token: str) -> str | None:
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        name = None
        for known, expected in self._tokens.items():  # all of them, whichever it is
            if hmac.compare_digest(digest, expected):
                name = known
        return name


def _token(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def _password(request: Request) -> str | None:
    scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        pair = base64.b64decode(encoded, validate=True).decode()
    except ValueError:
        return None
    return pair.partition(":")[2] or None


def _unauthorized(detail: str, challenge: str) -> Refused:
    hint = "send `Authorization: Bearer TOKEN`; the SDK and CLI take it from DRAY_TOKEN"
    return Refused("unauthorized", detail, None, hint, {"WWW-Authenticate": challenge})


def is_loopback(host: str) -> bool:
    """Whether an address to bind to is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
