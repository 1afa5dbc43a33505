"""The parts of a client that its methods use."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from dray._http.drivers import AsyncDriver, SyncDriver
from dray._http.flows import Flows


class BlockingCalls:
    """Methods of the blocking client, which make flows and have them run."""

    _flows: Flows
    _driver: SyncDriver


class AsyncCalls:
    """Methods of the asynchronous client."""

    _flows: Flows
    _driver: AsyncDriver


def http_options(url: str) -> dict[str, Any]:
    """Options of httpx clients for a server at `url`."""
    address = urlsplit(url)
    return {
        # Proxy settings never apply to a server on this very machine.
        "trust_env": address.hostname not in ("127.0.0.1", "localhost", "::1"),
        # Without TLS there is nothing to verify, and loading the certificates takes 20 ms.
        "verify": address.scheme != "http",
    }
