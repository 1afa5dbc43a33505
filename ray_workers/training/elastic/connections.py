"""Shuts down a process's connections to a group that it is leaving.

A gloo operation fails immediately if the connection on which it is waiting breaks, but not if
another connection breaks. For example, in a ring of four ranks, the rank opposite the dead one
waits for a neighbour that has already failed. Therefore a rank that leaves a group shuts down its
connections; its neighbours then fail and do the same, until the failure reaches every rank. Gloo
provides no alternative: unlike NCCL's abort, its abort does not wake a waiting rank.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TCP_INFO_BYTES = 256
BYTES_SENT_AT, BYTES_RETRANS_AT = 200, 208


class Connections:
    """The sockets that were opened while a group was formed."""

    def __init__(self) -> None:
        self._inodes: frozenset[str] = frozenset()
        self._before: frozenset[str] | None = None
        """The sockets that existed before the group was formed; None if no group is being
        formed."""
        self._numbers: dict[int, str] | None = None
        """The names of the sockets, keyed by descriptor; set by the first call to `sent_bytes`."""

    @contextmanager
    def being_formed(self) -> Iterator[None]:
        """Record the sockets that are opened within this context. Only one thread forms groups."""
        self._before = before = frozenset(_sockets().values())
        try:
            yield
        finally:
            self._inodes = frozenset(_sockets().values()) - before
            self._before = self._numbers = None

    def cut(self, is_due: Callable[[], bool] = lambda: True) -> None:
        """Shut down the sockets, even while the group is still being formed. Can be called
        repeatedly, and is harmless for sockets that gloo itself has closed.

        is_due: returns whether to shut down the sockets. `is_due` is called after the sockets are
        listed, because if another thread forms the groups, the listed sockets may already belong to
        the next group.
        """
        before, sockets = self._before, _sockets()
        if not is_due():
            return
        for fd, inode in sockets.items():
            if inode in before if before is not None else inode not in self._inodes:
                continue
            # Check a duplicate of the descriptor, because Gloo might close the original at any
            # time, and another thread might reuse its number.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as ours:
                if f"socket:[{os.fstat(ours.fileno()).st_ino}]" == inode and not _listens(ours):
                    ours.shutdown(socket.SHUT_RDWR)

    def sent_bytes(self) -> int | None:
        """Return the number of bytes, as counted by the kernel, that this process has sent to other
        members of its group: message headers are included, but packet headers and retransmissions
        are not. None if the kernel does not count the bytes."""
        if not hasattr(socket, "TCP_INFO"):
            return None
        if self._numbers is None:
            self._numbers = {f: inode for f, inode in _sockets().items() if inode in self._inodes}
        total = 0
        for fd, inode in self._numbers.items():
            with contextlib.suppress(OSError):
                if f"socket:[{os.fstat(fd).st_ino}]" == inode:
                    total += _sent_through(fd)
        return total


def _sent_through(fd: int) -> int:
    """Return the number of bytes sent through a TCP connection; 0 for other sockets, such as gloo's
    listener. Requires Linux 4.19 (`tcpi_bytes_sent` and `tcpi_bytes_retrans` in linux/tcp.h)."""
    borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=fd)
    try:
        info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    finally:
        borrowed.detach()
    if len(info) < BYTES_RETRANS_AT + 8:
        return 0
    sent, again = (
        int.from_bytes(info[at : at + 8], sys.byteorder) for at in (BYTES_SENT_AT, BYTES_RETRANS_AT)
    )
    return sent - again


def _listens(sock: socket.socket) -> bool:
    """Whether a socket is a listener. Listeners must stay open, because gloo ends the process when
    it can no longer accept connections."""
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets() -> dict[int, str]:
    """Return the names in /proc of this process's open sockets, keyed by descriptor."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:"):
                found[int(entry.name)] = target
    return found
