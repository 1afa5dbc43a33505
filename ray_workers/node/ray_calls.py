"""Helpers for calls to Ray: a time limit, one-line errors, and killing an actor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_workers.node import compat_ray

END_LIMIT_S = 20.0


async def result_within(limit_s: float, ref: Any) -> Any:
    """Return the result of a remote call. Raises TimeoutError if the call takes longer than
    `limit_s`, since a suspended process never responds."""
    async with asyncio.timeout(limit_s):
        return await ref


def brief(error: BaseException) -> str:
    """Return the last line of an error's text that contains words, without the module of the
    error's class. Ray's messages contain entire remote tracebacks."""
    lines = [line for line in str(error).splitlines() if re.search(r"\w", line)]
    if not lines:
        return type(error).__name__
    return re.sub(r"^(?:\w+\.)+(?=\w+: )", "", lines[-1].strip())


# `ray.kill` asks the process to exit. If the raylet can't connect to the process, it considers the
# process dead (seen with Ray 2.60). Therefore, a process that is suspended by SIGSTOP stays alive,
# and its children keep their resources.


def end_actor(actor: Any, *, may_restart: bool = False) -> None:
    """Make Ray abandon the actor, and kill its process. Blocking."""
    process = compat_ray.process_of(actor)
    ray.kill(actor, no_restart=not may_restart)
    if process is not None:
        pid, node_id = process
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        killing = _kill_worker.options(num_cpus=0, scheduling_strategy=there).remote(pid)
        ray.get(killing, timeout=END_LIMIT_S)


@ray.remote
def _kill_worker(pid: int) -> None:
    """Send SIGKILL to a Ray worker process on this node, unless its pid now belongs to another
    process."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
            os.kill(pid, signal.SIGKILL)
