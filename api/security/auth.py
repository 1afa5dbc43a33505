"""Authentication by bearer tokens from a file or, without a file, by the calling process's user.

The hashes of the tokens are compared in constant time. Changes to the file take effect from the
next request.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
from pathlib import Path

from fastapi import Request

from api.problems import Refused
from api.security.local_callers import LocalCallers
from service.config.settings import Settings
from service.config.tokens_file import LOCAL_OWNER, Tokens, TokensFile, load_tokens
from service.domain.events import ANONYMOUS
from service.federation.tokens import JOIN_TOKEN

logger = logging.getLogger(__name__)

_BEARER = 'Bearer realm="dray"'
_SEND = "send `Authorization: Bearer TOKEN`; the SDK and CLI read it from DRAY_TOKEN"
_OF_HOME = (
    "without a token, only programs that run as the server's user on the same machine can call "
    "this server; to sign in with a browser, open the link that the server prints when it starts"
)
_FROM_HOME = f"{_SEND}. The token is stored in the file `token` in the server's DRAY_HOME"


class Authority:
    """Determines the caller of a request from the current content of the tokens file.

    If the file is missing, all requests are refused.
    """

    def __init__(self, path: Path | None, local: LocalCallers | None = None) -> None:
        """Raises BadTokensFile if the file is invalid.

        path: the tokens file; None for a server without tokens. local: decides who may call a
        server without tokens; None admits every user of this machine.
        """
        self._file = None if path is None else TokensFile(path)
        self._tokens: Tokens = {} if path is None else load_tokens(path)
        self._local = local

    @classmethod
    def of(cls, settings: Settings) -> Authority:
        is_local = settings.tokens_file is None and not settings.open_to_local_users
        return cls(settings.tokens_file, LocalCallers(settings.home) if is_local else None)

    @property
    def has_tokens(self) -> bool:
        return self._file is not None

    def caller(self, request: Request) -> str:
        """Return the name of the caller. Raises Refused if the token is missing or unknown."""
        return self._owner(request, _token(request), _BEARER)

    def reader(self, request: Request) -> str:
        """Return the name of the caller of a web page. The token can also be sent as the password
        of Basic authentication.

        Other routes refuse passwords, because browsers also attach them to requests from other
        sites' pages.
        """
        token = _token(request) or _password(request)
        return self._owner(request, token, 'Basic realm="dray", charset="UTF-8"')

    def _owner(self, request: Request, token: str | None, challenge: str) -> str:
        _refuse_client(request)
        if self._file is None:
            if self._local is not None and not self._local.admits(request, token):
                raise _unauthorized(_OF_HOME, challenge, _FROM_HOME)
            return LOCAL_OWNER
        if token is None:
            raise _unauthorized("this server requires a token", challenge)
        self._refresh(self._file)
        name = self._owner_of(token)
        if name is None:
            challenge += ', error="invalid_token"' if challenge.startswith("Bearer") else ""
            raise _unauthorized("this server does not know the token", challenge)
        return name

    def actor(self, caller: str) -> str:
        """Return the name of the caller for records: `anonymous` on a server without tokens."""
        return ANONYMOUS if self._file is None else caller

    def is_admin(self, caller: str) -> bool:
        """Whether the caller may change queues; on a server without tokens, every caller may."""
        known = self._tokens.get(caller)
        return self._file is None or (known is not None and known.is_admin)

    def token_id(self, caller: str) -> str | None:
        """Return a hash that identifies the caller's token; None if the token was removed.

        The hash is empty on a server without tokens.
        """
        if self._file is None:
            return ""
        self._refresh(self._file)
        known = self._tokens.get(caller)
        return None if known is None else hashlib.sha256(known.sha256).hexdigest()

    def knows(self, request: Request) -> bool:
        """Whether the request passes the checks of `caller`."""
        try:
            self.caller(request)
        except Refused:
            return False
        return True

    def _refresh(self, file: TokensFile) -> None:
        try:
            self._tokens = file.tokens()
        except OSError as error:
            logger.error("all requests are refused: DRAY_TOKENS_FILE can't be read: %s", error)
            detail = "the server can't read its tokens file"
            raise Refused(
                "unavailable", detail, None, "see the error in the server's log"
            ) from None

    def _owner_of(self, token: str) -> str | None:
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        name = None
        for (
            known,
            expected,
        ) in self._tokens.items():  # no early exit, so that the loop takes constant time
            if hmac.compare_digest(digest, expected.sha256):
                name = known
        return name


def _token(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def client_token(request: Request) -> str:
    """Return the token of a client of a federated job. Raises Refused if the request has no token.

    This function doesn't check whether the token belongs to the job; the use cases do.
    """
    token = _token(request)
    if token is None:
        raise _unauthorized("this call requires the token of a client of a federated job", _BEARER)
    return token


def _refuse_client(request: Request) -> None:
    """Raise Refused for the token of a federated job's client, because such a token is valid only
    for taking part in rounds.

    Such a token is also refused on a server without tokens.
    """
    if (_token(request) or "").startswith(JOIN_TOKEN):
        detail = (
            "the token belongs to a client of a federated job, and is valid only for the rounds of "
            "this job"
        )
        raise Refused("forbidden", detail, None, "send your own token instead, or no token")


def _password(request: Request) -> str | None:
    scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        pair = base64.b64decode(encoded, validate=True).decode()
    except ValueError:
        return None
    return pair.partition(":")[2] or None


def _unauthorized(detail: str, challenge: str, hint: str = _SEND) -> Refused:
    return Refused("unauthorized", detail, None, hint, {"WWW-Authenticate": challenge})
