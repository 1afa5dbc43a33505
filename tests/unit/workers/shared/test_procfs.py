"""Processes as /proc shows them."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_workers.shared.processes.procfs import count_idle_workers, num_memory_kills, started_ticks
from tests.integration.harness import eventually


@contextlib.contextmanager
def process(*words: str, run: str) -> Iterator[None]:
    """A child with these words as its command line, running that program for this raylet."""
    environment = {**os.environ, "RAY_RAYLET_PID": str(os.getpid())}
    child = subprocess.Popen(list(words), executable=run, env=environment)
    try:
        # Until it runs that program, it has this process's command line.
        expected = words[0].encode()
        eventually(lambda: Path(f"/proc/{child.pid}/cmdline").read_bytes().startswith(expected))
        yield
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def test_idle_workers_are_known_by_their_title_and_those_that_start_by_their_program(
    tmp_path: Path,
) -> None:
    starting = tmp_path / "default_worker.py"
    starting.write_text("import signal; signal.pause()")
    before = count_idle_workers(os.getpid())
    with (
        process("ray::IDLE", "60", run="/bin/sleep"),
        process("ray::RankActor", "60", run="/bin/sleep"),
        process("ray::IDLE_SpillWorker", "60", run="/bin/sleep"),
        process(sys.executable, str(starting), run=sys.executable),
    ):
        assert count_idle_workers(os.getpid()) == before + 2
    assert count_idle_workers(os.getpid()) == before
    assert count_idle_workers(1 << 30) == 0


def test_what_the_kernel_ended_for_want_of_memory_is_counted() -> None:
    counted = [line for line in Path("/proc/vmstat").read_text().splitlines() if "oom_kill" in line]
    assert counted == [f"oom_kill {num_memory_kills()}"]


def test_a_process_is_not_dead_because_no_file_can_be_opened() -> None:
    assert started_ticks(os.getpid())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            started_ticks(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert started_ticks(1 << 30) is None
