"""Sockets that are connected only to addresses that `net_policy` allows.

The address of every connection is checked when the connection is made: whatever the host's name
leads to by then is judged, and not what it led to when somebody looked before.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from typing import Any

from ray_workers.shared.net_policy import AllowedHosts, refused_address, refused_host

AddressInfo = tuple[int, int, int, str, tuple[Any, ...]]


class RefusedAddress(Exception):
    """Nobody may connect to the host, or to an address that it has."""

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(f"{host}: {reason}")
        self.host = host
        self.reason = reason


def socket_factory(host: str, allowed: AllowedHosts) -> Callable[[AddressInfo], socket.socket]:
    """Of aiohttp's `TCPConnector`, for connections to this host alone.

    RefusedAddress for a host that its spelling forbids, and from the factory for one that an
    address forbids.
    """
    reason = refused_host(host, allowed)
    if reason is not None:
        raise RefusedAddress(host, reason)

    def make(info: AddressInfo) -> socket.socket:
        family, kind, protocol, _, place = info
        address = ipaddress.ip_address(str(place[0]).split("%", 1)[0])
        if not allowed.has_name(host):
            reason = refused_address(address, allowed)
            if reason is not None:
                raise RefusedAddress(host, reason)
        return socket.socket(family, kind, protocol)

    return make
