"""Authentication by bearer tokens from a file; without a file, any program on this machine may
call (see `api.security.gate`).

The hashes of the tokens are compared in constant time. A change of the file takes effect with the
next request.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import logging
from pathlib import Path

from fastapi import Request

from api.problems import Refused
from service.config.tokens_file import LOCAL_OWNER, Tokens, TokensFile, load_tokens
from service.domain.events import ANONYMOUS
from service.federation.tokens import JOIN_TOKEN

logger = logging.getLogger(__name__)


class Authority:
    """Names the caller of a request, by the current content of the tokens file.

    If the file is missing, all requests are refused.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises BadTokensFile if the file is invalid. path: None for a server without tokens."""
        self._file = None if path is None else TokensFile(path)
        self._tokens: Tokens = {} if path is None else load_tokens(path)

    @property
    def has_tokens(self) -> bool:
        return self._file is not None

    def caller(self, request: Request) -> str:
        """Name of the caller; raises Refused if the token is missing or unknown."""
        _refuse_client(request)
        if self._file is None:
            return LOCAL_OWNER
        return self._owner(self._file, _token(request), 'Bearer realm="dray"')

    def reader(self, request: Request) -> str:
        """As `caller`, for pages, where the token may also be the password of Basic authentication.

        Other routes refuse passwords, which browsers attach to requests that foreign pages cause.
        """
        _refuse_client(request)
        if self._file is None:
            return LOCAL_OWNER
        token = _token(request) or _password(request)
        return self._owner(self._file, token, 'Basic realm="dray", charset="UTF-8"')

    def _owner(self, file: TokensFile, token: str | None, challenge: str) -> str:
        if token is None:
            raise _unauthorized("this server asks for a token", challenge)
        self._refresh(file)
        name = self._owner_of(token)
        if name is None:
            challenge += ', error="invalid_token"' if challenge.startswith("Bearer") else ""
            raise _unauthorized("the token is not one of this server's", challenge)
        return name

    def actor(self, caller: str) -> str:
        """Name of the caller for records; `anonymous` for everybody on a server without tokens."""
        return ANONYMOUS if self._file is None else caller

    def is_admin(self, caller: str) -> bool:
        """Whether the caller may change queues; everybody on a server without tokens."""
        known = self._tokens.get(caller)
        return self._file is None or (known is not None and known.is_admin)

    def token_id(self, caller: str) -> str | None:
        """Says which token the caller has, without giving it away; None if the caller has none any
        more. Empty on a server without tokens."""
        if self._file is None:
            return ""
        self._refresh(self._file)
        known = self._tokens.get(caller)
        return None if known is None else hashlib.sha256(known.sha256).hexdigest()

    def knows(self, request: Request) -> bool:
        """Whether `caller` would return a name for the request."""
        try:
            self.caller(request)
        except Refused:
            return False
        return True

    def _refresh(self, file: TokensFile) -> None:
        try:
            self._tokens = file.tokens()
        except OSError as error:
            logger.error("nobody is let in: DRAY_TOKENS_FILE can't be read: %s", error)
            detail = "the server can't read the file of its tokens"
            raise Refused("unavailable", detail, None, "its log says why") from None

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


def client_token(request: Request) -> str:
    """The token of a client of a federated job; raises Refused where there is none. Whether it is
    good for a job, the database knows."""
    token = _token(request)
    if token is None:
        raise _unauthorized("this call needs the token of a client", 'Bearer realm="dray"')
    return token


def _refuse_client(request: Request) -> None:
    """Also on a server without tokens: who has such a token may use it for rounds alone."""
    if (_token(request) or "").startswith(JOIN_TOKEN):
        detail = "the token is that of a client of a federated job, and for its rounds alone"
        raise Refused("forbidden", detail, None, "leave it out here, or send your own token")


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
