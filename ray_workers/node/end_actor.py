"""Ending an actor whose process may be stopped, and not dead.

`ray.kill` asks the process to exit. A raylet that can't connect to the process takes it for dead
already (seen with Ray 2.60), so that a stopped process stays, with all that its children hold.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_workers.node import compat_ray

END_LIMIT_S = 20.0


def end_actor(actor: Any, *, may_restart: bool = False) -> None:
    """Have Ray give the actor up, and its process killed where it runs. Blocking."""
    process = compat_ray.process_of(actor)
    ray.kill(actor, no_restart=not may_restart)
    if process is not None:
        pid, node_id = process
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        killing = _kill_worker.options(num_cpus=0, scheduling_strategy=there).remote(pid)
        ray.get(killing, timeout=END_LIMIT_S)


@ray.remote
def _kill_worker(pid: int) -> None:
    """SIGKILL a Ray worker process of this node, unless its pid belongs to another by now."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
            os.kill(pid, signal.SIGKILL)
