"""The parts of a client that its methods use."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from dray._http.drivers import AsyncDriver, SyncDriver
from dray._http.flows import Flows
from dray._http.home_sign_in import HomeSignIn
from dray._http.transport import Connection
from dray.home_token import is_loopback


class BlockingCalls:
    """Methods of the blocking client, which make flows and have them run."""

    _flows: Flows
    _driver: SyncDriver


class AsyncCalls:
    """Methods of the asynchronous client."""

    _flows: Flows
    _driver: AsyncDriver


def http_options(connection: Connection) -> dict[str, Any]:
    """Options of the httpx client of a connection."""
    address = urlsplit(connection.url)
    is_local = is_loopback(address.hostname or "")
    signs_in = is_local and not connection.has_token and not address.username
    return {
        "auth": HomeSignIn() if signs_in else None,
        # Proxy settings never apply to a server on this very machine.
        "trust_env": not is_local,
        # Without TLS there is nothing to verify, and loading the certificates takes 20 ms.
        "verify": address.scheme != "http",
    }
