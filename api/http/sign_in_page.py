"""The page that a browser shows instead of a problem document if the user opens an address of the
API without being signed in.

A browser sends no `SameSite=Strict` cookie if a link on another site, such as a chat, leads to the
address. It sends the cookie if the user opens the same address from this page.
"""

from __future__ import annotations

from html import escape

from fastapi import Request
from fastapi.responses import HTMLResponse


def is_navigation(request: Request) -> bool:
    """Whether a browser would show the response as a page of its own."""
    return request.method == "GET" and request.headers.get("sec-fetch-mode") == "navigate"


def sign_in_page(request: Request, detail: str, challenge: str) -> HTMLResponse:
    # The links are relative, because a proxy can serve the service under a path.
    root = "../" * (request.url.path.count("/") - 1) or "./"
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Sign in - dray</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"></head><body><main>'
        f"<h1>Sign in to open this address</h1><p>The server's message: {escape(detail)}.</p>"
        '<p>If this browser stays signed in: <a href="">open the address</a>. A browser does not '
        "send the sign-in with a link from another site.</p>"
        f'<p>Otherwise, <a href="{root}">sign in</a> with <em>Stay signed in on this browser</em>, '
        "and open the address again.</p></main></body></html>"
    )
    headers = {
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "WWW-Authenticate": challenge,
    }
    return HTMLResponse(text, 401, headers)
