"""On a signal a process writes the stacks of its threads to a file.

C code of `faulthandler` adds the main thread's stack at once, whatever the thread is stuck in. It
must not read other threads: it does so without the interpreter's lock, and a thread that begins or
ends meanwhile crashes the process (1 of 40 dumps, where threads come and go all the time). Their
stacks are added, holding the lock, by a thread that waits for the signal; where the lock is never
released, they are missing, and so is the last line. The collectives of the process come below them.
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
    """Add the stacks of all threads to the file whenever this signal comes. For the main thread."""
    # Never closed: the handler writes to its descriptor, also while Python itself is stuck.
    file = FileIO(path, "a")
    came, comes = os.pipe()
    os.set_blocking(comes, False)
    signal.signal(number, lambda *_: None)  # or the wakeup descriptor gets nothing
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
    """After the stacks: a driver that hangs may keep torch from reading its own record."""
    try:
        return collectives.described()
    except Exception as error:  # another torch may write another record
        return f"\nThe collectives can't be read: {type(error).__name__}: {error}\n"


def _others(passed_over: set[int | None]) -> str:
    """The stacks in faulthandler's format, with names of threads; reads no source file."""
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
