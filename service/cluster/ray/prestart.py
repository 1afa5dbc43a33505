"""Keeps idle Ray worker processes available, so that an actor starts in 50 ms instead of 500 ms.

Unless the raylet has an idle Python process, a new actor has to wait for a new process to import
ray. The raylet starts idle processes when its RPC PrestartWorkers is called, as Ray does at
startup. Idle processes hold no resources. If the RPC is missing or fails, the only effect is that
actors start more slowly.

The raylet starts the requested number of processes even if other processes are idle, and keeps them
for an hour. Therefore, only missing processes are requested. The number of missing processes is
determined from the node agent's count, which includes processes that another gateway has requested.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from ray_workers.node import compat_ray

logger = logging.getLogger(__name__)

IDLE_WORKERS = 6
"""Number of idle processes per node: enough for the supervisors and ranks of two small jobs, so
that idle processes remain for a job that is submitted immediately after another job. Each process
takes 20 MB, or 45 MB if it is not forked (`ray_workers.node.worker_forks`)."""
KEEP_ALIVE_S = 3600
PRESTART_LIMIT_S = 10.0
CALM_S = 3.0
"""Seconds after a launch before more processes are started. Importing ray uses a core for half a
second, and the starting job needs this core."""
APPEARS_S = 3.0
"""Seconds until requested processes have started and are included in counts."""


@dataclass(frozen=True)
class Count:
    """A node agent's count of idle workers."""

    address: str
    """Address of the node's raylet, host:port."""
    idle_workers: int
    asked_at: float
    """When the count was requested (`time.monotonic`). The agent counted the workers at this time
    or later."""


class Prestarter:
    """Requests the idle workers that are missing on each node."""

    def __init__(self) -> None:
        self._asked_at: dict[str, float] = {}
        self._used_at = 0.0
        self._refused = False

    def used(self) -> None:
        """Record that a launch uses workers."""
        self._used_at = time.monotonic()

    def awaits_news(self, asked_at: float) -> bool:
        """Whether a new count is needed: the last launch was more than `CALM_S` seconds ago, and
        the latest count was requested (at `asked_at`) before these seconds had passed."""
        return asked_at < self._used_at + CALM_S < time.monotonic()

    def keep_warm(self, node_id: str, count: Count) -> None:
        """Request the workers that are missing on a node, without waiting for them."""
        if self._refused or self._is_stale(node_id, count.asked_at):
            return
        missing = IDLE_WORKERS - count.idle_workers
        if missing > 0:
            self._asked_at[node_id] = time.monotonic()
            threading.Thread(
                target=self._prestart, args=(count.address, missing), daemon=True
            ).start()

    def _is_stale(self, node_id: str, asked_at: float) -> bool:
        """Whether the number of workers might have changed since they were counted."""
        appeared_at = self._asked_at.get(node_id, 0.0) + APPEARS_S
        return asked_at < max(self._used_at + CALM_S, appeared_at)

    def _prestart(self, address: str, count: int) -> None:
        try:
            compat_ray.prestart_workers(
                address, count, KEEP_ALIVE_S, _token_metadata(), PRESTART_LIMIT_S
            )
        except (ImportError, AttributeError) as error:
            self._refused = True
            logger.info(
                "this version of Ray can't prestart workers, so jobs start more slowly: %s", error
            )
        except Exception as error:
            logger.info("the raylet at %s did not prestart workers: %s", address, error)


def _token_metadata() -> list[tuple[str, str]]:
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return [("authorization", f"Bearer {Path(path).read_text().strip()}")] if path else []
