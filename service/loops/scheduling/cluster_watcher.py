"""The cluster watcher: a loop that keeps the latest snapshot of the cluster in memory and in the
database.

The scheduler plans with the snapshot in memory, so that no submission waits for a call to Ray. The
API reads the snapshot in the database.
"""

from __future__ import annotations

import asyncio
import logging

from service.cluster.port import ClusterSnapshot, ClusterUnavailable
from service.db.notifications import QUEUE
from service.lifecycle import preemption
from service.loops.shared.term import LoopContext
from service.nodes import node_table

logger = logging.getLogger(__name__)

NOT_ASKED = "the cluster has not been polled yet"


class ClusterWatcher:
    """Keeps the `latest` snapshot. While the cluster doesn't respond, `latest` is None, and
    `problem` gives the reason."""

    def __init__(self, context: LoopContext) -> None:
        self._database = context.database
        self._cluster = context.cluster
        self._signals = context.signals
        self._settings = context.settings
        self._timings = context.timings
        self._stored: object = None
        self._stored_at = 0.0
        self.latest: ClusterSnapshot | None = None
        self.problem: str | None = NOT_ASKED

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                await self.run_once()
            except Exception:
                logger.exception("a round of the cluster watcher failed; the loop continues")
            is_steady = self.latest is not None and all(
                node.accepted or node.is_released or node.drained_by is not None
                for node in self.latest.nodes
            )
            timings = self._timings
            await asyncio.sleep(timings.watch_period_s if is_steady else timings.joining_period_s)

    async def run_once(self) -> None:
        """Poll the cluster, store changes, wake the scheduler, and vacate nodes that are being
        drained."""
        before = (self.latest, self.problem)
        try:
            self.latest, self.problem = await self._cluster.snapshot(), None
        except ClusterUnavailable as error:
            self.latest, self.problem = None, str(error)
        if (self.latest, self.problem) != before:
            self._signals.publish(QUEUE)
        now = asyncio.get_running_loop().time()
        is_old = now - self._stored_at > self._timings.refresh_s
        if is_old or (self.latest, self.problem) != self._stored:
            latest, problem = self.latest, self.problem
            await self._database.write(lambda s, at: node_table.store(s, latest, problem, at))
            self._stored, self._stored_at = (latest, problem), now
        await self._clear_drained()

    async def _clear_drained(self) -> None:
        """Ask the attempts on drained nodes to save their state and release their slots while the
        nodes still run."""
        latest, grace_s = self.latest, self._settings.preempt_grace_s
        if latest is not None and any(node.drained_by is not None for node in latest.nodes):
            await self._database.write(lambda s, at: preemption.leave_nodes(s, latest, grace_s, at))
