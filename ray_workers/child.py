"""The forked side of the forkserver: from the fork to the end of a training process."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from ray_workers.contracts import RankTask
from ray_workers.processes import carry_mark

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def run(request: dict[str, Any], output: int, mark: str, parent: int) -> None:
    """Do what the request asks for; never returns."""
    code = 1
    try:
        carry_mark(mark)
        os.setsid()
        _keep_niceness()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(code)  # it died before it could take us along
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(output, 1)
        os.dup2(output, 2)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        atexit._clear()  # the parent's handlers are not ours to run
        gc.enable()
        code = _operation(request)()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def _keep_niceness() -> None:
    """Give the new session the niceness that Ray gave its worker.

    Where Linux groups processes by session (sched_autogroup), a process's own niceness counts only
    within its session, and a service beside the ranks would wait for each of them in turn.
    """
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
        group.write(str(os.nice(0)))


def _operation(request: dict[str, Any]) -> Callable[[], int]:
    if request["op"] == "rank":
        from ray_workers.training import entry

        task = RankTask.from_json(json.dumps(request["task"]))
        return lambda: entry.main(task)
    if request["op"] == "store":
        from ray_workers.training import store

        return store.serve
    raise ValueError(f"unknown request: {request['op']!r}")


def _leave(code: int) -> None:
    """End as an interpreter would, without the parent's half of the interpreter's life."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)
