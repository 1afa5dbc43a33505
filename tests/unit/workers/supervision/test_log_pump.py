"""The log of a training process, from its output."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from pathlib import Path

import pytest

from dray.train import spool
from ray_workers.shared import spool_reader
from ray_workers.shared.secret_files import Masker
from ray_workers.supervision import log_pump
from ray_workers.supervision.log_pump import LogPump
from ray_workers.supervision.rules.redraws import LINE_CHARS
from ray_workers.supervision.rules.timings import Timings

LIMIT_BYTES = 4000
PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "SEGMENT_BYTES", 1000)
    monkeypatch.setattr(spool, "WAITING_BYTES", 2000)
    kept = 30 * (len("line 00000") + log_pump.LOG_LINE_COST_BYTES)
    monkeypatch.setattr(log_pump, "LOG_TAIL_BYTES", kept)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "r0.0.log"


async def pump(directory: Path, num_lines: int) -> LogPump:
    """The pump of a process that printed this many lines and is gone."""
    source, sink = os.pipe()
    log = LogPump(
        directory.with_suffix(".metrics"), source, LIMIT_BYTES, Timings(log_space_limit_s=0.0)
    )
    for number in range(num_lines):
        os.write(sink, f"line {number:05d}\n".encode())
        if number % 100 == 99:
            await asyncio.sleep(0)  # the pump takes what is there
            log._pump()
    os.close(sink)
    log.finish()
    return log


def numbers(directory: Path) -> list[int]:
    data = spool_reader.read(directory, 0, 1 << 30)
    found = [frame.body for frame in spool_reader.decode("r0.0.log", data)]
    assert all(body["text"] == f"line {body['line']:05d}" for body in found)
    return [body["line"] for body in found]


async def test_of_more_than_the_spool_takes_the_newest_lines_arrive(directory: Path) -> None:
    log = await pump(directory, 1000)
    kept = numbers(directory)
    head = next(at for at, number in enumerate(kept) if at != number)
    assert head >= 20
    assert kept[head:] == list(range(1000 - len(kept[head:]), 1000))
    assert len(kept[head:]) == 30
    assert await log.lines_lost_at_the_end() == 0, "the numbers show the gap"


async def test_empty_lines_fill_no_more_memory_than_others(directory: Path) -> None:
    source, sink = os.pipe()
    log = LogPump(directory.with_suffix(".metrics"), source, LIMIT_BYTES, Timings())
    for _ in range(100):
        os.write(sink, b"\n" * 100)
        log._pump()
    assert 0 < len(log._tail) <= log_pump.LOG_TAIL_BYTES // log_pump.LOG_LINE_COST_BYTES
    number, line = log._tail[-1]
    assert (number, line.text) == (9999, "")
    cost = sum(map(sys.getsizeof, (log._tail[-1], number, line, *line)))
    assert cost <= log_pump.LOG_LINE_COST_BYTES
    os.close(sink)
    log.finish()


async def test_the_newest_lines_of_a_burst_arrive_though_no_other_line_follows(
    directory: Path,
) -> None:
    source, sink = os.pipe()
    timings = Timings(drain_period_s=0.01)
    log = LogPump(directory.with_suffix(".metrics"), source, LIMIT_BYTES, timings)
    for number in range(100):
        os.write(sink, f"line {number:05d}\n".encode())
    log._pump()
    assert numbers(directory)[-1] < 99
    stored = b""
    async with asyncio.timeout(PATIENCE_S):
        while b"line 00099" not in stored:
            stored += spool_reader.read(directory, len(stored), 1 << 30)
            spool_reader.discard(directory, before=len(stored))  # which makes room
            await asyncio.sleep(0.01)
    os.close(sink)
    log.finish()


async def test_lines_for_which_the_disk_has_no_space_are_counted(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, data: bytes) -> int:
        if data.startswith(b'{"kind"'):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    write = os.write
    monkeypatch.setattr(os, "write", refuse)
    log = await pump(directory, 20)
    assert await log.lines_lost_at_the_end() == 20
    monkeypatch.setattr(os, "write", write)
    assert await log.lines_lost_at_the_end() == 0, "it had room after all"
    assert numbers(directory) == list(range(20))


async def test_a_full_disk_for_the_actors_own_log_loses_no_line_of_the_jobs_log(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(sys.stdout, "write", refuse)
        full.setattr(sys.stdout, "flush", refuse)
        await pump(directory, 10)
    assert numbers(directory) == list(range(10))


async def test_a_line_of_many_megabytes_is_split_and_fills_no_memory(directory: Path) -> None:
    source, sink = os.pipe()
    log = LogPump(directory.with_suffix(".metrics"), source, 1 << 30, Timings())
    num_bytes = 1 << 20
    for _ in range(num_bytes // log_pump.READ_BYTES):
        os.write(sink, b"x" * log_pump.READ_BYTES)
        log._pump()
        assert log._redraws.num_held <= LINE_CHARS
    os.close(sink)
    log.finish()
    data = spool_reader.read(directory, 0, 1 << 30)
    texts = [frame.body["text"] for frame in spool_reader.decode("r0.0.log", data)]
    assert "".join(texts) == "x" * num_bytes
    assert max(map(len, texts)) <= LINE_CHARS


async def test_while_a_process_floods_its_log_the_actor_answers_between_some_lines_and_the_next(
    directory: Path,
) -> None:
    source, sink = os.pipe()
    log = LogPump(directory.with_suffix(".metrics"), source, LIMIT_BYTES, Timings())
    os.set_blocking(sink, False)
    num_lines = os.write(sink, b"\n" * (1 << 16))
    turns = 0
    async with asyncio.timeout(PATIENCE_S):
        while log._line < num_lines:
            await asyncio.sleep(0)
            turns += 1
    assert turns >= num_lines // log_pump.READ_BYTES
    os.close(sink)
    log.finish()


async def test_the_end_waits_for_no_process_that_writes_on(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, sink = os.pipe()
    log = LogPump(directory.with_suffix(".metrics"), source, 1 << 20, Timings())
    most, read, refills = 1000, os.read, 0

    def read_and_refill(descriptor: int, num_bytes: int) -> bytes:
        """Simulates a process that left its session and writes as fast as it is read."""
        nonlocal refills
        data = read(descriptor, num_bytes)
        if descriptor == source and refills < most:
            refills += 1
            os.write(sink, b"again\n")
        return data

    os.write(sink, b"last words\n")
    monkeypatch.setattr(os, "read", read_and_refill)
    log.finish()
    assert refills < most
    data = spool_reader.read(directory, 0, 1 << 30)
    (first, *_) = spool_reader.decode("r0.0.log", data)
    assert first.body["text"] == "last words"
    os.close(sink)


async def test_no_line_has_a_secret_wherever_the_output_is_cut(directory: Path) -> None:
    canary = "canary-5f1d"
    source, sink = os.pipe()
    log = LogPump(directory.with_suffix(".metrics"), source, 1 << 20, Timings())
    log.mask(Masker({"TOKEN": canary}))
    filling = LINE_CHARS
    for text in (f"a {canary} b\n", canary[:5], f"{canary[5:]}\n", f"end {canary}"):
        os.write(sink, text.encode())
        log._pump()
    os.write(sink, b"\n")
    for before in range(filling - len(canary) - 1, filling + 2):
        # In pieces, so that the line is cut while it grows.
        os.write(sink, b"x" * before + canary[:4].encode())
        log._pump()
        os.write(sink, canary[4:].encode() + b"y" * 50 + b"\n")
        log._pump()
    os.close(sink)
    log.finish()
    assert await log.lines_lost_at_the_end() == 0
    data = spool_reader.read(directory, 0, 1 << 30)
    texts = [frame.body["text"] for frame in spool_reader.decode("r0.0.log", data)]
    assert texts[:3] == ["a *** b", "***", "end ***"]
    assert canary not in "".join(texts)
    assert "".join(texts).count("***") == 3 + len(canary) + 3
