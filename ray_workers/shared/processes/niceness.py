"""How far a session of processes stands back behind the others of its machine."""

from __future__ import annotations

import contextlib
import os


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
