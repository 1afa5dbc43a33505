"""A process that runs out of memory, for the kernel to end: really, by a memory cgroup."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from ray_workers.shared.processes.procfs import started_ticks
from tests.integration.harness import eventually

CGROUPS = Path("/sys/fs/cgroup")
ENDED_WITHIN_S = 20.0
"""A process at work touches a page that is new to it in far less."""


def exhaust(pid: int) -> None:
    """Grant a process no page of memory more; returns when the kernel has ended it for that.

    PermissionError or OSError where this machine lets us make no memory cgroup. See cgroups(7):
    what the process had is not charged to its new cgroup, so only what it takes from now on counts.
    """
    with _cgroup_without_memory() as members:
        started = started_ticks(pid)
        members.write_text(str(pid))
        eventually(
            lambda: started_ticks(pid) != started, within_s=ENDED_WITHIN_S, why="it needs no memory"
        )


@contextlib.contextmanager
def _cgroup_without_memory() -> Iterator[Path]:
    """The file that takes the pids of its members."""
    parent, limit = CGROUPS, "memory.max"
    if (CGROUPS / "memory").is_dir():  # cgroups of version 1
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
