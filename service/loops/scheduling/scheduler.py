"""The scheduler: a loop that decides which waiting jobs start and where, and starts them.

Each round takes a snapshot, makes a plan, and claims and launches jobs. The decisions are made by a
pure function, `service.domain.scheduling.policy.plan`. The stages of a round add to its snapshot
and carry out its decisions. A claim that fails because the job has changed is not an error: another
process was faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from datetime import datetime

from sqlalchemy.orm import Session

from service.cluster.port import ClusterSnapshot
from service.db.notifications import QUEUE
from service.db.repositories import surroundings
from service.domain import meter
from service.domain.scheduling import policy
from service.loops.scheduling.autoscaler import Autoscaler
from service.loops.scheduling.carrying_out import (
    BatchChanges,
    Grants,
    ImpossibleJobs,
    StoredDecisions,
    UnansweredRecalls,
)
from service.loops.scheduling.cluster_watcher import ClusterWatcher
from service.loops.scheduling.deadlines import Deadlines
from service.loops.scheduling.decision_recorder import DecisionRecorder
from service.loops.scheduling.environment_gate import EnvironmentGate
from service.loops.scheduling.forecaster import Forecaster
from service.loops.scheduling.reserved_nodes import ReservedNodes
from service.loops.scheduling.seen_nodes import LeftSlots, SeenNodes
from service.loops.scheduling.stages import SchedulerRound, Stage
from service.loops.scheduling.starter import Starter
from service.loops.scheduling.trial_values import TrialValues
from service.loops.scheduling.usage_sampler import UsageSampler
from service.loops.scheduling.used_shares import QueuesAndBudgets, UsedShares
from service.loops.shared import queue_view
from service.loops.shared.term import LoopContext
from service.loops.shared.timings import rest_after
from service.outlook.step_times import EarlierRuns, elastic_jobs

logger = logging.getLogger(__name__)


class Scheduler:
    """Runs a round whenever the queue or the cluster changes, and at least once per tick."""

    def __init__(
        self,
        context: LoopContext,
        watch: ClusterWatcher,
        autoscaler: Autoscaler,
        forecaster: Forecaster,
        recorder: DecisionRecorder,
    ) -> None:
        self._database = context.database
        self._signals = context.signals
        self._settings = context.settings
        self._halted = context.halted
        self._watch = watch
        self._autoscaler = autoscaler
        self._earlier = EarlierRuns()
        self._gate = EnvironmentGate(context)
        trial_values, used = TrialValues(context.database, context.signals), UsedShares()
        self._stages: tuple[Stage, ...] = (
            UnansweredRecalls(context),
            Deadlines(context),
            SeenNodes(),
            QueuesAndBudgets(context.prices),
            ReservedNodes(context),
            used,
            trial_values,
            autoscaler,
            forecaster,
            LeftSlots(),
            self._gate,
            ImpossibleJobs(context),
            recorder,
            UsageSampler(context),
            StoredDecisions(context),
            Grants(context),
            BatchChanges(context),
            Starter(context, self._gate, trial_values, used),
        )

    async def run(self) -> None:
        """Run until cancelled."""
        with contextlib.ExitStack() as closing:
            for stage in self._stages:
                closing.callback(stage.close)
            woken = closing.enter_context(self._signals.subscribe(QUEUE))
            while True:
                began, starting_s = asyncio.get_running_loop().time(), 0.0
                try:
                    starting_s = await self.run_once()
                except Exception:
                    logger.exception("a round of the scheduler failed; the loop continues")
                took_s = asyncio.get_running_loop().time() - began
                self._database.meter.add(meter.SCHEDULER_ROUND, took_s)
                # Ignore the time spent starting jobs when computing the pause. Otherwise, the pause
                # would be longer after many starts, and free slots would remain unused.
                await rest_after(began + starting_s)
                await woken.wait(self._settings.scheduler_tick_s)

    async def run_once(self) -> float:
        """Run one round, unless the scheduler is halted. Returns the seconds spent on starts."""
        if self._halted.is_set():
            return 0.0
        cluster = self._autoscaler.as_left(self._watch.latest)
        seen = await self._database.read(lambda s, now: self._look(s, now, cluster))
        for stage in self._stages:
            await stage.before(seen)
            if seen.is_over:
                return 0.0
        snapshot = seen.snapshot
        if snapshot.queue or snapshot.reservations or any(a.growing is not None for a in seen.live):
            await self._gate.plan(seen)
        for stage in self._stages:
            await stage.after(seen)
        return seen.starting_s

    def _look(
        self, session: Session, now: datetime, cluster: ClusterSnapshot | None
    ) -> SchedulerRound:
        settings = self._settings
        waiting, live = queue_view.snapshot(session, now, self._earlier.get(session, now))
        snapshot = policy.Snapshot(
            waiting,
            (),
            connected=cluster is not None,
            holders=tuple(
                policy.Holder(a.job_id, a.slices, a.bundle, a.queue, a.owner, a.roles) for a in live
            ),
            storage_problem=surroundings.seen(session).storage_problem,
            min_run_s=settings.min_run_s,
            elastic=elastic_jobs(session) if settings.elastic_sizing else {},
            topology=settings.topology,
        )
        seen = SchedulerRound(cluster, snapshot, live, now)
        for stage in self._stages:
            stage.look(session, seen)
        return seen
