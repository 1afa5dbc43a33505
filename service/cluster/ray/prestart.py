"""Keeps Ray worker processes idle, so that an actor starts in 50 ms instead of 500.

Unless the raylet has an idle Python process, a new actor waits for a process that has to import ray
first. The raylet starts such processes by its RPC PrestartWorkers, which Ray's own startup uses.
They hold no resources. This only saves time: if the RPC is missing or fails, actors start more
slowly.

The raylet starts as many processes as are requested, even if others are idle, and keeps them for an
hour. So only the processes that a node agent's count lacks are requested: another gateway may have
requested some before.
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
"""Idle processes per node: the supervisors and the ranks of two small jobs, so that a job that is
submitted right after another also finds some. Each takes 20 MB, or 45 MB if it is not forked
(`ray_workers.node.worker_forks`)."""
KEEP_ALIVE_S = 3600
PRESTART_LIMIT_S = 10.0
CALM_S = 3.0
"""Seconds after a launch before more processes are started: importing ray takes half a second of a
core, which the starting job needs."""
APPEARS_S = 3.0
"""Seconds that requested processes may take to start and be counted."""


@dataclass(frozen=True)
class Count:
    """A node agent's count of idle workers."""

    address: str
    """Address of the node's raylet, host:port."""
    idle_workers: int
    asked_at: float
    """A time of `time.monotonic`; the count is not older."""


class Prestarter:
    """Requests the idle workers that each node lacks."""

    def __init__(self) -> None:
        self._asked_at: dict[str, float] = {}
        self._used_at = 0.0
        self._refused = False

    def used(self) -> None:
        """Note that a launch takes workers."""
        self._used_at = time.monotonic()

    def awaits_news(self, asked_at: float) -> bool:
        """Whether a count is older than `CALM_S` after the last launch, and this time is over."""
        return asked_at < self._used_at + CALM_S < time.monotonic()

    def keep_warm(self, node_id: str, count: Count) -> None:
        """Request the workers that a node lacks, without waiting for them."""
        if self._refused or self._is_stale(node_id, count.asked_at):
            return
        missing = IDLE_WORKERS - count.idle_workers
        if missing > 0:
            self._asked_at[node_id] = time.monotonic()
            threading.Thread(
                target=self._prestart, args=(count.address, missing), daemon=True
            ).start()

    def _is_stale(self, node_id: str, asked_at: float) -> bool:
        """Whether the number of workers may have changed since the count."""
        appeared_at = self._asked_at.get(node_id, 0.0) + APPEARS_S
        return asked_at < max(self._used_at + CALM_S, appeared_at)

    def _prestart(self, address: str, count: int) -> None:
        try:
            compat_ray.prestart_workers(
                address, count, KEEP_ALIVE_S, _token_metadata(), PRESTART_LIMIT_S
            )
        except (ImportError, AttributeError) as error:
            self._refused = True
            logger.info("this Ray can't prestart workers, so jobs start more slowly: %s", error)
        except Exception as error:
            logger.info("the node at %s did not prestart workers: %s", address, error)


def _token_metadata() -> list[tuple[str, str]]:
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return [("authorization", f"Bearer {Path(path).read_text().strip()}")] if path else []
