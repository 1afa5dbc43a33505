"""A signal handler that writes the stacks of a process's threads to a file.

The C code of `faulthandler` writes the main thread's stack immediately, wherever the thread is
stuck. The C code must not read the stacks of other threads, because it does not hold the
interpreter lock: if a thread starts or ends during the dump, the process can crash (in 1 of 40
dumps, if threads start and end constantly). A separate thread, which waits for the signal, acquires
the lock and adds the other stacks and then the collectives of the process. If the lock is never
released, the other stacks, the collectives and the last line are missing.
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
    """Append the stacks of all threads to the file whenever the process receives the signal
    `number`. Must be called in the main thread."""
    # Never close this file: the handler writes to its descriptor even while Python itself is stuck.
    file = FileIO(path, "a")
    came, comes = os.pipe()
    os.set_blocking(comes, False)
    signal.signal(number, lambda *_: None)  # otherwise nothing is written to the wakeup descriptor
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
    """Describe the collectives. A hanging driver can keep torch from reading its own record."""
    try:
        return collectives.described()
    except Exception as error:  # another version of torch may use another format
        return f"\nThe collectives can't be read: {type(error).__name__}: {error}\n"


def _others(passed_over: set[int | None]) -> str:
    """Format the stacks as faulthandler does, with thread names. Reads no source files."""
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
