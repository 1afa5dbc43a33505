"""The state and owner of this machine's processes, from /proc (proc(5)).

This module works only on Linux.

Processes that a rank starts are identified in three ways. The first way is the session, but a
daemon leaves its session. The second way is a mark in the environment, but a program can remove the
mark, and /proc does not show it for a forked process. The third way is a mark in RLIMIT_RSS. Linux
has ignored this limit since 2.4.30 (setrlimit(2)), but every child inherits it, even if the child
changes its session and environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import secrets
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK_VARIABLE = "DRAY_PROCESS_MARK"
MARK_BITS = 52
LIMIT_BASE = 1 << 62
"""A number of bytes that exceeds any machine's memory, so that the limit would have no effect even
if a kernel enforced it."""
DEAD = (b"Z", b"X")
STOPPED = b"T"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
READ_BYTES = 1 << 16
STARTING = (b"default_worker.py", b"worker_entry.py")
"""Programs that Ray's workers run: Ray's own program, and
`ray_workers.node.worker_forks.worker_entry`."""


@dataclass(frozen=True)
class Session:
    """A process that was forked for a request, and all processes that it starts."""

    pid: int
    """Pid of the leader."""
    started: int
    """Start time of the leader in clock ticks since boot, needed because pids are reused."""
    mark: str
    closed: bool = False
    """Whether the session has been found to be empty. The session id of an empty session may
    already have been reused."""


def new_mark() -> str:
    return f"{secrets.randbits(MARK_BITS):0{MARK_BITS // 4}x}"


def carry_mark(mark: str) -> None:
    """Put the mark on this process, and thereby on all processes that it starts."""
    os.environ[MARK_VARIABLE] = mark
    limit = _limit_of(mark)
    with contextlib.suppress(ValueError, OSError):  # a lower limit is already set
        resource.setrlimit(resource.RLIMIT_RSS, (limit, limit))


def mark_process(pid: int, mark: str) -> None:
    """Put the mark on another process, which must not have started any processes yet. The
    environment of another process can't be changed, so only the limit carries the mark."""
    limit = _limit_of(mark)
    with contextlib.suppress(ValueError, OSError):  # a lower limit is already set
        resource.prlimit(pid, resource.RLIMIT_RSS, (limit, limit))


def _limit_of(mark: str) -> int:
    return LIMIT_BASE | int(mark, 16)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    """Return the host and the container in which this process's pids are valid.

    A folder may be shared with other hosts or containers, whose processes /proc does not list.
    """
    return f"{os.uname().nodename} {Path('/proc/self/ns/pid').readlink()}"


def _read(path: str) -> bytes:
    """Return the contents of a file in /proc. This function takes a third of the time of
    `Path.read_bytes`, which matters because a search for processes reads a file of every process on
    the machine."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        contents = os.read(file, READ_BYTES)
        while len(more := os.read(file, READ_BYTES)):
            contents += more
        return contents
    finally:
        os.close(file)


def stat_fields(pid: int | str) -> list[bytes]:
    """Return the fields of /proc/PID/stat, starting with field 3 (state); empty if the process does
    not exist.

    Raises OSError if the file can't be read for another reason, such as too many open files,
    because the sessions of a process that is mistaken for dead are killed.
    """
    try:
        stat = _read(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return []
    # The command may contain spaces and brackets; the fields begin after its last ')'.
    return stat[stat.rindex(b")") + 2 :].split()


def started_ticks(pid: int) -> int | None:
    """Return the start time of a live process; None if it no longer exists or is a zombie."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in DEAD else None


def children_of(pid: int) -> list[int]:
    """Return the pids of child processes; empty if the kernel does not list them
    (CONFIG_PROC_CHILDREN)."""
    found: list[int] = []
    threads = f"/proc/{pid}/task"
    with contextlib.suppress(OSError):
        for thread in os.listdir(threads):  # noqa: PTH208 -- twice as fast for many threads
            with contextlib.suppress(OSError), open(f"{threads}/{thread}/children", "rb") as listed:
                found += map(int, listed.read().split())
    return found


@dataclass(frozen=True)
class Activity:
    """The work that a process and its descendants have done so far."""

    cpu_s: float
    num_bytes: int
    """Bytes read and written through files, pipes and sockets."""


