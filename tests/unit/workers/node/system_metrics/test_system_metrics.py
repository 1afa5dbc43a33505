"""Samples of an attempt's ranks: real processes, with records as written by a forkserver."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_workers.node import session_records
from ray_workers.node.session_records import SessionRecord
from ray_workers.node.system_metrics import processes, sampler
from ray_workers.node.system_metrics.machine import MachineReading
from ray_workers.node.system_metrics.processes import RankReading, read_rank
from ray_workers.node.system_metrics.sampler import SystemMetricsSampler
from ray_workers.shared.memory_limit import MemoryUsage
from ray_workers.shared.processes.procfs import children_of, started_ticks, stat_fields
from tests.unit.workers.forked import Server, light, server

__all__ = ["light", "server"]

NODE_KEYS = {"system/node/memory_used", "system/node/memory_available"}
BUSY = (
    "import sys, time\nwhile time.process_time() < 0.08: pass\nprint(flush=True)\nsys.stdin.read()"
)
"""Uses some processor time, reports it, and waits for the end of its input."""
RANK = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv[1]])"
Start = Callable[..., subprocess.Popen[bytes]]


def record(pid: int, rank: int = 0, **more: Any) -> SessionRecord:
    plain = {
        "place": "here",
        "boot_id": "b",
        "server_pid": 1,
        "server_started": 1,
        "started": started_ticks(pid) or 0,
        "mark": f"{rank:x}",
        "job_id": "job",
        "attempt": 1,
    }
    return SessionRecord(**{**plain, "pid": pid, "rank": rank, **more})


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a program, which gets the text of another."""
    started = []

    def run(program: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", program, BUSY]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def lines_of(process: subprocess.Popen[bytes], count: int) -> list[bytes]:
    assert process.stdout is not None
    return [process.stdout.readline() for _ in range(count)]


def test_a_rank_is_counted_with_all_that_it_started(start: Start) -> None:
    process = start(RANK)
    lines_of(process, 1)
    whole = read_rank(record(process.pid))
    (child,) = children_of(process.pid)
    alone = read_rank(record(child))
    assert whole is not None
    assert alone is not None
    assert whole.cpu_s >= alone.cpu_s > 0.05
    assert whole.memory_bytes > alone.memory_bytes > 2**20


async def test_a_forked_rank_is_counted_with_what_it_left_to_its_init(server: Server) -> None:
    """The init has the forkserver's memory, which does not count."""
    rank = (
        "import os, time\n"
        "if not os.fork():\n"
        "    if os.fork():\n"
        "        os._exit(0)\n"
        "    while time.process_time() < 0.2: pass\n"
        "    print('done', flush=True)\n"
        "    time.sleep(600)\n"
        "os.wait()\n"
        "time.sleep(600)\n"
    )
    forked = await server.fork(rank, job_id="job", attempt=1, rank=3)
    assert await forked.line() == "done"
    sessions = session_records.sessions_dir(Path(server.path).parent)
    (found,) = session_records.sessions_of(sessions, "job", 1)
    init = int(stat_fields(found.pid)[1])
    assert children_of(found.pid) == []
    whole, alone = read_rank(found), read_rank(replace(found, server_pid=1))
    assert whole is not None
    assert alone is not None
    assert whole.cpu_s > 0.15 > alone.cpu_s
    resident = [int(stat_fields(pid)[21]) for pid in (*children_of(init),)]
    assert whole.memory_bytes == pytest.approx(sum(resident) * processes.PAGE_BYTES, rel=0.05)
    samples: Any = SystemMetricsSampler(sessions)
    assert (await samples.sample("job", 1))[3]["system/memory_rss"] > 2**20
    forked.process.abandon()


def test_a_pid_that_is_anothers_by_now_is_no_rank() -> None:
    mine = record(os.getpid())
    assert read_rank(mine) is not None
    assert read_rank(record(os.getpid(), started=mine.started - 1)) is None
    assert read_rank(record(2**22 + 1)) is None


def test_files_of_another_users_process_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "io_counters", lambda _: [])  # as without permission
    reading = read_rank(record(os.getpid()))
    assert reading is not None
    assert (reading.read_bytes, reading.written_bytes) == (0, 0)
    assert reading.cpu_s > 0


