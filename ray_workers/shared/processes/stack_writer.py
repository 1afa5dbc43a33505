"""A signal handler that writes the stacks of a process's threads to a file.

C code of `faulthandler` adds the main thread's stack at once, whatever the thread is stuck in. The
code must not read other threads: it runs without the interpreter's lock, and a thread that begins
or ends meanwhile crashes the process (1 of 40 dumps, if threads begin and end all the time). A
thread that waits for the signal adds their stacks while it holds the lock, and then the collectives
of the process. If the lock is never released, these are missing, and so is the last line.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from io import FileIO
from pathlib import Path

from ray_workers.shared.processes import collectives

END = b"(these are all threads)\n"


def dump_on(number: signal.Signals, path: Path) -> None:
    """Append the stacks of all threads to the file at each such signal. Call in the main thread."""
    # Never closed: the handler writes to its descriptor, also while Python itself is stuck.
    file = FileIO(path, "a")
    came, comes = os.pipe()
    os.set_blocking(comes, False)
    signal.signal(number, lambda *_: None)  # without it the wakeup descriptor gets nothing
    signal.set_wakeup_fd(comes, warn_on_full_buffer=False)
    faulthandler.register(number, file=file, all_threads=False, chain=True)
    arguments = (number, came, file)
    threading.Thread(target=_add_the_others, args=arguments, name="stacks", daemon=True).start()


def _add_the_others(number: int, came: int, file: FileIO) -> None:
    passed_over = {threading.main_thread().ident, threading.get_ident()}
    while numbers := os.read(came, 64):
        if number in numbers:
            file.write(_others(passed_over).encode(errors="replace"))
            file.write(_collectives().encode(errors="replace") + END)


def _collectives() -> str:
    """Text on the collectives. A driver that hangs may keep torch from reading its own record."""
    try:
        return collectives.described()
    except Exception as error:  # another version of torch may write another record
        return f"\nThe collectives can't be read: {type(error).__name__}: {error}\n"


def _others(passed_over: set[int | None]) -> str:
    """Stacks in faulthandler's format, with names of threads. Reads no source files."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        if ident not in passed_over:
            name = names.get(ident, "not Python's own")
            lines.append(f"\nThread 0x{ident:016x} [{name}] (most recent call first):")
            lines += [
                f'  File "{at.f_code.co_filename}", line {line} in {at.f_code.co_name}'
                for at, line in traceback.walk_stack(frame)
            ]
    return "\n".join([*lines, ""])
