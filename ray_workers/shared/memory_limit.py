"""Room for memory in the control groups around this process (cgroups(7)), as in a container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RoomOfMemory:
    """Bytes. Memory that files take and that can be taken from them is available."""

    used: int
    available: int


@dataclass(frozen=True)
class _Files:
    """The names of one version of control groups."""

    limit: str
    used: str
    file_cache: str
    """Line of `memory.stat`: memory of files that is used least, of which all may be taken."""


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")
UNLIMITED = 1 << 60
"""A limit from here on is none: version 1 has a number for that."""


def room_in_control_groups(proc: Path, sys: Path) -> list[RoomOfMemory]:
    """Of each group with a limit: the process's own, and those around it that can be seen."""
    found = []
    for directory, files in _groups(proc, sys / "fs" / "cgroup"):
        try:
            limit = int((directory / files.limit).read_text())
            used = int((directory / files.used).read_text())
            stat = dict(line.split() for line in (directory / "memory.stat").open())
            used -= min(used, int(stat[files.file_cache]))
        except (OSError, ValueError, KeyError):  # `max`: no limit; or no group at all
            continue
        if limit < UNLIMITED:
            found.append(RoomOfMemory(used, max(0, limit - used)))
    return found


def memory_here(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> int:
    """Bytes of memory that this process could have if it were alone."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rooms = room_in_control_groups(proc, sys)
    return min([machine, *(room.used + room.available for room in rooms)])


def _groups(proc: Path, mount: Path) -> Iterator[tuple[Path, _Files]]:
    """The folders of the groups of memory that this process is in, from its own outwards."""
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
        # A container may see its own group as the mount's root, and be told another path.
        inside = Path(path.lstrip("/"))
        for folder in (inside, *inside.parents):
            yield base / folder, files
