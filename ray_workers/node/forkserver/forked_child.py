"""Runs in a process that the forkserver has forked, from the fork to the end of the training
process."""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

from ray_workers.node.rank_environment import RANK_NICENESS
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.processes.linux import PR_SET_PDEATHSIG, prctl, stand_back


class Given(StrEnum):
    """The meaning of the second descriptor that may be sent with a request."""

    CREDENTIALS = "credentials"
    """A file with environment variables, as a JSON object."""
    STORAGE = "storage"
    """A socket to the process that copies files to and from the job's storage
    (`dray.train.files`)."""


STORAGE_FD = 3


def run(request: dict[str, Any], fds: Sequence[int], parent: int) -> NoReturn:
    """Run the request and exit. fds: a descriptor for output, then the given descriptors."""
    code = 1
    try:
        os.setsid()
        if request["op"] == "rank":
            stand_back(int(os.environ.get(RANK_NICENESS, "0")))
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(code)  # the parent died before this process was set to die with it
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        kept = _take(request.get("given"), fds[1:])
        os.dup2(fds[0], 1)
        os.dup2(fds[0], 2)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        if kept is not None:
            os.dup2(kept, STORAGE_FD, inheritable=False)
            os.environ["DRAY_STORAGE_FD"] = str(STORAGE_FD)
        os.closerange(3 if kept is None else STORAGE_FD + 1, os.sysconf("SC_OPEN_MAX"))
        atexit._clear()  # the handlers belong to the parent
        gc.enable()
        code = _operation(request)()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def _take(given: str | None, fds: Sequence[int]) -> int | None:
    """Use the given descriptors. Returns the descriptor to keep open, if any."""
    if given == Given.CREDENTIALS:
        with open(fds[0], "rb") as file:
            os.environ.update(json.load(file))
    return fds[0] if given == Given.STORAGE else None


def _operation(request: dict[str, Any]) -> Callable[[], int]:
    if request["op"] == "rank":
        from ray_workers.training.process import rank_main

        task = RankTask.from_json(json.dumps(request["task"]))
        return lambda: rank_main.main(task)
    if request["op"] == "store":
        from ray_workers.training.elastic import store_server

        address, temp_dir = str(request["address"]), Path(request["temp_dir"])
        return lambda: store_server.serve(address, temp_dir)
    raise ValueError(f"unknown request: {request['op']!r}")


def _leave(code: int) -> NoReturn:
    """Exit as an interpreter would, but without cleaning up the parent's state."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)
