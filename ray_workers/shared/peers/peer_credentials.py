"""Checks whether the process at the other end of a connection belongs to this user."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from asyncio.trsock import TransportSocket
from pathlib import Path
from typing import Any

_UCRED = struct.Struct("3i")  # pid, uid, gid: unix(7)
_TCP_ESTABLISHED = 1

# netlink(7) and sock_diag(7).
_NETLINK_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_NLM_F_REQUEST = 1
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_DIAG_ANSWER = struct.Struct("=BB2x48x12xII")  # inet_diag_msg: family, state, ..., user, inode


def is_own_unix(connection: socket.socket | TransportSocket) -> bool:
    """Whether the other end of a Unix socket (client or server) belongs to this user."""
    ucred = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return bool(_UCRED.unpack(ucred)[1] == os.getuid())


def is_own_tcp(theirs: tuple[Any, ...], ours: tuple[Any, ...], *, or_roots: bool = False) -> bool:
    """Whether the other end of a TCP connection is a process of this user on this machine.

    With `or_roots`, processes of root are also accepted.
    """
    owner = _asked(theirs, ours) or _looked_up(theirs, ours)
    users = {os.getuid(), 0} if or_roots else {os.getuid()}
    # A socket that has been closed by its process is listed with user 0 and inode 0.
    return owner is not None and owner[0] in users and owner[1] != 0


def is_own_peer(connection: socket.socket | TransportSocket, *, or_roots: bool = False) -> bool:
    """Apply `is_own_tcp` to an accepted connection.

    Data can still be read after the sender has reset the connection, and another process may be
    using the sender's port by the time the kernel looks up its owner. Therefore, the function
    checks that the connection still exists after the kernel has responded.
    """
    try:
        theirs = connection.getpeername()
        is_own = is_own_tcp(theirs, connection.getsockname(), or_roots=or_roots)
        return is_own and connection.getpeername() == theirs
    except OSError:
        return False


def _asked(theirs: tuple[Any, ...], ours: tuple[Any, ...]) -> tuple[int, int] | None:
    """Ask the kernel for the user and the inode of an established connection's other end
    (sock_diag(7)). Return None if there is no such connection, or if the kernel does not respond.

    The query takes microseconds, whereas listing all connections takes milliseconds.
    """
    try:
        ends = [ipaddress.ip_address(str(end[0])) for end in (theirs, ours)]
        family = socket.AF_INET6 if ends[0].version == 6 else socket.AF_INET
        ports = struct.pack("!HH", theirs[1], ours[1])
        addresses = b"".join(end.packed.ljust(16, b"\0") for end in ends)
        socket_id = ports + addresses + bytes(4) + b"\xff" * 8
        query = struct.pack("=BBxxI", family, socket.IPPROTO_TCP, 1 << _TCP_ESTABLISHED) + socket_id
        header = _NETLINK_HEADER.pack(
            _NETLINK_HEADER.size + len(query), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0
        )
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(1.0)
            kernel.send(header + query)
            answer = kernel.recv(4096)
        if _NETLINK_HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
            return None
        _, state, user, inode = _DIAG_ANSWER.unpack_from(answer, _NETLINK_HEADER.size)
    except (AttributeError, OSError, ValueError, struct.error):
        return None
    return (user, inode) if state == _TCP_ESTABLISHED else None


def _looked_up(theirs: tuple[Any, ...], ours: tuple[Any, ...]) -> tuple[int, int] | None:
    """Look up the user and the inode in the kernel's connection lists (proc_pid_net(5)). An IPv6
    socket that is connected over IPv4, as torch's sockets are, is in the IPv6 list."""
    is_ipv6 = ":" in str(theirs[0])
    tables = {"tcp6" if is_ipv6 else "tcp": (theirs, ours)}
    if not is_ipv6:
        tables["tcp6"] = (_mapped(theirs), _mapped(ours))
    for table, ends in tables.items():
        row = [*map(_as_listed, ends), f"{_TCP_ESTABLISHED:02X}"]
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[1:4] == row:
                    return int(fields[7]), int(fields[9])
    return None


def _mapped(end: tuple[Any, ...]) -> tuple[Any, ...]:
    return (f"::ffff:{end[0]}", *end[1:])


def _as_listed(end: tuple[Any, ...]) -> str:
    """Format an address and port as in the kernel's lists: 32-bit words in this machine's byte
    order."""
    packed = ipaddress.ip_address(str(end[0]).split("%", 1)[0]).packed
    words = [int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4)]
    return f"{''.join(f'{word:08X}' for word in words)}:{end[1]:04X}"
