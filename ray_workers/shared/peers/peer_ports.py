"""Ports at which the ranks of a script serve their framework, known before the ranks start."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Final

HAVE_PEERS: Final = ("tensorflow", "jax", "mxnet")
"""Frameworks whose ranks listen at addresses that all of them know."""
SHARE_PORTS: Final = ("jax",)
"""Of these, those whose servers can listen at a port that is still reserved."""
FIRST_PORT: Final = 20_000
TRIES: Final = 100
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def reserved_port(address: str) -> socket.socket:
    """A socket that holds a free port at this address, and never listens. OSError without one.

    A server that sets SO_REUSEPORT, as gRPC does by default, can listen at the port meanwhile. For
    another one the socket is closed first; as the port is not one of those that the kernel gives to
    connections, it most likely stays free until the server has imported its framework.
    """
    for _ in range(TRIES):
        try:
            return _holding(address, random.randrange(FIRST_PORT, _end()))
        except OSError:
            continue  # somebody listens there
    return _holding(address, 0)


def host_and_port(holder: socket.socket) -> str:
    """`host:port` of a reserved port, as frameworks write it."""
    host, port = holder.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _holding(address: str, port: int) -> socket.socket:
    holder = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        holder.bind((address, port))
        # Afterwards: two that set it before could both have the port.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        holder.close()
        raise
    return holder


def _end() -> int:
    """The first of the ports that the kernel gives to connections."""
    try:
        first = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        first = 32_768
    return max(first, FIRST_PORT + 1)
