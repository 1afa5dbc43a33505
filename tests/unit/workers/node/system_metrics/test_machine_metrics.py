"""The use of a whole machine, by files in the format of /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_workers.node.system_metrics import machine
from ray_workers.node.system_metrics.machine import MachineMeter, MachineReading
from ray_workers.node.system_metrics.processes import growth, rounded
from ray_workers.shared.memory_limit import MemoryUsage, memory_here

GIB = 2**30
MEMINFO = "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 6291456 kB\n"
NET_HEAD = "Inter-| Receive | Transmit\n face |bytes packets |bytes packets\n"


class Files:
    """The roots of /proc and /sys of a made-up machine."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sys = root / "proc", root / "sys"
        self.machine = MachineMeter(self.proc, self.sys)

    def write(self, path: str, text: str) -> None:
        """path: begins with `proc` or `sys`."""
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def devices(self, *paths: str) -> None:
        """Create devices with hardware behind them."""
        for path in paths:
            (self.sys / path / "device").mkdir(parents=True)

    def read(self) -> MachineReading:
        return self.machine.read()


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def diskstats(**sectors: tuple[int, int]) -> str:
    """Sectors read and written, by disk."""
    rows = [
        f"8 {n} {name} 1 1 {r} 1 1 1 {w} 1 0 1 1"
        for n, (name, (r, w)) in enumerate(sectors.items())
    ]
    return "\n".join(rows) + "\n"


def net(**sizes: tuple[int, int]) -> str:
    rows = [f"{name}: {r} 0 0 0 0 0 0 0 {s} 0 0 0 0 0 0 0" for name, (r, s) in sizes.items()]
    return NET_HEAD + "\n".join(rows) + "\n"


def test_processor_time_is_all_but_idling_and_what_other_machines_took(files: Files) -> None:
    files.write("proc/stat", "cpu  100 50 30 9999 888 5 15 777 100 0\ncpu0 1 1 1 1\n")
    before = files.read()
    assert before.cpu_s == pytest.approx(2.0)
    files.write("proc/stat", "cpu  300 50 30 10500 888 5 15 777 100 0\n")
    rates = files.read().rates_since(before, passed_s=4.0)
    assert rates[machine.CPU] == pytest.approx(0.5)
    files.write("proc/stat", "cpu  0 0 0 0 0 0 0 0 0 0\n")  # reset, as in a container that moved
    assert files.read().rates_since(before, passed_s=4.0)[machine.CPU] == 0.0


def test_disks_are_added_up_without_partitions_and_devices_made_of_others(files: Files) -> None:
    disks = {f"sd{n}": (2, 4) for n in range(300)}
    files.devices(*(f"block/{name}" for name in disks), "block/cciss!c0d0")
    others = {"sd0p1": (2, 4), "dm-0": (600, 1200), "loop0": (7, 7), "cciss/c0d0": (0, 0)}
    files.write("proc/diskstats", diskstats(**disks, **others))
    before = files.read()
    assert len(before.disks) == 301
    disks = {f"sd{n}": (4, 4) for n in range(300)}
    files.write("proc/diskstats", diskstats(**disks, **others | {"cciss/c0d0": (100, 0)}))
    rates = files.read().rates_since(before, passed_s=2.0)
    assert [rates[name] for name in machine.DISK] == [(300 * 2 + 100) * 512 / 2, 0.0]


def test_the_network_is_that_of_cards_where_any_is_seen(files: Files) -> None:
    files.write("proc/net/dev", net(lo=(9, 9), veth1=(1, 2)))
    assert files.read().networks == {"veth1": (1, 2)}, "as in a container"
    files.devices("class/net/eth0")
    files.write("proc/net/dev", net(lo=(9, 9), veth1=(1, 2), eth0=(10, 20), bond0=(10, 20)))
    before = files.read()
    assert before.networks == {"eth0": (10, 20)}
    files.write("proc/net/dev", net(lo=(9, 9), eth0=(50, 40)))
    rates = files.read().rates_since(before, passed_s=2.0)
    assert [rates[name] for name in machine.NETWORK] == [20.0, 10.0]


def test_a_counter_that_was_reset_or_wrapped_is_no_negative_use() -> None:
    before = {"a": (2**64 - 5, 10), "b": (100, 100), "gone": (7, 7)}
    now = {"a": (3, 20), "b": (150, 100), "new": (2**40, 2**40)}
    assert growth(before, now) == [50, 10]
    assert growth({}, now) == []
    assert growth(before, {}) == []


def test_what_can_not_be_read_is_missing(files: Files) -> None:
    reading = files.read()
    assert reading == MachineReading(None, None, {}, {})
    assert reading.values() == reading.rates_since(reading, 1.0) == {}
    files.write("proc/stat", "intr 7\n")
    assert files.read().cpu_s is None


def test_memory_is_the_machines_where_nothing_bounds_it(files: Files) -> None:
    files.write("proc/meminfo", MEMINFO)
    files.write("proc/self/cgroup", "0::/\n")
    values = {machine.MEMORY_USED: 2 * GIB, machine.MEMORY_AVAILABLE: 6 * GIB}
    assert files.read().values() == values


@pytest.mark.parametrize(
    ("cgroup", "folder", "names"),
    [
        ("0::/a/b\n", "a", ("memory.max", "memory.current", "inactive_file")),
        (
            "5:cpu,memory:/docker/x\n0::/\n",  # the container sees its own group as the root
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_memory_is_the_control_groups_where_its_limit_is_lower(
    files: Files, cgroup: str, folder: str, names: tuple[str, str, str]
) -> None:
    limit, used, cache = names
    files.write("proc/meminfo", MEMINFO)
    files.write("proc/self/cgroup", cgroup)
    group = f"sys/fs/cgroup/{folder}"
    files.write(f"{group}/{limit}", f"{4 * GIB}\n")
    files.write(f"{group}/{used}", f"{3 * GIB}\n")
    files.write(f"{group}/memory.stat", f"anon 5\n{cache} {GIB}\n")
    assert files.read().memory == MemoryUsage(used=2 * GIB, available=2 * GIB)
    assert memory_here(files.proc, files.sys) <= 4 * GIB
    for unlimited in ("max\n", "9223372036854771712\n"):
        files.write(f"{group}/{limit}", unlimited)
        assert files.read().memory == MemoryUsage(used=2 * GIB, available=6 * GIB)


def test_values_are_rounded_to_five_digits() -> None:
    assert rounded({"a": 123456789.0, "b": 0.333333333, "c": 0.0}) == {
        "a": 123460000.0,
        "b": 0.33333,
        "c": 0.0,
    }
