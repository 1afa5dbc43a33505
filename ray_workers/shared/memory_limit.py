"""Determine the available memory in the control groups of this process (cgroups(7)), for example in
a container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MemoryUsage:
    """Memory of a control group, in bytes. Reclaimable file cache counts as available."""

    used: int
    available: int


@dataclass(frozen=True)
class _Files:
    """The file names in one version of control groups."""

    limit: str
    used: str
    file_cache: str
    """Line of `memory.stat` with the inactive file cache, all of which can be reclaimed."""


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")
COPIES_SHARE = 0.5
"""Maximum share of a node's memory that copies of a divided model's state may use."""
UNLIMITED = 1 << 60
"""A limit of at least this value means that there is no limit. Version 1 of control groups
represents the absence of a limit by a large number."""


def memory_in_control_groups(proc: Path, sys: Path) -> list[MemoryUsage]:
    """Return the memory of the process's group and of the visible enclosing groups, if they have a
    limit."""
    found = []
    for directory, files in _groups(proc, sys / "fs" / "cgroup"):
        try:
            limit = int((directory / files.limit).read_text())
            used = int((directory / files.used).read_text())
            stat = dict(line.split() for line in (directory / "memory.stat").open())
            used -= min(used, int(stat[files.file_cache]))
        except (OSError, ValueError, KeyError):  # the limit is `max`, or the group does not exist
            continue
        if limit < UNLIMITED:
            found.append(MemoryUsage(used, max(0, limit - used)))
    return found


def memory_here(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> int:
    """Return the number of bytes of memory that this process could use if it were the only
    process."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = memory_in_control_groups(proc, sys)
    return min([machine, *(group.used + group.available for group in limits)])


def available_memory(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> int:
    """Return the number of bytes of memory that are available to this process now."""
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    (machine,) = (int(kib) << 10 for name, kib, *_ in lines if name == "MemAvailable:")
    limits = memory_in_control_groups(proc, sys)
    return min([machine, *(group.available for group in limits)])


def human(size: float) -> str:
    """Return a size such as `1.5 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _groups(proc: Path, mount: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the folders of the memory groups that contain this process, from the innermost
    outwards."""
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
        # In a container, the mount may begin at the container's own control group, although `path`
        # begins at the host's root.
        inside = Path(path.lstrip("/"))
        for folder in (inside, *inside.parents):
            yield base / folder, files
