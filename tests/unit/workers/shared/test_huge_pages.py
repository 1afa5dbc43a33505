"""Memory that is moved to huge pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ray_workers.shared.processes import huge_pages

PROGRAM = """
from pathlib import Path
from ray_workers.shared.processes import huge_pages
held = bytearray(range(256)) * (64 << 12)  # 64 MiB, each page of which is written to
assert set(huge_pages.pack()) == {False}
rollup = Path("/proc/self/smaps_rollup").read_text()
assert held == bytearray(range(256)) * (64 << 12)
print(int(rollup.split("AnonHugePages:")[1].split()[0]) >> 10)
"""


def test_a_process_moves_what_it_has_written_to_huge_pages() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "0":
        pytest.skip("this kernel has no MADV_COLLAPSE, or no huge pages")
    assert int(done.stdout) >= 60


def test_only_memory_without_a_file_is_moved(tmp_path: Path) -> None:
    lines = (
        "7f0000000000-7f0000600000 rw-p 00000000 00:00 0 \n"
        "7f0000600000-7f0000a00000 rw-p 00000000 08:01 77 /lib/libtorch.so\n"
        "7f0000a00000-7f0000e00000 r--p 00000000 00:00 0 \n"
        "7f0000f00000-7f0001000000 rw-p 00000000 00:00 0 [heap]\n"
    )
    (path := tmp_path / "maps").write_text(lines)
    found = list(huge_pages._own_memory(str(path)))
    assert found == [(0x7F0000000000, 0x7F0000600000), (0x7F0000F00000, 0x7F0001000000)]
