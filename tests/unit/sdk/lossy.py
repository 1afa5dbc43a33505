"""A connection that fails once, after the server has received the request."""

from __future__ import annotations

import httpx


class Lossy(httpx.HTTPTransport):
    """Loses the first answer."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[httpx.Response] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if not self.lost:
            response.read()
            self.lost.append(response)
            raise httpx.ReadError("the connection broke", request=request)
        return response
