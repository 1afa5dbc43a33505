"""A process that reads samples for a thread of its rank, independently of the rank's GIL.

The process is forked, so it supports any kind of samples and maps the same files. The rank sends
sample indices through one pipe and receives the samples through another, without a copy in Python.
Python's own pools are not used, because their threads and locks can't handle a worker that is
killed at an arbitrary time, or a fork while another thread runs a collective operation.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import pickle
import signal
import stat
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ray_workers.shared.job_log import log
from ray_workers.shared.processes.linux import PR_SET_PDEATHSIG, prctl

Take = Callable[[Tensor], tuple[Tensor, Tensor]]
Array = npt.NDArray[Any]

MAX_TRIES = 3
"""Maximum number of attempts to read a micro-batch, if the process is killed in each attempt."""
PIPE_BYTES = 1 << 20
"""The largest pipe size that the system allows without privileges."""
_starting = threading.Lock()
"""Lets only one process start at a time. If two loader processes started at once, one could inherit
the other's pipe, and the pipe would stay open when the other process dies."""
_LENGTH = struct.Struct("<q")


class Loader:
    """One loader process for one thread. If the process is killed, it is replaced, and its
    micro-batch is read again. The process dies with the thread that owns it."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._closed = False
        self._reading = threading.Lock()
        self._pid, self._requests, self._answers = self._start()

    def read(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of `take(at)`, or raise its error."""
        with self._reading:
            for _ in range(MAX_TRIES):
                try:
                    return self._ask(at)
                except (EOFError, BrokenPipeError):
                    if self._closed:
                        raise
                    log("a loader process was killed; restarting it")
                    self._end()
                    self._pid, self._requests, self._answers = self._start()
        raise RuntimeError(
            f"a loader process was killed {MAX_TRIES} times while it was reading the same samples. "
            "If memory is low, reduce data.loader_workers"
        )

    def close(self) -> None:
        """Kill the process; can be called from any thread. A thread that is waiting for the process
        gets EOFError, even if the process is stuck."""
        self._closed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with self._reading:
            self._end()

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._requests)
        os.close(self._answers)

    def _ask(self, at: Tensor) -> tuple[Tensor, Tensor]:
        _send(self._requests, at.numpy().tobytes())
        error, *forms = pickle.loads(_receive(self._answers))
        if error is not None:
            raise error
        inputs, targets = (np.empty(shape, dtype) for dtype, shape in forms)
        for array in (inputs, targets):
            _read_into(self._answers, array)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _start(self) -> tuple[int, int, int]:
        """Fork the process; return (pid, pipe for requests, pipe for responses)."""
        parent = os.getpid()
        with _starting:
            asked, requests = os.pipe()
            answers, answered = os.pipe()
            pid = os.fork()
            if pid == 0:
                _serve(self._take, asked, answered, parent)
            os.close(asked)
            os.close(answered)
        with contextlib.suppress(OSError):
            fcntl.fcntl(answers, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return pid, requests, answers


def _serve(take: Take, asked: int, answered: int, parent: int) -> NoReturn:
    """Respond to requests until the pipe is closed."""
    try:
        _become_loader(parent)
        while True:
            at = torch.from_numpy(np.frombuffer(_receive(asked), np.int64).copy())
            try:
                arrays = [np.ascontiguousarray(part.numpy()) for part in take(at)]
            except Exception as error:
                _send(answered, pickle.dumps([_portable(error)]))
                continue
            _send(answered, pickle.dumps([None, *((a.dtype.str, a.shape) for a in arrays)]))
            for array in arrays:
                _write(answered, array)
    finally:
        os._exit(0)


def _become_loader(parent: int) -> None:
    """Prepare a process that was just forked from a rank, which has threads and connections: close
    the connections, so that peers notice when the rank exits, and make the process exit with the
    rank."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    gc.freeze()  # finalizers of the parent's garbage could wait for threads that don't exist here
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed
            fd = int(entry.name)
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.close(fd)
    torch.set_num_threads(1)


def _portable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with the same message if the error can't be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _send(fd: int, content: bytes) -> None:
    _write_all(fd, [_LENGTH.pack(len(content)), content])


def _receive(fd: int) -> bytes:
    head = bytearray(_LENGTH.size)
    _fill(fd, memoryview(head))
    content = bytearray(_LENGTH.unpack(head)[0])
    _fill(fd, memoryview(content))
    return bytes(content)


def _write(fd: int, array: Array) -> None:
    _write_all(fd, [array.reshape(-1).view(np.uint8).data])


def _read_into(fd: int, array: Array) -> None:
    _fill(fd, array.reshape(-1).view(np.uint8).data)


def _write_all(fd: int, parts: Sequence[bytes | memoryview]) -> None:
    for part in parts:
        left = memoryview(part)
        while left:
            left = left[os.write(fd, left) :]


def _fill(fd: int, left: memoryview) -> None:
    """Fill a buffer from a pipe. Raises EOFError if the other end of the pipe is closed."""
    while left:
        count = os.readv(fd, [left])
        if not count:
            raise EOFError
        left = left[count:]
