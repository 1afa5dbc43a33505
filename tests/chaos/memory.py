"""Let the kernel kill a process because it really runs out of memory, using a memory cgroup."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from ray_workers.shared.processes.procfs import started_ticks
from tests.integration.harness import eventually

CGROUPS = Path("/sys/fs/cgroup")
ENDED_WITHIN_S = 20.0
"""An active process touches a new page much sooner."""


def exhaust(pid: int) -> None:
    """Deny a process any more memory. Return when the kernel has killed it for that.

    Raises PermissionError or OSError if a memory cgroup can't be created on this machine. See
    cgroups(7): memory that the process already has is not charged to its new cgroup, so only new
    allocations count.
    """
    with _cgroup_without_memory() as members:
        started = started_ticks(pid)
        members.write_text(str(pid))
        eventually(
            lambda: started_ticks(pid) != started,
            within_s=ENDED_WITHIN_S,
            why="the process allocates no memory",
        )


@contextlib.contextmanager
def _cgroup_without_memory() -> Iterator[Path]:
    """Return the file to which the pids of its members are written."""
    parent, limit = CGROUPS, "memory.max"
    if (CGROUPS / "memory").is_dir():  # cgroups v1
        parent, limit = CGROUPS / "memory", "memory.limit_in_bytes"
    group = parent / f"dray-chaos-{secrets.token_hex(4)}"
    group.mkdir()
    try:
        (group / limit).write_text("0")
        yield group / "cgroup.procs"
    finally:
        eventually(lambda: _removed(group), within_s=ENDED_WITHIN_S, why=f"{group} is in use")


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()
