"""Middleware around every request: request id, gate, access log, counters, headers.

The middleware is plain ASGI, so that streams pass through unbuffered.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import MutableMapping
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import problems
from api.http.limits import Admission
from api.observability.prometheus import Telemetry
from api.security.gate import Gate
from service.config import logging_setup

access = logging.getLogger("api.access")
logger = logging.getLogger(__name__)

REQUEST_ID = "X-Request-Id"
PROBES = ("/healthz", "/readyz")
"""Paths of health checks. Health checks are frequent, so they are not logged. Health checks pass
the gate under any host name, and are processed even if the server has reached its limits."""
PAGE = "/"
"""Path of the web page. Any site can link to the page, since the page itself contains no job
data. The gate checks the calls that the page makes, like all other calls."""

SAFE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers that keep browsers from running, framing or embedding a response of this server."""

_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS"})


class Observed:
    """The outermost ASGI middleware of an application."""

    def __init__(
        self, app: ASGIApp, *, telemetry: Telemetry, gate: Gate, admission: Admission
    ) -> None:
        self._app = app
        self._telemetry = telemetry
        self._gate = gate
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get(REQUEST_ID))
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id
        reset = logging_setup.request_id.set(request_id)
        status = 0
        client: str = (scope.get("client") or ("",))[0]

        async def noticing(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answered = MutableHeaders(raw=message["headers"])
                _complete(answered, request_id)
                if state.get("has_cookie"):
                    _keep_private(answered)
            await send(message)

        try:
            refused = self._admission.enter(client)
            if scope["path"] in PROBES:
                refused = None
            elif refused is None and scope["path"] != PAGE:
                refused = self._gate.check(headers)
            if refused is not None:
                answer = problems.refusal(Request(scope), refused)
                await answer(scope, receive, noticing)
            else:
                await self._app(scope, receive, noticing)
        except ClientDisconnect:
            pass  # the caller disconnected while sending its body, and can't get an answer
        except Exception:
            logger.exception("a request failed")
            if status:
                raise  # the answer has begun, so it can only be aborted
            await problems.unexpected(Request(scope))(scope, receive, noticing)
        finally:
            self._admission.leave(client)
            self._record(scope, status, time.monotonic() - began)
            logging_setup.request_id.reset(reset)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        # Requests with unknown paths or unknown methods must not create new labels.
        route = getattr(scope.get("route"), "path", "unknown")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        status = status or 499  # the caller disconnected before there was an answer
        self._telemetry.answered(method, route, status, seconds)
        if scope["path"] in PROBES and status < 500:
            return
        access.info(
            "%s %s %d",
            method,
            route,
            status,
            extra={
                "method": method,
                "route": route,
                "status": status,
                "duration_ms": round(seconds * 1000, 2),
                "caller": scope["state"].get("caller", "-"),
            },
        )


def _request_id(given: str | None) -> str:
    """Return the caller's request id if it is safe to log, otherwise a new one."""
    if given is not None and _SANE_ID.fullmatch(given):
        return given
    return secrets.token_hex(12)


def _complete(headers: MutableHeaders, request_id: str) -> None:
    headers[REQUEST_ID] = request_id
    for name, value in SAFE_HEADERS.items():
        headers.setdefault(name, value)


def _keep_private(headers: MutableHeaders) -> None:
    """Keep shared caches from storing a response to a request that a cookie authorised. Caches
    apply this rule on their own only to `Authorization` (RFC 9111, section 3.5)."""
    headers.setdefault("Cache-Control", "private, no-cache")
    headers.add_vary_header("Cookie")
