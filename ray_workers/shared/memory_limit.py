"""Memory left in the control groups around this process (cgroups(7)), as in a container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MemoryUsage:
    """Memory of a group, in bytes. Reclaimable file cache counts as available."""

    used: int
    available: int


@dataclass(frozen=True)
class _Files:
    """The file names of one version of control groups."""

    limit: str
    used: str
    file_cache: str
    """Line of `memory.stat` with the least used file cache, all of which can be reclaimed."""


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")
UNLIMITED = 1 << 60
"""Limits from here on mean no limit; version 1 uses a number for that."""


def memory_in_control_groups(proc: Path, sys: Path) -> list[MemoryUsage]:
    """The memory of the process's own group and the visible ones around it that have a limit."""
    found = []
    for directory, files in _groups(proc, sys / "fs" / "cgroup"):
        try:
            limit = int((directory / files.limit).read_text())
            used = int((directory / files.used).read_text())
            stat = dict(line.split() for line in (directory / "memory.stat").open())
            used -= min(used, int(stat[files.file_cache]))
        except (OSError, ValueError, KeyError):  # `max` is no limit; or the group does not exist
            continue
        if limit < UNLIMITED:
            found.append(MemoryUsage(used, max(0, limit - used)))
    return found


def memory_here(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> int:
    """Bytes of memory that this process could have if it were the only one."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = memory_in_control_groups(proc, sys)
    return min([machine, *(group.used + group.available for group in limits)])


def _groups(proc: Path, mount: Path) -> Iterator[tuple[Path, _Files]]:
    """The folders of the memory groups that this process is in, from its own outwards."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, files = mount, _V2
        elif "memory" in controllers.split(","):
            base, files = mount / "memory", _V1
        else:
            continue
        # A container may see its own group as the mount's root, but another path in this file.
        inside = Path(path.lstrip("/"))
        for folder in (inside, *inside.parents):
            yield base / folder, files
