"""The callers of a server without a tokens file: processes of its own user, and holders of the
token in its home.

Such a server runs its callers' code as its own user. Therefore other users of the machine,
containers and callers behind forwarded ports must not be able to call the server without the token
in its home.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
from pathlib import Path

from fastapi import Request

from api.security.gate import host_name
from dray import home_token

logger = logging.getLogger(__name__)

_OF_PROXIES = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
"""Headers that a proxy adds. The user of the proxy's process is not the caller."""


class LocalCallers:
    """Admits local callers by their connections. All other callers need the token, which this class
    holds."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def admits(self, request: Request) -> bool:
        """Whether the caller needs no token."""
        return is_of_own_user(request)

    def is_token(self, token: str) -> bool:
        """Compare the token with the token file, which is read at each call, so that changes take
        effect immediately."""
        expected = self._token()
        given = token.encode("utf-8", "surrogateescape")
        return expected is not None and hmac.compare_digest(given, expected.encode())

    def token_id(self) -> str | None:
        """Return a hash that identifies the current token; None if there is no token."""
        token = self._token()
        if token is None:
            return None
        return hashlib.sha256(hashlib.sha256(token.encode()).digest()).hexdigest()

    def _token(self) -> str | None:
        try:
            return home_token.read(self._home)
        except (home_token.UnsafeTokenFile, OSError) as error:
            logger.error(
                "no token is accepted, because the token file can't be read: %s: %s",
                home_token.path_in(self._home),
                error,
            )
            return None


def is_of_own_user(request: Request) -> bool:
    """Whether the server's own user, or root, sent the request from this machine.

    False if the request has passed through a proxy or was addressed to another machine: in these
    cases, the process at the other end of the connection has only forwarded the request.
    """
    if any(name in request.headers for name in _OF_PROXIES):
        return False
    if not _names_this_machine(request.headers.get("host", "")):
        return False
    asks_kernel = getattr(request.state, "is_of_own_user", None)
    return asks_kernel is not None and bool(asks_kernel())


def _names_this_machine(host: str) -> bool:
    """Whether a Host header contains a name, or a loopback address."""
    name = host_name(host)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return True
    return home_token.is_loopback(name)
