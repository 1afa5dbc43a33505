"""What /proc says of processes (proc(5)): who is alive, whose session it is, what it carries.

Linux only, and without ray or torch: the forkserver reads this after its preload.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

MARK_VARIABLE = "DRAY_PROCESS_MARK"
DEAD = (b"Z", b"X")
STOPPED = b"T"


def stat_fields(pid: int | str) -> list[bytes]:
    """Fields 3 (state) and following of /proc/PID/stat; empty if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    # The command may hold spaces and brackets; the fields begin after its last ')'.
    return stat[stat.rindex(b")") + 2 :].split()


def session_members(session: int, mark: str = "") -> list[int]:
    """Pids of the live (not zombie) processes of a session.

    mark: those that left the session are found by it, if they were started as a program: a
    program's environment says which rank it came from.
    """
    members = []
    entry_of_mark = f"{MARK_VARIABLE}={mark}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        fields = stat_fields(entry.name)
        if not fields or fields[0] in DEAD:
            continue
        if int(fields[3]) == session or (mark and _has_environment(entry.path, entry_of_mark)):
            members.append(int(entry.name))
    return members


def _has_environment(process: str, entry: bytes) -> bool:
    try:
        return entry in Path(process, "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def send_signal(pids: Iterable[int], number: int) -> None:
    """To each that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def is_stopped(pid: int) -> bool:
    """Stopped by a signal such as SIGSTOP."""
    return stat_fields(pid)[:1] == [STOPPED]


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for a signal: what has none would die of most of them."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(next(caught, "0"), 16) >> (number - 1) & 1)
