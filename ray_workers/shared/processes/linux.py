"""Requests to Linux about processes: their parents, their priority, their memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MADV_COLLAPSE = 25
"""madvise(2), since Linux 6.1; an older kernel refuses it, and all stays as it is."""
HUGE_BYTES = 2 << 20


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def stand_back(niceness: int, pid: int = 0) -> None:
    """Give the leader of a session this niceness, unless it has a greater one. Its children inherit
    it. pid: of the leader; 0 for this process.

    Where Linux groups processes by session (sched_autogroup), a process's own niceness counts only
    within its session, and that of the session is set here too.
    """
    niceness = max(niceness, os.getpriority(os.PRIO_PROCESS, pid))
    os.setpriority(os.PRIO_PROCESS, pid, niceness)
    with contextlib.suppress(OSError), open(f"/proc/{pid or 'self'}/autogroup", "w") as group:
        group.write(str(niceness))


# A fork copies an entry of the page table for each 4 KiB that the process has written to, and the
# end of the forked process frees each of them. In pages of 2 MiB, 300 MB have 150 entries instead
# of 75,000. A page that the forked process writes to is taken apart, and 4 KiB of it are copied.


def pack(maps: str = "/proc/self/maps") -> Iterator[bool]:
    """Move this process's memory to huge pages, one at each step; yields False,
    as it is not all done. A step takes a few milliseconds."""
    madvise = ctypes.CDLL(None).madvise
    for start, end in _own_memory(maps):
        first = -(-start // HUGE_BYTES) * HUGE_BYTES
        for address in range(first, end - HUGE_BYTES + 1, HUGE_BYTES):
            madvise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE_BYTES), MADV_COLLAPSE)
            yield False


def _own_memory(maps: str) -> Iterator[tuple[int, int]]:
    """Start and end of what is written to and belongs to no file (proc(5))."""
    with open(maps) as file:
        lines = file.readlines()  # at once: the steps change what is listed
    for line in lines:
        addresses, permissions, _, _, inode, *_ = line.split()
        if permissions == "rw-p" and inode == "0":
            start, end = (int(part, 16) for part in addresses.split("-"))
            yield start, end
