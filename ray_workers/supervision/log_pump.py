"""Copies the output of a training process to a spool and to the actor's log."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from dray.train.spool import SpoolWriter
from ray_workers.node import silo_gate
from ray_workers.shared.contracts import FrameKind, RankTask
from ray_workers.shared.log_rows import row_mark
from ray_workers.shared.secret_files import Masker
from ray_workers.supervision.rules.redraws import Line, Redraws
from ray_workers.supervision.rules.timings import Timings

LOG_TAIL_BYTES = 2 << 20
"""Number of bytes of the latest output that are kept in memory while the spool is full."""
LOG_LINE_COST_BYTES = 290
"""Number of bytes of memory that a line occupies in addition to its text."""
READ_BYTES = 8192
"""Maximum number of bytes read at once. The actor handles other calls only between reads, so a read
must be short even if every byte is a separate line."""


class LogPump:
    """Copies a process's output, line by line, to its log spool and to this actor's log.

    While the spool is full, the latest lines are kept in memory and older lines are dropped. The
    line numbers show how many lines were dropped.
    """

    def __init__(self, spool_dir: Path, output: int, limit_bytes: int, timings: Timings) -> None:
        self._timings = timings
        self._spool = SpoolWriter(spool_dir.with_suffix(".log"), limit_bytes=limit_bytes)
        self._output = output
        self._line = 0
        self._redraws = Redraws()
        self._tail: deque[tuple[int, Line]] = deque()
        """The latest lines for which the spool had no space, with their line numbers, oldest
        first."""
        self._tail_bytes = 0
        self._saw: Callable[[str], None] = _ignore
        self._logged: Callable[[str], None] = _ignore
        os.set_blocking(output, False)
        asyncio.get_running_loop().add_reader(output, self._pump)
        self._draining = asyncio.ensure_future(self._drain_periodically())

    def show_to(
        self, saw: Callable[[str], None], logged: Callable[[str], None] | None = None
    ) -> None:
        """Set callbacks. `saw` is called with each line that the process writes, including progress
        bars that it later redraws; `logged` is called with each line of the log."""
        self._saw, self._logged = saw, logged or _ignore

    def mask(self, masker: Masker) -> None:
        """Mask secrets in the output."""
        self._redraws.masker = masker

    def add(self, text: str) -> None:
        """Add a line written by dray after the end of the output."""
        self._add(Line(time.time(), text))

    def _add(self, line: Line) -> None:
        self._keep(self._line, line)
        self._line += 1

    def _pump(self, most: int = READ_BYTES) -> bool:
        """Read up to `most` bytes of the available output. Returns False at the end of the
        output."""
        try:
            data = os.read(self._output, most)
        except BlockingIOError:
            return True
        if not data:
            self._close()
            return False
        self._write(self._redraws.feed(data, time.time()))
        return True

    def _write(self, lines: Iterable[Line]) -> None:
        self._drain()
        for line in lines:
            self._add(line)
            self._show(line.text)
            self._logged(line.text)
        drawn, self._redraws.drawn = self._redraws.drawn, []
        for text in drawn:
            self._saw(text)
        with contextlib.suppress(OSError):
            sys.stdout.flush()

    def _show(self, text: str) -> None:
        """Write to the actor's log, which Ray shows."""
        with contextlib.suppress(OSError):  # for example, the disk is full
            sys.stdout.write(text + "\n")

    def _keep(self, number: int, line: Line) -> None:
        if not self._tail and self._append(number, line):
            return
        self._tail.append((number, line))
        self._tail_bytes += len(line.text) + LOG_LINE_COST_BYTES
        while self._tail_bytes > LOG_TAIL_BYTES:
            self._forget_oldest()

    def _append(self, number: int, line: Line, *, vital: bool = False) -> bool:
        body = {"line": number, "text": row_mark(line.row) + line.text}
        return self._spool.append(FrameKind.LOG, body, vital=vital, at=line.at)

    def _forget_oldest(self) -> None:
        _, line = self._tail.popleft()
        self._tail_bytes -= len(line.text) + LOG_LINE_COST_BYTES

    def _drain(self, *, vital: bool = False) -> None:
        """Write the lines that are kept in memory to the spool. If `vital` is true, these lines can
        exceed the limit of the spool."""
        while self._tail and self._append(*self._tail[0], vital=vital):
            self._forget_oldest()

    async def _drain_periodically(self) -> None:
        """Periodically write lines that are kept in memory, even if the process writes no more
        output."""
        while True:
            await asyncio.sleep(self._timings.drain_period_s)
            self._spool.flush()
            self._write(self._redraws.due(time.time()))

    async def lines_lost_at_the_end(self) -> int:
        """Return how many of the last lines were lost because the disk remained full. Must be
        called after `finish`."""
        deadline = time.monotonic() + self._timings.log_space_limit_s
        while True:
            self._drain(vital=True)
            self._spool.close()
            lost = len(self._tail) + self._spool.num_waiting
            if not lost or time.monotonic() > deadline:
                return lost
            await asyncio.sleep(self._timings.log_space_period_s)

    def finish(self) -> None:
        """Read the remaining output in the pipe after the process has ended.

        A process that escaped its session can keep the pipe open and continue to write, but later
        output is ignored.
        """
        left = _num_readable(self._output) if self._output >= 0 else 0
        while left > 0 and self._pump(min(left, READ_BYTES)):
            left -= READ_BYTES
        self._close()

    def _close(self) -> None:
        if self._output < 0:
            return
        self._draining.cancel()
        asyncio.get_running_loop().remove_reader(self._output)
        os.close(self._output)
        self._output = -1
        self._write(self._redraws.finish())
        self._drain(vital=True)
        self._spool.close()


def _ignore(_: str) -> None:
    """Ignore the line."""


class ClosedLogPump(LogPump):
    """Keeps the output of a silo's process on its node. `limit_bytes` limits the spool in bytes,
    and the file in characters."""

    def __init__(
        self, spool_dir: Path, output: int, limit_bytes: int, timings: Timings, task: RankTask
    ) -> None:
        super().__init__(spool_dir, output, limit_bytes, timings)
        self._task = task
        self._left = limit_bytes

    def _keep(self, number: int, line: Line) -> None:
        self._left -= len(line.text)
        if self._left >= 0:
            silo_gate.keep(self._task, f"{line.text}\n")

    def _show(self, text: str) -> None:
        """Show nothing."""


def _num_readable(pipe: int) -> int:
    """Return the number of bytes that can be read from the pipe."""
    (number,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    return int(number)
