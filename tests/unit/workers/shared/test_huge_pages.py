"""Memory that is moved to huge pages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ray_workers.shared.processes import linux

PROGRAM = """
from ray_workers.shared.processes import linux
from tests.unit.workers.shared.test_huge_pages import huge_mib
held = bytearray(range(256)) * (64 << 12)  # 64 MiB, each page of which is written to
assert set(linux.pack()) == {False}
assert held == bytearray(range(256)) * (64 << 12)
print(huge_mib("self"))
"""


def packs() -> bool:
    """Whether this kernel moves memory to huge pages on request."""
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    return release >= (6, 1) and Path("/sys/kernel/mm/transparent_hugepage").exists()


def huge_mib(pid: int | str) -> int:
    """Memory of a process in huge pages."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(rollup.split("AnonHugePages:")[1].split()[0]) >> 10


@pytest.mark.skipif(not packs(), reason="the kernel has no MADV_COLLAPSE")
def test_a_process_moves_what_it_has_written_to_huge_pages() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 60


def test_only_memory_without_a_file_is_moved(tmp_path: Path) -> None:
    lines = (
        "7f0000000000-7f0000600000 rw-p 00000000 00:00 0 \n"
        "7f0000600000-7f0000a00000 rw-p 00000000 08:01 77 /lib/libtorch.so\n"
        "7f0000a00000-7f0000e00000 r--p 00000000 00:00 0 \n"
        "7f0000f00000-7f0001000000 rw-p 00000000 00:00 0 [heap]\n"
    )
    (path := tmp_path / "maps").write_text(lines)
    found = list(linux._own_memory(str(path)))
    assert found == [(0x7F0000000000, 0x7F0000600000), (0x7F0000F00000, 0x7F0001000000)]
