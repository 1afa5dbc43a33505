"""Cutting a process's connections to a group that it leaves.

A gloo operation fails at once when the connection that it waits on breaks, and waits on when it
does not: of four ranks in a ring, the one across from the dead rank waits for a neighbour that has
failed already. So whoever leaves a group shuts its connections down, its neighbours fail and do
the same, and the failure reaches everyone. Gloo itself offers no way to do it from outside: its
abort does not wake who waits. NCCL's does.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Connections:
    """The sockets that were opened while a group was formed."""

    def __init__(self) -> None:
        self._inodes: frozenset[str] = frozenset()

    @contextmanager
    def being_formed(self) -> Iterator[None]:
        """Take note of the sockets that appear meanwhile; one thread forms groups."""
        before = set(_sockets().values())
        try:
            yield
        finally:
            self._inodes = frozenset(_sockets().values()) - before

    def sever(self) -> None:
        """Shut them down. Harmless to repeat, and for what gloo has closed by itself."""
        for fd, inode in _sockets().items():
            if inode not in self._inodes:
                continue
            # Gloo may close the number meanwhile and somebody else open it: look again at our own.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as ours:
                if f"socket:[{os.fstat(ours.fileno()).st_ino}]" == inode and not _listens(ours):
                    ours.shutdown(socket.SHUT_RDWR)


def _listens(sock: socket.socket) -> bool:
    """Gloo ends the process when it can't accept any more, so its listener stays."""
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets() -> dict[int, str]:
    """The open sockets of this process: what /proc calls them, by descriptor."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:"):
                found[int(entry.name)] = target
    return found
