"""Runs the programs of a build, with bounded output. When a program exits, all processes that it
started are killed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ray_workers.shared.processes.linux import stand_back
from ray_workers.shared.processes.procfs import (
    MARK_BITS,
    MARK_VARIABLE,
    Session,
    find_members,
    mark_process,
    started_ticks,
)
from ray_workers.shared.secret_files import Masker

HEAD_BYTES = 256 << 10
TAIL_BYTES = 768 << 10
"""Number of bytes that are kept from each end of a program's output."""
NICENESS = 19
"""Builds hold no slots, so they only get processor time that slots don't use."""
LOOK_MS = 100
"""Maximum pause between two checks of a program that prints nothing."""
SWEEP_LIMIT_S = 10.0
SWEEP_PAUSE_S = 0.02
_READ_BYTES = 64 << 10
_GATE = 'read -r _ && exec "$@" < /dev/null'
"""Shell code that waits for a line before it executes the program, so that the process is marked
before the program starts."""


class Output:
    """Keeps the beginning and the end of a program's output."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._left_out = 0

    def add(self, data: bytes) -> None:
        left = HEAD_BYTES - len(self._head)
        self._head += data[:left]
        self._tail += data[left:]
        if len(self._tail) > 2 * TAIL_BYTES:
            self._left_out += len(self._tail) - TAIL_BYTES
            del self._tail[:-TAIL_BYTES]

    def text(self, masker: Masker) -> str:
        """Return the output without secrets, even if only a part of a secret was kept."""
        if not self._left_out:
            whole = masker.data(bytes(self._head + self._tail))
        else:
            head, tail = masker.data(bytes(self._head)), masker.data(bytes(self._tail))
            note = b"\n[%d bytes are left out]\n" % self._left_out
            whole = head[: len(head) - masker.longest] + note + tail[masker.longest :]
        return whole.decode(errors="replace").strip()


def mark_of(folder: Path) -> str:
    """Return the mark that identifies all processes that build a folder. The mark identifies these
    processes even if their builder is gone."""
    return hashlib.sha256(folder.name.encode()).hexdigest()[: MARK_BITS // 4]


def run(
    command: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    mark: str,
    output: Output,
    check: Callable[[], None],
) -> int:
    """Run a program, and return its exit code once all processes that it started are gone. `check`
    is called repeatedly while the program runs; if it raises an exception, the program is
    killed."""
    with subprocess.Popen(
        ["/bin/sh", "-c", _GATE, "sh", *command],
        cwd=cwd,
        env={**environment, MARK_VARIABLE: mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        bufsize=0,
    ) as process:
        started = started_ticks(process.pid) or 0
        assert process.stdin is not None
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        os.set_blocking(pipe, False)
        try:
            mark_process(process.pid, mark)
            stand_back(NICENESS, process.pid)
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(b"\n")
            process.stdin.close()
            _follow(process.pid, pipe, output, check)
        finally:
            # Kill the group before the process is reaped, while its pid still identifies the group.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            end_all(mark, started)
            _take(pipe, output, HEAD_BYTES + TAIL_BYTES)
    return code


def _follow(pid: int, pipe: int, output: Output, check: Callable[[], None]) -> None:
    """Read a program's output until the program has ended, even if its children keep the pipe
    open."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    pause_ms = 1
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        check()
        if poll.poll(pause_ms) and not _take(pipe, output, _READ_BYTES):
            poll.unregister(pipe)
            pause_ms = 1  # a program closes its output when it ends
        pause_ms = min(2 * pause_ms, LOOK_MS)


def _take(pipe: int, output: Output, most: int) -> bool:
    """Read the contents of the pipe. Returns False at the end of the pipe."""
    while most > 0:
        try:
            data = os.read(pipe, min(most, _READ_BYTES))
        except BlockingIOError:
            return True
        if not data:
            return False
        output.add(data)
        most -= len(data)
    return True


def end_all(mark: str, started: int = 0) -> None:
    """End every process that has the mark and was started at or after `started` (in clock ticks
    since boot), even if these processes keep starting new processes."""
    session = Session(0, started, mark, closed=True)
    deadline = time.monotonic() + SWEEP_LIMIT_S
    while (pids := find_members([session])[mark]) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(SWEEP_PAUSE_S)
