"""The cookie of a browser that stays signed in: its name, its attributes, and its own pages.

A browser also attaches cookies to requests that foreign pages cause. `SameSite=Strict` prevents
this for pages of other sites, but not for pages on other ports of the same host, which are of the
same site. Therefore the cookie permits only reading, and only if the browser reports no foreign
page.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from starlette.datastructures import Headers

from api.security.gate import own_origins

WRITE_KEY = "X-Dray-Write-Key"
"""Header with the key that changes need in addition to the cookie. Scripts on other origins can't
set this header, because the browser first asks the server, which doesn't allow it."""
READS = frozenset({"GET", "HEAD"})
MAX_COOKIES = 4
_SECRET = re.compile(r"[A-Za-z0-9_-]{43}")


def cookie_name(deployment_id: str) -> str:
    """Return the name of a deployment's cookie. The names of deployments differ, because browsers
    send the cookies of a host to all of its ports."""
    return f"dray-{hashlib.sha256(deployment_id.encode()).hexdigest()[:12]}"


def cookies_of(headers: Headers, name: str) -> list[str]:
    """Return the secrets in the cookies with this name, at most MAX_COOKIES.

    There can be several if another server on the host has set a cookie with this name. Browsers
    send the cookies with the shortest paths last.
    """
    found: dict[str, None] = {}
    for header in headers.getlist("cookie"):
        for pair in header.split(";"):
            key, _, value = pair.strip().partition("=")
            if key == name and _SECRET.fullmatch(value):
                found[value] = None
    return list(found)[-MAX_COOKIES:]


def is_of_own_page(headers: Mapping[str, str]) -> bool:
    """Whether a page of this server or the browser's user caused the request, and not a foreign
    page. Programs, which send no such headers, are not pages."""
    site = headers.get("sec-fetch-site")
    if site is not None:  # also correct behind a proxy that changes the Host
        return site in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is None or origin.lower() in own_origins(headers.get("host", ""))


def set_cookie(name: str, secret: str, lasts_s: int, *, tls: bool) -> str:
    """Return the value of the header that stores the cookie, or deletes it if `lasts_s` is 0.

    Without `Path`, the browser uses the folder of the request's own path, which is correct even if
    a proxy serves the service under a path that the service doesn't know.
    """
    parts = [f"{name}={secret}", f"Max-Age={lasts_s}", "HttpOnly", "SameSite=Strict"]
    return "; ".join([*parts, "Secure"] if tls else parts)


def uses_tls(headers: Mapping[str, str], scheme: str) -> bool:
    """Whether the browser uses HTTPS. A proxy that ends the TLS passes the page's origin on."""
    return scheme == "https" or headers.get("origin", "").lower().startswith("https://")
