"""Sockets that connect only to addresses that `net_policy` allows.

The address is checked when the connection is made, because by then the host name may resolve to a
different address than in an earlier check.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from typing import Any

from ray_workers.shared.net_policy import AllowedHosts, refused_address, refused_host

AddressInfo = tuple[int, int, int, str, tuple[Any, ...]]


class RefusedAddress(Exception):
    """Connections to the host, or to one of its addresses, are not allowed."""

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(f"{host}: {reason}")
        self.host = host
        self.reason = reason


def socket_factory(host: str, allowed: AllowedHosts) -> Callable[[AddressInfo], socket.socket]:
    """Return a socket factory for aiohttp's `TCPConnector`, whose sockets connect only to this
    host.

    Raises RefusedAddress if the host name is forbidden. The factory raises RefusedAddress if the
    address of the host is forbidden.
    """
    reason = refused_host(host, allowed)
    if reason is not None:
        raise RefusedAddress(host, reason)

    def make(info: AddressInfo) -> socket.socket:
        family, kind, protocol, _, sockaddr = info
        address = ipaddress.ip_address(str(sockaddr[0]).split("%", 1)[0])
        if not allowed.has_name(host):
            reason = refused_address(address, allowed)
            if reason is not None:
                raise RefusedAddress(host, reason)
        return socket.socket(family, kind, protocol)

    return make
