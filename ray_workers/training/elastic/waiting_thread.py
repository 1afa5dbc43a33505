"""Detects that a thread waits for an operation of a broken gloo group that will never end.

If a connection breaks while a message is being transferred, gloo does not wake the thread that
waits for this message: `Pair::signalException` notifies only operations that have not begun (torch
2.13). Most operations with messages above a few MB can therefore wait forever after the death of a
peer: in a test with two ranks, a broadcast of 64 MB did so in 19 of 20 cases. A thread that waits
in C++ can't be woken, so another thread must continue its work or end the process.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch

from ray_workers.training.elastic import process_group

WATCH_S = 0.25
"""Seconds between two polls of a thread."""
LOOKS_BEFORE_CUT = 2
"""A rank's connections are cut once the watching thread has seen the announced round in more than
this number of consecutive polls. Usually, the rank itself notices the round earlier, between two
steps or because a neighbour has exited."""
LOOKS_BEFORE_HANDOVER = 4
"""Another thread continues the training if, after the connections were cut, the training thread has
stood still in an operation of the group in this number of consecutive polls."""
_TORCH = Path(torch.__file__).parent
_WAITS_IN = tuple(
    str(place)
    for place in (
        _TORCH / "distributed",
        _TORCH / "autograd" / "graph.py",
        _TORCH / "nn" / "parallel",
        _TORCH / "_ops.py",
        process_group.__file__,
    )
)
"""Where a thread is while it waits for a group. A thread elsewhere, for example in a metric of the
job's code, may wait for something that ends."""
_BUT_NOT_IN = str(_TORCH / "distributed" / "checkpoint")


class WaitingThread:
    """A thread that is observed by another thread."""

    def __init__(self, ident: int | None, native_id: int | None) -> None:
        self._ident, self._native_id = ident, native_id
        self._seen: tuple[int, int, str] | None = None
        self._num_same = 0

    def is_current(self) -> bool:
        return self._ident == threading.get_ident()

    def num_looks_without_progress(self) -> int:
        """Return the number of consecutive calls, including this one, in which the thread was in
        the same operation of a group, and had used no CPU time since the previous call."""
        seen = self._observed()
        self._num_same = self._num_same + 1 if seen is not None and seen == self._seen else 0
        self._seen = seen
        return self._num_same

    def _observed(self) -> tuple[int, int, str] | None:
        """Return the position in the code and the CPU time; None if the thread does not wait for a
        group."""
        frame = sys._current_frames().get(self._ident or 0)
        if frame is None:
            return None
        name = frame.f_code.co_filename
        if not name.startswith(_WAITS_IN) or name.startswith(_BUT_NOT_IN):
            return None
        here = Path(f"/proc/self/task/{self._native_id}")
        try:
            used = (here / "schedstat").read_text()
            state = (here / "stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            return None
        if state != b"S":  # for example, it waits for a CPU
            return None
        return id(frame), frame.f_lasti, used
