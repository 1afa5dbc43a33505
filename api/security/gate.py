"""Checks the host name and the origin of requests.

A malicious web page can make a browser call a server that only the user's machine can reach:
directly, or by pointing the page's own host name at 127.0.0.1 (DNS rebinding). Such a call can be
recognised by its Host, Origin or Sec-Fetch-Site header, which no page can forge. Without tokens,
nothing else protects the cluster from such a page, so the checks are always on. On a server with
tokens, the checks are on only if hosts or origins are configured.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Any

from api.problems import Refused

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/?#@\[\]\\]+)(?::[0-9]{1,5})?")


class Gate:
    """The rules of one server. `hosts` and `origins` are allowed in addition to the server's
    own."""

    def __init__(
        self,
        *,
        has_tokens: bool,
        hosts: Iterable[str] | None = None,
        origins: Iterable[str] | None = None,
    ) -> None:
        self._checks_hosts = not has_tokens or hosts is not None
        self._checks_origins = not has_tokens or origins is not None
        self._hosts = frozenset(host.lower() for host in hosts or ())
        self.origins = frozenset(origin.lower().rstrip("/") for origin in origins or ())

    def check(self, headers: Mapping[str, str]) -> Refused | None:
        """Return why the request is refused, or None if it is allowed."""
        host = headers.get("host", "")
        if self._checks_hosts and not self._answers_as(host):
            return Refused(
                "forbidden",
                f"this server does not accept requests for the host {host[:255]!r}",
                hint="use localhost or the server's IP address in the URL, or add the host to "
                "DRAY_ALLOWED_HOSTS",
            )
        if self._checks_origins and not self._answers_page(headers, host):
            page = headers.get("origin", "another site")
            return Refused(
                "forbidden",
                f"this server does not accept requests from web pages on {page[:255]!r}",
                hint="call the API from a program, or add the page's origin to "
                "DRAY_ALLOWED_ORIGINS",
            )
        return None

    def _answers_as(self, host: str) -> bool:
        if not host:
            return True  # HTTP/1.0; browsers always send a Host
        name = host_name(host)
        return name in self._hosts or _is_local_name(name)

    def _answers_page(self, headers: Mapping[str, str], host: str) -> bool:
        origin = headers.get("origin")
        if origin is None:
            # If a call from another site's page has no Origin header, it has a Sec-Fetch-Site
            # header.
            return headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        origin = origin.lower()
        return origin in self.origins or origin in own_origins(host)


def own_origins(host: str) -> tuple[str, str]:
    """Return the origins of a server's own pages, for the Host header of a request."""
    return f"http://{host.lower()}", f"https://{host.lower()}"


def host_name(host: str) -> str:
    """Return the name or address in a Host header, without the port; `.` if it is malformed."""
    match = _HOST.fullmatch(host)
    return match[1].strip("[]").lower() if match else "."


def _is_local_name(name: str) -> bool:
    """Whether the name is an address, or always resolves to this machine (RFC 6761, 6.3).

    Other names without a dot don't count: they can be a top-level domain, or be completed with a
    search domain.
    """
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def cors(origins: Iterable[str]) -> dict[str, Any]:
    """Return arguments for starlette's CORSMiddleware that let these origins use the whole API."""
    return {
        "allow_origins": sorted(origins),
        "allow_methods": ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"],
        "allow_headers": [
            "Authorization",
            "Content-Type",
            "Idempotency-Key",
            "If-None-Match",
            "If-Range",
            "Last-Event-ID",
            "Range",
            "X-Request-Id",
        ],
        "expose_headers": [
            "Content-Disposition",
            "Content-Range",
            "ETag",
            "Location",
            "Retry-After",
            "X-Request-Id",
        ],
    }
