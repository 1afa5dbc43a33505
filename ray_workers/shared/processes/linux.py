"""Linux system calls for a process's parent, priority and memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MADV_COLLAPSE = 25
"""Advice for madvise(2), supported since Linux 6.1. Older kernels reject the advice, and the memory
remains unchanged."""
HUGE_BYTES = 2 << 20


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def stand_back(niceness: int, pid: int = 0) -> None:
    """Raise the niceness of a session leader to at least this value. Its children inherit it. `pid`
    is the pid of the leader; 0 means this process.

    If Linux groups processes by session (sched_autogroup), a process's niceness only counts within
    its session, so the session's niceness is set too.
    """
    niceness = max(niceness, os.getpriority(os.PRIO_PROCESS, pid))
    os.setpriority(os.PRIO_PROCESS, pid, niceness)
    with contextlib.suppress(OSError), open(f"/proc/{pid or 'self'}/autogroup", "w") as group:
        group.write(str(niceness))


# A fork copies a page table entry for each 4 KiB that the process has written to, and each entry is
# freed when the forked process ends. With 2 MiB pages, 300 MB of memory need 150 page table entries
# instead of 75,000. If the forked process writes to a huge page, the page is split and only 4 KiB
# are copied.


def pack(maps: str = "/proc/self/maps") -> Iterator[bool]:
    """Move this process's memory to huge pages, one page at a time. Moving a page takes a few
    milliseconds. After each page, yield False, because the work is not finished."""
    madvise = ctypes.CDLL(None).madvise
    for start, end in _own_memory(maps):
        first = -(-start // HUGE_BYTES) * HUGE_BYTES
        for address in range(first, end - HUGE_BYTES + 1, HUGE_BYTES):
            madvise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE_BYTES), MADV_COLLAPSE)
            yield False


def _own_memory(maps: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end of the writable memory areas that do not belong to a file
    (proc(5))."""
    with open(maps) as file:
        lines = file.readlines()  # read all lines first, because the steps change this file
    for line in lines:
        addresses, permissions, _, _, inode, *_ = line.split()
        if permissions == "rw-p" and inode == "0":
            start, end = (int(part, 16) for part in addresses.split("-"))
            yield start, end
