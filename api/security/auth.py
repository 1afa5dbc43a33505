"""Authentication by bearer tokens from a file; without a file, any program on this machine may
call (see `api.security.gate`).

The file has a line `name:sha256-of-the-token` for each caller, with `:admin` at its end if the
caller may change queues; `#` begins a comment. The hashes are compared in constant time. A change
of the file takes effect with the next request.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import logging
import re
import time
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request

from api.problems import Refused
from dray.spec.fields import USER_NAME
from service.domain.events import ANONYMOUS

logger = logging.getLogger(__name__)

SETTLED_NS = 1_000_000_000
LOCAL_OWNER = "default"
"""The owner of jobs on a server without tokens."""


class BadTokensFile(Exception):
    """DRAY_TOKENS_FILE can't be read or has an invalid line."""


@dataclass(frozen=True)
class KnownToken:
    sha256: bytes
    is_admin: bool


def load_tokens(path: Path) -> dict[str, KnownToken]:
    """The tokens by the name of their caller. Raises BadTokensFile if the file can't be used or is
    empty."""
    try:
        tokens, mistakes = read_tokens(path)
    except OSError as error:
        raise BadTokensFile(f"DRAY_TOKENS_FILE {path} can't be read: {error}") from None
    if mistakes:
        raise BadTokensFile(mistakes[0])
    if not tokens:
        raise BadTokensFile(f"DRAY_TOKENS_FILE {path} names nobody: add a line for each caller")
    return tokens


def read_tokens(path: Path) -> tuple[dict[str, KnownToken], list[str]]:
    """The tokens, and a message for each invalid line. Raises OSError if the file can't be read."""
    tokens: dict[str, KnownToken] = {}
    mistakes = []
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = re.fullmatch(rf"({USER_NAME}):([0-9a-fA-F]{{64}})(:admin)?", entry)
        if match is None or match[1] in tokens:
            mistakes.append(
                f"{path}, line {number}: write name:sha256-of-the-token with each name once "
                "(printf %s TOKEN | sha256sum), and :admin after it for an admin"
            )
        else:
            tokens[match[1]] = KnownToken(bytes.fromhex(match[2]), match[3] is not None)
    return tokens, mistakes


class Authority:
    """Names the caller of a request, by the current content of the tokens file.

    While the server runs, an invalid line is ignored and the others hold, so that a removed token
    is refused in any case. If the file is missing, all requests are refused.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises BadTokensFile if the file is invalid. path: None for a server without tokens."""
        self._path = path
        self._seen: tuple[int, ...] | None = None
        self._tokens = {} if path is None else load_tokens(path)

    @property
    def has_tokens(self) -> bool:
        return self._path is not None

    def caller(self, request: Request) -> str:
        """Name of the caller; raises Refused if the token is missing or unknown."""
        if self._path is None:
            return LOCAL_OWNER
        return self._owner(self._path, _token(request), 'Bearer realm="dray"')

    def reader(self, request: Request) -> str:
        """As `caller`, for pages, where the token may also be the password of Basic authentication.

        Other routes refuse passwords, which browsers attach to requests that foreign pages cause.
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
        """Name of the caller for records; `anonymous` for everybody on a server without tokens."""
        return ANONYMOUS if self._path is None else caller

    def is_admin(self, caller: str) -> bool:
        """Whether the caller may change queues; everybody on a server without tokens."""
        known = self._tokens.get(caller)
        return self._path is None or (known is not None and known.is_admin)

    def token_id(self, caller: str) -> str | None:
        """Says which token the caller has, without giving it away; None if the caller has none any
        more. Empty on a server without tokens."""
        if self._path is None:
            return ""
        self._refresh(self._path)
        known = self._tokens.get(caller)
        return None if known is None else hashlib.sha256(known.sha256).hexdigest()

    def knows(self, request: Request) -> bool:
        """Whether `caller` would return a name for the request."""
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
        # A file that was just written may change again within the resolution of its mtime.
        is_settled = abs(time.time_ns() - stat.st_mtime_ns) > SETTLED_NS
        self._seen = version if is_settled else None

    def _owner_of(self, token: str) -> str | None:
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        name = None
        for known, expected in self._tokens.items():  # no early exit: constant time
            if hmac.compare_digest(digest, expected.sha256):
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
    """Whether an address to bind to can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
