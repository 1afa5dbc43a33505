"""Ports at which a script's ranks serve their framework, reserved before the ranks start."""

from __future__ import annotations

import random
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Final

HAVE_PEERS: Final = ("tensorflow", "jax", "mxnet")
"""Frameworks whose ranks listen at addresses that all ranks know."""
SHARE_PORTS: Final = ("jax",)
"""Frameworks in HAVE_PEERS whose servers can listen at a port that is still bound."""
FIRST_PORT: Final = 20_000
TRIES: Final = 100
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class ReservedPort:
    """A port of this node that no other job of dray gets until it is closed.

    Two sockets reserve the port. The first has the port's number as its name in the kernel's
    abstract namespace, where one process at a time can have a name, and which frees the name when
    the process ends. The second is bound to the port and never listens, so that programs other than
    dray get another port. A server that sets SO_REUSEPORT can listen at the port meanwhile; other
    servers, such as TensorFlow's, need it unbound first. The port is outside of the range that the
    kernel assigns to connections, so that only a program that asks for this port could take it.
    """

    def __init__(self, address: str) -> None:
        """OSError if no port is free."""
        self._address = address
        for _ in range(TRIES):
            try:
                self._hold(random.randrange(FIRST_PORT, _end()))
                return
            except OSError:
                continue  # another job has reserved it, or a program listens there
        self._hold(0)

    def _hold(self, port: int) -> None:
        with ExitStack() as held:
            bound = held.enter_context(_bound(self._address, port))
            # After binding: two processes that set it before could both bind the port.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self.port: int = bound.getsockname()[1]
            if sys.platform == "linux":
                name = held.enter_context(socket.socket(socket.AF_UNIX))
                name.bind(f"\0dray-port-{self.port}")
            self._held = held.pop_all()
        self._bound = bound

    def unbind(self) -> None:
        """Free the port for a server that shares no port. It stays reserved among dray's jobs."""
        self._bound.close()

    def close(self) -> None:
        self._held.close()

    def __str__(self) -> str:
        """`host:port`, in the notation of the frameworks."""
        host = f"[{self._address}]" if ":" in self._address else self._address
        return f"{host}:{self.port}"


def _bound(address: str, port: int) -> socket.socket:
    """A socket bound to the port at all addresses of the node, since some servers use them all."""
    is_ipv6 = ":" in address
    bound = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET)
    try:
        bound.bind(("::" if is_ipv6 else "", port))
    except OSError:
        bound.close()
        raise
    return bound


def _end() -> int:
    """The first port that the kernel assigns to connections."""
    try:
        first = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        first = 32_768
    return max(first, FIRST_PORT + 1)
