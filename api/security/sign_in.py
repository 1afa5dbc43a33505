"""The caller of a request: the owner of its token, or the user who signed in the browser.

A request with an `Authorization` header is authorised by this header alone. The cookie of a browser
that stays signed in permits reading; a change needs the session's write key in addition.
"""

from __future__ import annotations

from fastapi import Request
from starlette.datastructures import Headers

from api.problems import Refused
from api.security.auth import Authority, unauthorized
from api.security.cookies import (
    READS,
    WRITE_KEY,
    cookie_name,
    cookies_of,
    is_of_own_page,
    set_cookie,
    uses_tls,
)
from service.domain.errors import DatabaseUnavailable
from service.tracking.browser_sessions import BrowserSession, BrowserSessions, NewSession

_AGAIN = "sign in again on the web page"


class SignIn:
    def __init__(self, authority: Authority, sessions: BrowserSessions) -> None:
        self._authority = authority
        self._sessions = sessions

    async def caller(self, request: Request) -> str:
        """Return the name of the caller. Raises Refused."""
        try:
            return self._authority.caller(request)
        except Refused as refused:
            if refused.code != "unauthorized" or "authorization" in request.headers:
                raise
            cookies = await self._cookies(request.headers)
            if not cookies:
                raise
        owner = self._owner(request, await self._sessions.find(cookies))
        request.state.has_cookie = True
        return owner

    async def knows(self, request: Request) -> bool:
        """Whether the request still passes the checks of `caller`. False if the database, which
        knows the browsers, does not respond."""
        try:
            await self.caller(request)
        except (Refused, DatabaseUnavailable):
            return False
        return True

    async def open(self, request: Request) -> tuple[NewSession, str]:
        """Return a session for the owner of the request's token, and the header that sets its
        cookie. Raises Refused."""
        if not is_of_own_page(request.headers):
            detail = "only this server's own page can sign in a browser"
            raise Refused("forbidden", detail, None, "open the server's page, and sign in there")
        owner, token_id = self._authority.token_owner(request)
        replaced = await self._cookies(request.headers)
        new = await self._sessions.open(owner, token_id, replaced)
        return new, await self._header(request, new.cookie, new.lasts_s)

    async def close(self, request: Request) -> str:
        """End the session of the browser. Returns the header that deletes its cookie."""
        if cookies := await self._cookies(request.headers):
            await self._sessions.close(cookies)
        return await self._header(request, "", 0)

    async def close_all(self, owner: str) -> None:
        """End all sessions of a user."""
        await self._sessions.close_all(owner)

    async def _cookies(self, headers: Headers) -> list[str]:
        if "cookie" not in headers:
            return []
        return cookies_of(headers, cookie_name(await self._sessions.deployment_id()))

    async def _header(self, request: Request, secret: str, lasts_s: int) -> str:
        name = cookie_name(await self._sessions.deployment_id())
        tls = uses_tls(request.headers, request.url.scheme)
        return set_cookie(name, secret, lasts_s, tls=tls)

    def _owner(self, request: Request, found: list[BrowserSession]) -> str:
        """Return the user who signed in the browser. Raises Refused if the cookie doesn't authorise
        the request."""
        if not is_of_own_page(request.headers):
            detail = "a page from another origin can't use this browser's session"
            raise unauthorized(detail, hint="open the address from a page of this server")
        valid = [
            session
            for session in found
            if session.token_id == self._authority.sign_in_id(session.owner)
        ]
        if not valid:
            raise unauthorized("this browser is no longer signed in", hint=_AGAIN)
        owners = {session.owner for session in valid}
        if len(owners) > 1:
            detail = "the browser sent sign-in cookies of several users"
            raise unauthorized(detail, hint=f"delete the cookies of this host, and {_AGAIN}")
        if request.method not in READS:
            key = request.headers.get(WRITE_KEY, "")
            if not any(session.has_key(key) for session in valid):
                detail = f"the sign-in cookie permits only reading: a change needs {WRITE_KEY}"
                raise unauthorized(detail, hint=f"{_AGAIN}, or send a token")
        return valid[0].owner
