"""Sign in with the token in this user's home if a server on this machine requires a token."""

from __future__ import annotations

from collections.abc import Generator

import httpx

from dray import home_token


class HomeSignIn(httpx.Auth):
    """Resends a request with the token if the server rejected the request because the token was
    missing.

    The token is only sent to processes of this user or of root, because another user could listen
    on the server's port while the server is not running.
    """

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        response = yield request
        token = home_token.own() if response.status_code == 401 else None
        if token is not None and _answers_own_process(response):
            request.headers["Authorization"] = f"Bearer {token}"
            yield request


def _answers_own_process(response: httpx.Response) -> bool:
    from ray_workers.shared.peers.peer_credentials import is_own_tcp

    stream = response.extensions.get("network_stream")
    if stream is None:
        return False
    theirs, ours = stream.get_extra_info("server_addr"), stream.get_extra_info("client_addr")
    return bool(theirs and ours) and is_own_tcp(theirs, ours, or_roots=True)