def test_a_replacement_begins_anew_and_no_use_is_negative() -> None:
    before = RankReading(started=7, cpu_s=10.0, memory_bytes=1, read_bytes=100, written_bytes=50)
    now = RankReading(started=7, cpu_s=12.0, memory_bytes=1, read_bytes=40, written_bytes=90)
    assert now.rates_since(before, passed_s=4.0) == {
        "system/cpu": 0.5,
        "system/disk_read": 0.0,
        "system/disk_written": 10.0,
    }
    assert RankReading(8, 0.1, 1, 0, 0).rates_since(before, passed_s=4.0) == {}


class StillMachine:
    """Uses nothing."""

    def read(self) -> MachineReading:
        return MachineReading(100.0, MemoryUsage(1, 2), {}, {})


class Gpus:
    """Knows one GPU."""

    def read(self, names: set[str]) -> dict[str, dict[str, float]]:
        return {name: {"utilization": 0.25} for name in names if name == "3"}


def sampler_of(sessions: Path, clock: Callable[[], float], *records: SessionRecord) -> Any:
    for one in records:
        session_records.write_session(sessions, one)
    machine: Any = StillMachine()
    gpus: Any = Gpus()
    return SystemMetricsSampler(sessions, machine=machine, gpus=gpus, clock=clock)


async def test_values_come_at_once_and_rates_from_the_second_sample_on(tmp_path: Path) -> None:
    now = 0.0
    ranks = [record(os.getpid(), 5), record(os.getpid(), 2, gpus="8,3")]
    store = record(os.getpid(), -1)
    samples = sampler_of(tmp_path, lambda: now, store, *ranks, record(os.getpid(), 0, attempt=2))
    first = await samples.sample("job", 1)
    assert first.keys() == {2, 5}
    assert first[5].keys() == {"system/memory_rss"}
    assert first[2].keys() == {"system/memory_rss", "system/gpu/1/utilization", *NODE_KEYS}
    now = 10.0
    second = await samples.sample("job", 1)
    of_rank = {"system/cpu", "system/memory_rss", "system/disk_read", "system/disk_written"}
    assert second[5].keys() == of_rank
    assert second[2].keys() >= {*of_rank, "system/node/cpu"}
    assert (await samples.sample("job", 2)).keys() == {0}, "of another attempt on the node"
    assert await samples.sample("job", 3) == {}
    samples.forget("job", 1)
    assert (await samples.sample("job", 1))[5].keys() == {"system/memory_rss"}


def test_calls_that_waited_for_a_stopped_agent_get_no_rates_of_milliseconds(
    tmp_path: Path,
) -> None:
    times = [0.0, 30.0, 30.003, 30.006, 40.0]
    samples = sampler_of(tmp_path, iter(times).__next__, record(os.getpid()))
    rates = ["system/cpu" in samples.read("job", 1)[0] for _ in times]
    assert rates == [False, True, False, False, True]


async def test_a_sample_that_does_not_end_delays_no_reader_and_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes, begun = threading.Event(), threading.Semaphore(0)

    def read(_: SessionRecord) -> None:
        begun.release()
        goes.wait(10.0)

    monkeypatch.setattr(sampler, "read_rank", read)
    monkeypatch.setattr(sampler, "LIMIT_S", 0.01)
    samples = sampler_of(tmp_path, lambda: 0.0, record(os.getpid()))
    assert await samples.sample("job", 1) == {}
    assert begun.acquire(timeout=10.0)
    assert await samples.sample("job", 1) == {}
    goes.set()
    while samples._under_way:
        await asyncio.sleep(0)
    assert not begun.acquire(blocking=False)
    assert await samples.sample("job", 1) == {}
    assert begun.acquire(timeout=10.0)


async def test_a_sample_that_fails_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sampler, "read_rank", lambda _: int("no number"))
    samples = sampler_of(tmp_path, lambda: 0.0, record(os.getpid()))
    assert await samples.sample("job", 1) == {}
    assert "no number" in capsys.readouterr().err
