"""The loop that runs the requested self-tests of nodes.

The tests themselves run on the nodes. The loop asks the agents to start them, and stores their
results. A request and its state are stored in the database, and an agent starts a test only once,
so a test continues when the service restarts, and starts again when the agent restarts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from ray_workers.shared.self_tests import NodeTest, TestPhase
from service.cluster.port import ClusterNode, ClusterUnavailable
from service.db.notifications import NODE_CHECKS
from service.db.repositories.scheduling import node_checks as repository
from service.domain.node_checks import CheckCause, CheckState
from service.lifecycle import node_checks
from service.loops.scheduling.cluster_watcher import ClusterWatcher
from service.loops.shared.term import LoopContext

logger = logging.getLogger(__name__)

LIMIT = timedelta(minutes=4)
"""Time after which a test that has begun counts as not possible."""
ABSENT_LIMIT = timedelta(minutes=1)
"""Time after which a test that an admin requested is given up if the node is not ready."""
RETURN_LIMIT = timedelta(days=7)
"""Time after which a lost node no longer has to be tested when it returns."""


@dataclass(frozen=True)
class _Check:
    """An open test, as read from the database."""

    id: str
    hostname: str
    cause: CheckCause
    asked_at: datetime
    began_at: datetime | None
    is_running: bool
    is_due: bool


class NodeChecker:
    """Runs the self-tests that were requested. The tests of different nodes don't wait for each
    other."""

    def __init__(self, context: LoopContext, watch: ClusterWatcher) -> None:
        self._database = context.database
        self._cluster = context.cluster
        self._signals = context.signals
        self._timings = context.timings
        self._watch = watch
        self._steps: dict[str, asyncio.Task[None]] = {}
        """The request to each host's agent that has not been answered yet."""
        self._waits: dict[str, str] = {}
        """Why each test waits, keyed by id, if the latest answer of its agent was that it does."""

    async def run(self) -> None:
        """Run until cancelled."""
        with self._signals.subscribe(NODE_CHECKS) as woken:
            try:
                while True:
                    num_active = 1
                    try:
                        num_active = await self.run_once()
                    except Exception:
                        logger.exception("a round of the node checker failed; the loop continues")
                    timings = self._timings
                    await woken.wait(timings.check_period_s if num_active else timings.refresh_s)
            finally:
                for step in self._steps.values():
                    step.cancel()

    async def run_once(self, *, wait: bool = False) -> int:
        """Take the next step of each open test, and return the number of tests that can continue
        immediately. Other tests wait for a node or a job, maybe for days. If `wait` is true, wait
        for the answers of the nodes."""
        checks = await self._database.read(_read)
        self._steps = {name: step for name, step in self._steps.items() if not step.done()}
        self._waits = {c.id: self._waits[c.id] for c in checks if c.id in self._waits}
        for check in checks:
            if check.is_due and check.hostname not in self._steps:
                step = asyncio.create_task(self._step_safely(check), name=f"test {check.hostname}")
                self._steps[check.hostname] = step
        if wait:
            await asyncio.gather(*self._steps.values())
        return sum(check.is_due and bool(self._nodes(check.hostname)) for check in checks)

    async def _step_safely(self, check: _Check) -> None:
        try:
            await self._step(check)
        except ClusterUnavailable:
            pass  # ask again in the next round
        except Exception:
            logger.exception("retrying the test of %s after an error", check.hostname)

    async def _step(self, check: _Check) -> None:
        nodes = self._nodes(check.hostname)
        ready = [node for node in nodes if node.accepted]
        why = await self._database.read(lambda _, now: _overdue(check, nodes, now))
        if check.is_running and not nodes and self._watch.latest is not None:
            await self._database.write(
                lambda s, now: node_checks.wait_for_return(s, check.hostname, check.id, now)
            )
        elif why is not None:
            waits = self._waits.pop(check.id, "") if ready else ""
            reason = f"{why}: {waits}" if waits else why
            await self._settle(check, node_checks.untested(reason), repeats=bool(waits))
        elif ready:
            node_ids = {node.node_id for node in nodes}
            if not await self._database.write(
                lambda s, now: node_checks.begin(s, check.hostname, check.id, now)
            ):
                return
            held = await self._database.read(lambda s, _: node_checks.num_gpus_held(s, node_ids))
            test = await self._cluster.check(ready[0].node_id, check.id, held)
            self._waits.pop(check.id, None)
            if test.phase is TestPhase.DONE:
                await self._settle(check, test)
            elif test.phase is TestPhase.WAITING:
                self._waits[check.id] = test.message

    def _nodes(self, hostname: str) -> list[ClusterNode]:
        latest = self._watch.latest
        return [n for n in latest.nodes if n.hostname[:255] == hostname] if latest else []

    async def _settle(self, check: _Check, test: NodeTest, *, repeats: bool = False) -> None:
        key = check.hostname, check.id
        outcome = await self._database.write(
            lambda s, now: node_checks.settle(s, *key, test, now, repeats=repeats)
        )
        if outcome is not None:
            logger.info("the self-test of %s: %s", check.hostname, outcome)


def _read(session: Session, _: datetime) -> list[_Check]:
    return [
        _Check(
            *(row.id, row.hostname, CheckCause(row.cause), row.asked_at, row.began_at),
            is_running=row.state == CheckState.RUNNING,
            is_due=node_checks.is_due(session, row),
        )
        for row in repository.in_states(session, node_checks.OPEN)
    ]


def _overdue(check: _Check, nodes: Sequence[ClusterNode], now: datetime) -> str | None:
    """Return why the service no longer waits for the test; None if the service still waits for
    it."""
    if check.began_at is not None and now - check.began_at > LIMIT:
        return f"the test did not finish within {LIMIT.total_seconds():g} s"
    if any(node.accepted for node in nodes):
        return None
    waited = now - check.asked_at
    if check.cause is CheckCause.ASKED and waited > ABSENT_LIMIT:
        return next((node.problem for node in nodes if node.problem), "the node left the cluster")
    return "the node did not return" if waited > RETURN_LIMIT else None
