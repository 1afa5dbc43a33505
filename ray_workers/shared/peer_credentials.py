"""The credentials of a connection's other end: whether its process belongs to this user."""

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
_ESTABLISHED = "01"


def is_own_unix(connection: socket.socket | TransportSocket) -> bool:
    """Whether this user connected a Unix socket, or listens at its path."""
    ucred = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return bool(_UCRED.unpack(ucred)[1] == os.getuid())


def is_own_tcp(theirs: tuple[Any, ...], ours: tuple[Any, ...]) -> bool:
    """Whether the other end of a TCP connection is on this machine, in a process of this user.

    The kernel lists connections with their owners (proc_pid_net(5)), and an IPv6 socket that
    connected by IPv4, as torch's do, among those of IPv6.
    """
    tables = {"tcp6" if len(theirs) == 4 else "tcp": (theirs, ours)}
    if len(theirs) == 2:
        tables["tcp6"] = (_mapped(theirs), _mapped(ours))
    for table, ends in tables.items():
        row = [*map(_as_listed, ends), _ESTABLISHED]
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[1:4] == row:
                    # A socket that no process holds any more is user 0's there, with inode 0.
                    return int(fields[7]) == os.getuid() and int(fields[9]) != 0
    return False


def _mapped(end: tuple[Any, ...]) -> tuple[Any, ...]:
    return (f"::ffff:{end[0]}", *end[1:])


def _as_listed(end: tuple[Any, ...]) -> str:
    """An address and port as they are listed: 32-bit words in this machine's order of bytes."""
    packed = ipaddress.ip_address(str(end[0]).split("%", 1)[0]).packed
    words = [int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4)]
    return f"{''.join(f'{word:08X}' for word in words)}:{end[1]:04X}"
