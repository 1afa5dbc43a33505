"""Ports on which the framework of a script's ranks listens, reserved before the ranks start."""

from __future__ import annotations

import random
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Final

HAVE_PEERS: Final = ("tensorflow", "jax", "mxnet")
"""Frameworks whose ranks listen on addresses that all ranks know."""
SHARE_PORTS: Final = ("jax",)
"""Frameworks in HAVE_PEERS whose servers can listen on a port that is still bound."""
FIRST_PORT: Final = 20_000
TRIES: Final = 100
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class ReservedPort:
    """A port on this node that is reserved for one dray job until the port is closed.

    Two sockets reserve the port. The first socket has a name in the kernel's abstract namespace
    that contains the port number; only one process at a time can own a name. The kernel frees the
    name when the process ends. The second socket is bound to the port but never listens, so that
    programs other than dray get another port. A server that sets SO_REUSEPORT can listen on the
    port while this socket holds it; for other servers, such as TensorFlow's, the socket must be
    closed first.
    The port is outside the range that the kernel assigns to connections, so only a program that
    requests this specific port could take it while it is unbound.
    """

    def __init__(self, address: str) -> None:
        """Raise OSError if no port is free."""
        self._address = address
        for _ in range(TRIES):
            try:
                self._hold(random.randrange(FIRST_PORT, _end()))
                return
            except OSError:
                continue  # another job has reserved it, or a program listens on it
        self._hold(0)

    def _hold(self, port: int) -> None:
        with ExitStack() as held:
            bound = held.enter_context(_bound(self._address, port))
            # Set SO_REUSEPORT only after binding: if two processes set the option before binding,
            # both could bind the port.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self.port: int = bound.getsockname()[1]
            if sys.platform == "linux":
                name = held.enter_context(socket.socket(socket.AF_UNIX))
                name.bind(f"\0dray-port-{self.port}")
            self._held = held.pop_all()
        self._bound = bound

    def unbind(self) -> None:
        """Free the port for a server that can't share it. Other dray jobs still can't reserve the
        port."""
        self._bound.close()

    def close(self) -> None:
        self._held.close()

    def __str__(self) -> str:
        """Return `host:port`, with an IPv6 address in brackets, as the frameworks expect."""
        host = f"[{self._address}]" if ":" in self._address else self._address
        return f"{host}:{self.port}"


def _bound(address: str, port: int) -> socket.socket:
    """Return a socket bound to the port on all addresses of the node, because some servers listen
    on all addresses."""
    is_ipv6 = ":" in address
    bound = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET)
    try:
        bound.bind(("::" if is_ipv6 else "", port))
    except OSError:
        bound.close()
        raise
    return bound


def _end() -> int:
    """Return the lowest port of the range that the kernel uses for outgoing connections."""
    try:
        first = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        first = 32_768
    return max(first, FIRST_PORT + 1)
