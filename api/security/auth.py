"""Authentication by bearer tokens from a file or, without a file, by the calling process's user.

The hashes of the tokens are compared in constant time. Changes to the file take effect from the
next request.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
from pathlib import Path

from fastapi import Request

from api.problems import Refused
from api.security.local_callers import LocalCallers
from dray.input.invisible import invisible_character
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
_COPY_AGAIN = "copy the token again, without the characters around it"


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
        _refuse_client(request)
        if self._file is None and (self._local is None or self._local.admits(request)):
            return LOCAL_OWNER
        token = _token(request)
        if token is None and self._file is None:
            raise unauthorized(_OF_HOME, hint=_FROM_HOME)
        if token is None:
            raise unauthorized("this server requires a token")
        return self._owner_of(token)

    def token_owner(self, request: Request) -> tuple[str, str]:
        """Return the name of the owner of the request's token, and the token's id. Raises Refused
        if the token is missing or unknown, even if the caller needs none."""
        _refuse_client(request)
        token = _token(request)
        if token is None:
            raise unauthorized("this call requires a token")
        owner = self._owner_of(token)
        token_id = self.sign_in_id(owner)
        if token_id is None:  # the token was removed in this moment
            raise _unknown()
        return owner, token_id

    def sign_in_id(self, owner: str) -> str | None:
        """Return a hash that identifies the token with which a user signs in; None if there is no
        such token."""
        if self._file is not None:
            return self.token_id(owner)
        return None if self._local is None else self._local.token_id()

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

    def _refresh(self, file: TokensFile) -> None:
        try:
            self._tokens = file.tokens()
        except OSError as error:
            logger.error("all requests are refused: DRAY_TOKENS_FILE can't be read: %s", error)
            detail = "the server can't read its tokens file"
            raise Refused(
                "unavailable", detail, None, "see the error in the server's log"
            ) from None

    def _owner_of(self, token: str) -> str:
        """Return the name of the owner of a token. Raises Refused if the token is unknown."""
        if found := invisible_character(token):
            raise unauthorized(f"the token contains {found}", hint=_COPY_AGAIN)
        if self._file is None:
            if self._local is not None and self._local.is_token(token):
                return LOCAL_OWNER
            raise _unknown(_FROM_HOME)
        self._refresh(self._file)
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        name = None
        for (
            known,
            expected,
        ) in self._tokens.items():  # no early exit, so that the loop takes constant time
            if hmac.compare_digest(digest, expected.sha256):
                name = known
        if name is None:
            raise _unknown()
        return name


def _token(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return None
    with contextlib.suppress(UnicodeError):  # the bytes of a header are read as ISO 8859-1
        token = token.encode("latin-1").decode()
    return token.strip(" \t") or None


def client_token(request: Request) -> str:
    """Return the token of a client of a federated job. Raises Refused if the request has no token.

    This function doesn't check whether the token belongs to the job; the use cases do.
    """
    token = _token(request)
    if token is None:
        raise unauthorized("this call requires the token of a client of a federated job")
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


def _unknown(hint: str = _SEND) -> Refused:
    detail = "this server does not know the token"
    return unauthorized(detail, f'{_BEARER}, error="invalid_token"', hint=hint)


def unauthorized(detail: str, challenge: str = _BEARER, *, hint: str = _SEND) -> Refused:
    return Refused("unauthorized", detail, None, hint, {"WWW-Authenticate": challenge})
