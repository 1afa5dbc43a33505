"""Send messages to receivers that can be slow, hostile or unreachable.

Whatever the receiver does, an attempt to send a message ends within `LIMIT_S` and uses little
memory. Redirects are not followed, and the connection is closed after the beginning of the
response. The address of each connection is checked by the same rules as the addresses of jobs'
data. Proxies from the environment are not used, because the addresses to which they connect can't
be checked.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

import dray
from ray_workers.shared.frame_fields import clean
from ray_workers.shared.guarded_sockets import AddressInfo, RefusedAddress, socket_factory
from ray_workers.shared.net_policy import AllowedHosts
from service.domain.webhooks import Answer

LIMIT_S = 10.0
"""Time limit for sending a message, from the lookup of the host name to the arrival of the
response."""
BODY_LIMIT_S = 1.0
"""Time limit for the body of a response, starting when its status has arrived."""
MAX_BODY_BYTES = 1000
"""Maximum bytes of a response that are kept."""

MAX_RECEIVED_BYTES = 256 * 1024
"""A connection is treated as closed after this many bytes. Without this limit, a receiver could
send any number of interim responses (100 Continue), each of which the service's event loop would
read."""

# Use a separate thread pool, because lookups of unresolvable host names can block all threads of a
# pool.
_lookups = ThreadPoolExecutor(32, thread_name_prefix="webhook-dns")


class _Resolver(AbstractResolver):
    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        look_up = functools.partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(_lookups, look_up)
        return [
            ResolveResult(
                hostname=host,
                host=str(sockaddr[0]),
                port=port,
                family=each_family,
                proto=protocol,
                flags=socket.AI_NUMERICHOST,
            )
            for each_family, _, protocol, _, sockaddr in found
        ]

    async def close(self) -> None:
        pass


class _BoundedSocket(socket.socket):
    """A socket that appears closed after `MAX_RECEIVED_BYTES` bytes."""

    _left = MAX_RECEIVED_BYTES

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        read = super().recv(min(size, self._left), flags)
        self._left -= len(read)
        return read

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0, /) -> int:
        if self._left == 0:
            return 0
        read = super().recv_into(buffer, min(size or len(buffer), self._left), flags)
        self._left -= read
        return read


def _bounded(info: AddressInfo, *, make: Callable[[AddressInfo], socket.socket]) -> socket.socket:
    return _BoundedSocket(*info[:3], fileno=make(info).detach())


async def post(
    url: str, body: bytes, headers: Mapping[str, str], private_hosts: AllowedHosts
) -> Answer:
    """Return the receiver's response, or the reason why there is no response. Network errors are
    not raised."""
    began = time.monotonic()
    status, text, error = None, "", None
    try:
        async with asyncio.timeout(LIMIT_S):
            status, text = await _post(url, body, headers, private_hosts)
    except RefusedAddress as refused:
        error = f"connecting to {refused.host} is not allowed: {refused.reason}"
    except TimeoutError:
        error = f"no response within {LIMIT_S:g} s"
    except (aiohttp.ClientError, OSError, ValueError) as failure:
        error = _plainly(failure)
    if status is not None and not 200 <= status < 300:
        error = f"the receiver answered {status}"
        error += ": redirects are not followed" if 300 <= status < 400 else ""
    return Answer(status, text, error, time.monotonic() - began)


async def _post(
    url: str, body: bytes, headers: Mapping[str, str], private_hosts: AllowedHosts
) -> tuple[int, str]:
    full = {
        **headers,
        "Content-Type": "application/json",
        "User-Agent": f"dray/{dray.__version__}",
        "Accept-Encoding": "identity",
    }
    address = URL(url, encoded=True)  # otherwise yarl would rewrite the path
    host = address.host or ""
    connector = aiohttp.TCPConnector(
        socket_factory=functools.partial(_bounded, make=socket_factory(host, private_hosts)),
        resolver=_Resolver(),
        force_close=True,
    )
    async with (
        aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            trust_env=False,
        ) as session,
        session.post(address, data=body, headers=full, allow_redirects=False) as response,
    ):
        return response.status, await _beginning(response)


async def _beginning(response: aiohttp.ClientResponse) -> str:
    """Return the part of the body that arrives in time. A missing body is not an error."""
    read = b""
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            while len(read) < MAX_BODY_BYTES:
                piece = await response.content.read(MAX_BODY_BYTES - len(read))
                if not piece:
                    break
                read += piece
    except (TimeoutError, aiohttp.ClientError, OSError):
        pass
    return clean(read.decode(errors="replace"))


def _plainly(failure: Exception) -> str:
    if isinstance(failure, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
        return "its certificate can't be verified"
    if isinstance(failure, aiohttp.ClientConnectorDNSError):
        return "its host has no address"
    if isinstance(failure, aiohttp.ClientConnectorError):
        return f"no connection: {failure.os_error.strerror or 'refused'}"
    if isinstance(failure, aiohttp.ClientConnectionError):
        return "the connection was closed before a response arrived"
    return f"the request failed ({type(failure).__name__})"
