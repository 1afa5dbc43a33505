"""A process writes down where it stands, when it is asked by a signal.

Two hands write. C code of `faulthandler` adds the main thread's stack at once, whatever that is
stuck in. It must not look at other threads: it reads their frames without the interpreter's lock,
and one that begins or ends meanwhile crashes the process (1 of 40 dumps, where threads come and go
all the time). Those are added, holding the lock, by a thread that waits for the signal; where the
lock is never let go, they are missing, and so is the last line.
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

END = b"(these are all threads)\n"


def dump_on(number: signal.Signals, path: Path) -> None:
    """Add the stacks of all threads to the file whenever this signal comes. For the main thread."""
    # Left open for good: the handler writes to its descriptor, also while Python itself is stuck.
    file = FileIO(path, "a")
    came, comes = os.pipe()
    os.set_blocking(comes, False)
    signal.signal(number, lambda *_: None)  # without a handler in Python nobody is woken
    signal.set_wakeup_fd(comes, warn_on_full_buffer=False)
    faulthandler.register(number, file=file, all_threads=False, chain=True)
    arguments = (number, came, file)
    threading.Thread(target=_add_the_others, args=arguments, name="stacks", daemon=True).start()


def _add_the_others(number: int, came: int, file: FileIO) -> None:
    passed_over = {threading.main_thread().ident, threading.get_ident()}
    while numbers := os.read(came, 64):
        if number in numbers:
            file.write(_others(passed_over).encode(errors="replace") + END)


def _others(passed_over: set[int | None]) -> str:
    """As faulthandler writes them, with their names; without a look at any source file."""
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
