"""Shuts down a process's connections to a group that it leaves.

A gloo operation fails at once if the connection that it waits on breaks, and otherwise waits on: of
four ranks in a ring, the rank across from the dead one waits for a neighbour that has failed
already. So a rank that leaves a group shuts its connections down; its neighbours fail and do the
same, until the failure reaches every rank. Gloo offers no other way: its abort does not wake a
waiting rank. NCCL's does.
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
        """The sockets that existed when forming began; None when no group is being formed."""
        self._numbers: dict[int, str] | None = None
        """The names of the sockets by descriptor, once `sent_bytes` has requested them."""

    @contextmanager
    def being_formed(self) -> Iterator[None]:
        """Record the sockets that appear within this context; one thread forms groups."""
        self._before = before = frozenset(_sockets().values())
        try:
            yield
        finally:
            self._inodes = frozenset(_sockets().values()) - before
            self._before = self._numbers = None

    def cut(self, is_due: Callable[[], bool] = lambda: True) -> None:
        """Shut the sockets down, also while the group is still being formed. This may be repeated,
        and is harmless for sockets that gloo has closed itself.

        is_due: for a thread that does not form groups: called once the sockets are listed, which
        may belong to the next group already.
        """
        before, sockets = self._before, _sockets()
        if not is_due():
            return
        for fd, inode in sockets.items():
            if inode in before if before is not None else inode not in self._inodes:
                continue
            # Gloo may close the descriptor meanwhile, and a thread reopen it: check the duplicate.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as ours:
                if f"socket:[{os.fstat(ours.fileno()).st_ino}]" == inode and not _listens(ours):
                    ours.shutdown(socket.SHUT_RDWR)

    def sent_bytes(self) -> int | None:
        """Bytes that this process has sent to the others of its group, as the kernel counts them:
        with message headers, without packet headers and retransmissions. None if the kernel does
        not count."""
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
    """Bytes sent through a TCP connection; 0 for other sockets, such as gloo's listener. Needs
    Linux 4.19 (`tcpi_bytes_sent` and `tcpi_bytes_retrans` in linux/tcp.h)."""
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
    """Whether a socket is a listener: gloo ends the process when it can no longer accept."""
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets() -> dict[int, str]:
    """The open sockets of this process: their names in /proc, by descriptor."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:"):
                found[int(entry.name)] = target
    return found