def activity_of(pid: int) -> Activity:
    """Return the activity of a process and its live descendants; zero if it no longer exists."""
    ticks = num_bytes = 0
    for each, fields in living_tree([pid]):
        ticks += cpu_ticks(fields)
        num_bytes += sum(io_counters(each)[:2])  # rchar and wchar
    return Activity(ticks / TICKS_PER_S, num_bytes)


def living_tree(roots: Iterable[int]) -> Iterator[tuple[int, list[bytes]]]:
    """Yield each of these processes and their descendants once, with its `stat_fields`."""
    pids = list(dict.fromkeys(roots))
    seen = set(pids)
    for pid in pids:
        if fields := stat_fields(pid):
            yield pid, fields
            found = [child for child in children_of(pid) if child not in seen]
            seen.update(found)
            pids += found


def cpu_ticks(fields: Sequence[bytes]) -> int:
    """Return the CPU time of a process and its dead children, given the process's `stat_fields`."""
    return sum(map(int, fields[11:15]))


def io_counters(pid: int) -> list[int]:
    """Return rchar, wchar, syscr, syscw, read_bytes and write_bytes from /proc/PID/io; empty if the
    process no longer exists or belongs to another user."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) for line in lines]


def command(pid: int) -> str:
    """Return the name of a process, as shown by `ps`; empty if the process no longer exists."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def find_members(sessions: Sequence[Session]) -> dict[str, list[int]]:
    """Return the pids of the live (non-zombie) processes of each session, keyed by the session's
    mark."""
    found: dict[str, list[int]] = {session.mark: [] for session in sessions}
    if not sessions:
        return found
    first = min(session.started for session in sessions)
    by_number = {session.pid: session for session in sessions if not session.closed}
    signs = [
        (
            session.mark,
            f"{MARK_VARIABLE}={session.mark}".encode(),
            str(_limit_of(session.mark)).encode(),
        )
        for session in sessions
    ]
    for pid in os.listdir("/proc"):  # noqa: PTH208 -- takes less time
        if not pid.isdigit():
            continue
        fields = stat_fields(pid)
        # A process that is older than all sessions, like most processes on a machine, belongs to
        # none of them.
        if not fields or fields[0] in DEAD or int(fields[19]) < first:
            continue
        session = by_number.get(int(fields[3]))
        mark = session.mark if session else _mark_of(pid, signs)
        if mark is not None:
            found[mark].append(int(pid))
    return found


def _mark_of(pid: str, signs: list[tuple[str, bytes, bytes]]) -> str | None:
    try:
        limits = _read(f"/proc/{pid}/limits").split()
        environment = _read(f"/proc/{pid}/environ").split(b"\0")
    except OSError:
        return None
    for mark, variable, limit in signs:
        if limit in limits or variable in environment:
            return mark
    return None


def send_signal(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to a process's main thread, or to any of its threads if libc can't select one
    (glibc before 2.30). Do nothing if the process does not exist."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "tgkill"):
        libc.tgkill(pid, pid, number)
    else:
        send_signal([pid], number)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal such as SIGSTOP."""
    return stat_fields(pid)[:1] == [STOPPED]


def num_memory_kills() -> int:
    """Return the number of processes, of all users, that the kernel has killed for lack of memory
    since boot; 0 if the kernel does not count them (before Linux 4.13)."""
    with contextlib.suppress(OSError), open("/proc/vmstat") as counters:
        for line in counters:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for the signal. Most signals kill a process that has no
    handler for them."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(next(caught, "0"), 16) >> (number - 1) & 1)


def count_idle_workers(raylet: int) -> int:
    """Return the number of a raylet's worker processes that are starting, or waiting for an actor
    or a task. Forked workers are not children of the raylet, but all workers have the raylet's pid
    in their environment."""
    mark = f"RAY_RAYLET_PID={raylet}".encode()
    return sum(
        _is_idle_worker(_words(pid, "cmdline")) and mark in _words(pid, "environ")
        for pid in os.listdir("/proc")  # noqa: PTH208 -- takes less time
        if pid.isdigit()
    )


def _is_idle_worker(words: Sequence[bytes]) -> bool:
    # A worker that is starting does not have Ray's title yet.
    return words[0].strip() == b"ray::IDLE" or any(w.endswith(STARTING) for w in words)


def _words(pid: str, file: str) -> list[bytes]:
    """Return the NUL-terminated words of a file in a process's /proc folder."""
    try:
        return _read(f"/proc/{pid}/{file}").split(b"\0")
    except OSError:
        return [b""]
