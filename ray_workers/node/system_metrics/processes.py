"""Resource usage of a rank's process and of all processes that it started, and rates computed from
counters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ray_workers.node.session_records import SessionRecord
from ray_workers.shared.processes.procfs import (
    DEAD,
    TICKS_PER_S,
    cpu_ticks,
    io_counters,
    living_tree,
    stat_fields,
)

CPU = "system/cpu"
MEMORY = "system/memory_rss"
DISK_READ, DISK_WRITTEN = "system/disk_read", "system/disk_written"

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
Values = dict[str, float]
"""Values of a sample, keyed by series name."""

DIGITS = 5
"""Number of significant digits of a value, limited because the samples of many ranks are sent and
stored as text."""


@dataclass(frozen=True)
class RankReading:
    """The resource usage of a rank's processes at a point in time."""

    started: int
    """Start time of the rank's process, which distinguishes it from its predecessor."""
    cpu_s: float
    memory_bytes: int
    """Resident memory. Memory pages shared by several processes are counted once for each
    process."""
    read_bytes: int
    """Bytes that this user's processes read from disks."""
    written_bytes: int

    def values(self) -> Values:
        """Return the values that do not require an earlier reading."""
        return {MEMORY: self.memory_bytes}

    def rates_since(self, before: RankReading, passed_s: float) -> Values:
        """Return the rates since an earlier reading; empty if the earlier reading is of a different
        process. Rates are never negative, even if a process ended and its usage is no longer
        counted."""
        if before.started != self.started:
            return {}
        grown = {
            CPU: self.cpu_s - before.cpu_s,
            DISK_READ: self.read_bytes - before.read_bytes,
            DISK_WRITTEN: self.written_bytes - before.written_bytes,
        }
        return {name: max(0.0, value) / passed_s for name, value in grown.items()}


def read_rank(record: SessionRecord) -> RankReading | None:
    """Read the resource usage of a rank's processes. Return None if the rank's process no longer
    exists, even if another process now has its pid."""
    fields = stat_fields(record.pid)
    if not fields or fields[0] in DEAD or int(fields[19]) != record.started:
        return None
    ticks = pages = num_read = num_written = 0
    for pid, each in living_tree(_roots(record, int(fields[1]))):
        ticks += cpu_ticks(each)
        if int(each[1]) != record.server_pid:  # the init process's memory belongs to the forkserver
            pages += int(each[21])
        counters = io_counters(pid)
        if len(counters) > 5:
            num_read += counters[4]
            num_written += counters[5]
    return RankReading(
        started=record.started,
        cpu_s=ticks / TICKS_PER_S,
        memory_bytes=pages * PAGE_BYTES,
        read_bytes=num_read,
        written_bytes=num_written,
    )


def _roots(record: SessionRecord, parent: int) -> list[int]:
    """Return the pids of the rank and its init process, which becomes the parent of orphans within
    the rank."""
    grandparent = stat_fields(parent)[1:2]
    is_init = grandparent == [str(record.server_pid).encode()]
    return [record.pid, parent] if is_init else [record.pid]


def growth(before: Mapping[str, Sequence[int]], now: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the growth of each counter, summed over all devices. The result is in the order of a
    device's counters.

    If a device was added, or if its counters were reset or wrapped, only the growth since then is
    counted.
    """
    grown = [
        [max(0, after - earlier) for earlier, after in zip(before[name], counters, strict=True)]
        for name, counters in now.items()
        if name in before
    ]
    return [sum(of_one) for of_one in zip(*grown, strict=True)]


def rounded(values: Mapping[str, float]) -> Values:
    return {name: float(f"{value:.{DIGITS}g}") for name, value in values.items()}
