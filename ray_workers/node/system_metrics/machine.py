"""Resource usage of an entire machine, from /proc and /sys: CPU, memory, disks and network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ray_workers.node.system_metrics.processes import Values, growth
from ray_workers.shared.memory_limit import MemoryUsage, memory_in_control_groups
from ray_workers.shared.processes.procfs import TICKS_PER_S

CPU = "system/node/cpu"
MEMORY_USED, MEMORY_AVAILABLE = "system/node/memory_used", "system/node/memory_available"
DISK = ("system/node/disk_read", "system/node/disk_written")
NETWORK = ("system/node/network_received", "system/node/network_sent")

SECTOR_BYTES = 512
"""Sector size in /proc/diskstats, which does not depend on the disk's own sector size."""
LOOPBACK = "lo"

Counters = Mapping[str, tuple[int, int]]
"""(bytes in, bytes out) of each device since it was added, keyed by device."""


@dataclass(frozen=True)
class MachineReading:
    """The state of a machine at a point in time. Unreadable values are missing or None."""

    cpu_s: float | None
    """Seconds that the CPUs were not idle, summed over all CPUs."""
    memory: MemoryUsage | None
    disks: Counters
    """Bytes read and written, for entire physical disks."""
    networks: Counters
    """Bytes received and sent by network cards."""

    def values(self) -> Values:
        """Return the values that do not require an earlier reading."""
        if self.memory is None:
            return {}
        return {MEMORY_USED: self.memory.used, MEMORY_AVAILABLE: self.memory.available}

    def rates_since(self, before: MachineReading, passed_s: float) -> Values:
        found = {}
        if self.cpu_s is not None and before.cpu_s is not None:
            found[CPU] = max(0.0, self.cpu_s - before.cpu_s)
        found |= dict(zip(DISK, growth(before.disks, self.disks), strict=False))
        found |= dict(zip(NETWORK, growth(before.networks, self.networks), strict=False))
        return {name: value / passed_s for name, value in found.items()}


class MachineMeter:
    """Reads the machine on which this process runs."""

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._proc = proc
        self._sys = sys
        self._is_physical: dict[Path, bool] = {}

    def read(self) -> MachineReading:
        return MachineReading(
            cpu_s=self._cpu_s(),
            memory=self._memory(),
            disks=self._disks(),
            networks=self._networks(),
        )

    def _cpu_s(self) -> float | None:
        try:
            with (self._proc / "stat").open() as file:
                name, *ticks = file.readline().split()
            user, nice, system, _idle, _iowait, irq, softirq = map(int, ticks[:7])
        except (OSError, ValueError):
            return None
        return (user + nice + system + irq + softirq) / TICKS_PER_S if name == "cpu" else None

    def _memory(self) -> MemoryUsage | None:
        """Return the memory of the machine or of the enclosing control group, whichever has less
        available memory."""
        sizes = {}
        for line in _lines(self._proc / "meminfo"):
            name, size, *_ = line.split()
            sizes[name] = int(size) * 1024
        found = memory_in_control_groups(self._proc, self._sys)
        if "MemTotal:" in sizes and "MemAvailable:" in sizes:
            available = sizes["MemAvailable:"]
            found.append(MemoryUsage(sizes["MemTotal:"] - available, available))
        return min(found, key=lambda one: one.available, default=None)

    def _disks(self) -> Counters:
        """Return the counters of physical disks. Partitions, and devices such as LVM volumes, would
        be counted twice."""
        found = {}
        for line in _lines(self._proc / "diskstats"):
            fields = line.split()
            name = fields[2]
            if self._is_device(self._sys / "block" / name.replace("/", "!")):
                found[name] = int(fields[5]) * SECTOR_BYTES, int(fields[9]) * SECTOR_BYTES
        return found

    def _networks(self) -> Counters:
        """Return the counters of the network cards. If no network card is visible, as in a
        container, return the counters of all devices except the loopback device."""
        found = {}
        for line in _lines(self._proc / "net" / "dev")[2:]:
            name, _, counters = line.partition(":")
            fields = counters.split()
            found[name.strip()] = int(fields[0]), int(fields[8])
        found.pop(LOOPBACK, None)
        cards = {n: c for n, c in found.items() if self._is_device(self._sys / "class/net" / n)}
        return cards or found

    def _is_device(self, path: Path) -> bool:
        """Whether the device is hardware, possibly provided by a hypervisor."""
        known = self._is_physical.get(path)
        if known is None:
            known = self._is_physical[path] = (path / "device").exists()
        return known


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
