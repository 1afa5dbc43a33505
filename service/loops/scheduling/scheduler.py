"""The scheduler: a loop that decides which waiting job starts where, and starts it.

Each round takes a snapshot, plans, claims and launches. `service.domain.scheduling.policy.plan`, a
pure function, decides; the loop reads, applies and forgets. A claim that finds the job changed is
no error: someone else won.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy.orm import Session

from ray_workers.shared.contracts import AttemptSpec
from service.cluster.port import Cluster, ClusterSnapshot
from service.config.settings import Settings
from service.costs.prices_file import PricesFile
from service.costs.spending import UsedUpBudgets
from service.db.notifications import QUEUE, Signals
from service.db.repositories import surroundings
from service.db.repositories.bulk import in_chunks
from service.db.repositories.scheduling import queues as queues_repository
from service.db.session import touch
from service.domain import meter
from service.domain.scheduling import policy
from service.domain.scheduling.placement.slots import count, is_part_of_gpu
from service.domain.scheduling.policy.batch_changes import batch_changes
from service.lifecycle import preemption, resizing, transitions
from service.lifecycle.claims import Wanted
from service.loops.scheduling import preparations
from service.loops.scheduling.autoscaler import Autoscaler
from service.loops.scheduling.cluster_watcher import ClusterWatcher
from service.loops.scheduling.decision_recorder import DecisionRecorder
from service.loops.scheduling.forecaster import SchedulerView
from service.loops.scheduling.seen_nodes import SeenNodes
from service.loops.scheduling.starter import Starter
from service.loops.scheduling.trial_values import TrialValues
from service.loops.scheduling.used_shares import UsedShares
from service.loops.shared import queue_view
from service.loops.shared.fencing import LoopDatabase
from service.loops.shared.launches import Launches
from service.loops.shared.pace import rest_after
from service.loops.shared.timings import LoopTimings
from service.outlook.decisions import SeenRound
from service.outlook.earlier_runs import EarlierRuns
from service.outlook.step_times import elastic_jobs

logger = logging.getLogger(__name__)

RAY_LAGS = timedelta(seconds=5)
"""How long Ray may show slots as taken that an attempt has left."""
LONG_QUEUE = 200
"""Waiting jobs from which on it is noted each `NOTE_PERIOD` why each of them waits."""
NOTE_PERIOD = timedelta(seconds=1)
MAX_CLAIMS = 200
"""Jobs that are claimed in one transaction: SQLite has one writer, and others wait for it."""


class Scheduler:
    """Wakes when the queue or the cluster changes, and at the latest each tick."""

    def __init__(
        self,
        database: LoopDatabase,
        cluster: Cluster,
        watch: ClusterWatcher,
        launches: Launches,
        signals: Signals,
        settings: Settings,
        timings: LoopTimings,
        deployment_id: str,
        halted: asyncio.Event,
        prices: PricesFile,
        autoscaler: Autoscaler,
        recorder: DecisionRecorder,
    ) -> None:
        """recorder: keeps what it saw and decided."""
        self._database = database
        self._watch = watch
        self._signals = signals
        self._settings = settings
        self._impossible_grace = timedelta(seconds=timings.impossible_grace_s)
        self._halted = halted
        self._autoscaler = autoscaler
        self._recorder = recorder
        self._impossible_since: dict[str, datetime] = {}
        self._earlier = EarlierRuns()
        self._used = UsedShares()
        self._nodes = SeenNodes()
        self._budgets = UsedUpBudgets(prices)
        self._held: dict[tuple[str, int], int] = {}
        """Slots that attempts held in the last round."""
        self._trial_values = TrialValues(database, signals)
        self._left_at: datetime | None = None
        self._noted_at: datetime | None = None
        """When it was last noted why each job waits."""
        self._starting_s = 0.0
        """Seconds that the round has spent on claims and launches."""
        self.view: SchedulerView | None = None
        """Its view in its last round."""
        self._gate = preparations.EnvironmentGate(
            database, preparations.Preparations(cluster, signals), settings
        )
        self._starter = Starter(
            database, cluster, launches, signals, settings, deployment_id, self._gate.note_ready
        )

    async def run(self) -> None:
        """Until cancelled."""
        with (
            self._signals.subscribe(QUEUE) as woken,
            contextlib.closing(self._gate),
            contextlib.closing(self._trial_values),
        ):
            while True:
                began, self._starting_s = asyncio.get_running_loop().time(), 0.0
                try:
                    await self.run_once()
                except Exception:
                    logger.exception("the scheduler failed a round; it goes on")
                took_s = asyncio.get_running_loop().time() - began
                self._database.meter.add(meter.SCHEDULER_ROUND, took_s)
                # Starts are the work itself: a rest for them would leave slots empty.
                await rest_after(began + self._starting_s)
                await woken.wait(self._settings.scheduler_tick_s)

    async def run_once(self) -> int:
        """One round; answers how many attempts were launched: none once it is halted."""
        if self._halted.is_set():
            return 0
        cluster = self._autoscaler.as_left(self._watch.latest)
        snapshot, live, now = await self._database.read(lambda s, now: self._look(s, now, cluster))
        if any(attempt.is_recall_unanswered for attempt in live):
            await self._database.write(lambda s, at: _withdraw_recalls(s, live, at))
            return 0  # the next plan goes by what is held then
        snapshot = replace(snapshot, queue=await self._trial_values.in_queue(snapshot.queue))
        self._gate.keep(snapshot)
        waiting = snapshot.queue
        growing = {a.job_id: a.growing for a in live if a.growing is not None}
        if not waiting:
            self._impossible_since.clear()
        if not waiting and not growing:
            self._autoscaler.consider(snapshot, [], cluster, live, now)
            await self._change_batches(snapshot, [], live)
            return 0
        decisions = await self._gate.plan(snapshot, now, cluster)
        decisions = [self._trial_values.reason(decision) for decision in decisions]
        planned = tuple(decisions)
        decisions = self._autoscaler.consider(snapshot, decisions, cluster, live, now)
        have_run = {job.job_id for job in waiting if job.attempt > 0}
        decisions = [
            self._patient(decision, place, now, has_run=decision.job_id in have_run)
            for place, decision in enumerate(decisions)
        ]
        if any(not isinstance(decision, policy.Wait | policy.Stay) for decision in decisions):
            self._recorder.note(SeenRound(self._gate.seen or snapshot, planned, now))
        attempts = {a.job_id: a.attempt for a in live}
        await self._note(self._without_late_waits(decisions, now), attempts)
        for decision in decisions:
            if isinstance(decision, policy.Grow) and not self._halted.is_set():
                await self._grow(growing[decision.job_id], decision)
        await self._change_batches(snapshot, decisions, live)
        starts = [d for d in decisions if isinstance(d, policy.Start)]
        starts = [start for start in starts if not self._trial_values.is_asked_for(start.job_id)]
        if not starts:
            return 0
        assert cluster is not None, "the plan starts nothing without a cluster"
        by_id = {job.job_id: job for job in waiting}
        wanted = [_wanted(by_id[start.job_id], start) for start in starts]
        launched = 0
        decided = asyncio.get_running_loop().time()
        for some in in_chunks(wanted, MAX_CLAIMS):
            if self._halted.is_set():
                break
            launched += await self._starter.start(
                some, cluster.session, partial(self._claimed, some)
            )
        self._starting_s = asyncio.get_running_loop().time() - decided
        return launched

    def _look(
        self, session: Session, now: datetime, cluster: ClusterSnapshot | None
    ) -> tuple[policy.Snapshot, tuple[queue_view.LiveAttempt, ...], datetime]:
        """All that the plan goes by, the live attempts, and the time."""
        waiting, live = queue_view.snapshot(session, now, self._earlier.get(session, now))
        total = self._nodes.total(cluster)
        queues = queues_repository.every(session)
        snapshot = replace(
            _snapshot(self._nodes, cluster, waiting, live),
            queues=queues,
            used_up=self._budgets.get(session, queues, now),
            used_s=self._used.get(session, now, live, total) if waiting and total else {},
            storage_problem=surroundings.seen(session).storage_problem,
            to_come=self._autoscaler.expected(cluster),
            min_run_s=self._settings.min_run_s,
            elastic=elastic_jobs(session) if self._settings.elastic_sizing else {},
            topology=self._settings.topology,
        )
        self.view = SchedulerView(snapshot, live, now)
        if cluster is not None and cluster.shared and self._has_just_been_left(live, now):
            leaving = tuple(
                replace(job, spare=()) for job in snapshot.running if job.is_leaving or job.recalled
            )
            snapshot = replace(snapshot, running=leaving)
        return snapshot, live, now

    def _has_just_been_left(self, live: Sequence[queue_view.LiveAttempt], now: datetime) -> bool:
        """Whether slots may be free that Ray does not show yet: nobody is asked to leave for want
        of them."""
        holding = {(a.job_id, a.attempt): count(a.slices) for a in live}
        if any(holding.get(key, 0) < number for key, number in self._held.items()):
            self._left_at = now
        self._held = holding
        return self._left_at is not None and now - self._left_at < RAY_LAGS

    def _patient(
        self, decision: policy.Decision, place: int, now: datetime, *, has_run: bool
    ) -> policy.Decision:
        """A job found impossible waits a while for the cluster to become whole again, and one that
        has run there before as long as it takes."""
        if not isinstance(decision, policy.Impossible):
            self._impossible_since.pop(decision.job_id, None)
            return decision
        if has_run:
            return policy.Wait(decision.job_id, decision.reason, place + 1)
        since = self._impossible_since.setdefault(decision.job_id, now)
        if now - since >= self._impossible_grace:
            return decision
        return policy.Wait(decision.job_id, decision.reason, place + 1)

    def _without_late_waits(
        self, decisions: list[policy.Decision], now: datetime
    ) -> list[policy.Decision]:
        """Of a long queue it is noted now and then why each job waits: each start changes the
        places of all behind it."""
        num_waits = sum(isinstance(decision, policy.Wait) for decision in decisions)
        since = None if self._noted_at is None else now - self._noted_at
        if num_waits > LONG_QUEUE and since is not None and timedelta(0) <= since < NOTE_PERIOD:
            return [d for d in decisions if not isinstance(d, policy.Wait)]
        self._noted_at = now
        return decisions

    async def _note(
        self, decisions: Sequence[policy.Decision], attempts: Mapping[str, int]
    ) -> None:
        """Store the decisions that start nothing. attempts: number of the live one of each job."""
        told = [d for d in decisions if isinstance(d, policy.Wait)]
        waits = []
        if told:
            waits = await self._database.read(lambda s, _: transitions.waits_with_news(s, told))
        stays = [d for d in decisions if isinstance(d, policy.Stay)]
        others = [
            d
            for d in decisions
            if isinstance(d, policy.Impossible | policy.Preempt | policy.Shrink)
        ]
        grace_s = self._settings.preempt_grace_s

        def work(session: Session, now: datetime) -> None:
            touch(session)  # jobs that wait as before did not change
            transitions.note_waiting(session, waits, now)
            resizing.note_stays(session, stays)
            for decision in others:
                which, reason = decision.job_id, decision.reason
                if isinstance(decision, policy.Impossible):
                    transitions.fail_impossible(session, which, reason, now)
                elif isinstance(decision, policy.Preempt):
                    because = reason.message
                    preemption.make_room(session, which, attempts[which], because, grace_s, now)
                else:
                    resizing.recall(session, decision, attempts[which], now)

        if waits or stays or others:
            await self._database.write(work)

    async def _grow(self, group: policy.Growing, grow: policy.Grow) -> None:
        """Grant the slots, if the group is still as it was; the reconciler passes the grant on."""
        size = grow.batch_size
        await self._database.write(lambda s, at: resizing.grant(s, group, grow.slices, at, size))

    async def _change_batches(
        self,
        snapshot: policy.Snapshot,
        decisions: Sequence[policy.Decision],
        live: Sequence[queue_view.LiveAttempt],
    ) -> None:
        """Give groups that keep their size another batch, where that gains clearly."""
        resized = (policy.Grow, policy.Shrink, policy.Preempt)
        changes = batch_changes(snapshot, {d.job_id for d in decisions if isinstance(d, resized)})
        attempts = {attempt.job_id: attempt.attempt for attempt in live}

        def change(session: Session, at: datetime) -> None:
            touch(session)
            for job_id, size in changes.items():
                resizing.change_batch(session, job_id, attempts[job_id], size, at)

        if changes and not self._halted.is_set():
            await self._database.write(change)

    async def _claimed(self, wanted: Sequence[Wanted], claimed: Sequence[AttemptSpec]) -> None:
        self._used.claimed((each.job_id, each.attempt) for each in claimed)
        if len(claimed) < len(wanted):
            there = {each.job_id for each in claimed}
            await self._trial_values.ask(one.job_id for one in wanted if one.job_id not in there)


def _withdraw_recalls(
    session: Session, live: Sequence[queue_view.LiveAttempt], now: datetime
) -> None:
    touch(session)
    for attempt in live:
        if attempt.is_recall_unanswered:
            resizing.withdraw(session, attempt.job_id, attempt.attempt, now)


def _wanted(job: policy.WaitingJob, start: policy.Start) -> Wanted:
    asked = job.request
    return Wanted(job.job_id, job.attempt, job.queue, start.slices, asked.bundle, asked.roles)


def _snapshot(
    seen: SeenNodes,
    cluster: ClusterSnapshot | None,
    waiting: tuple[policy.WaitingJob, ...],
    live: tuple[queue_view.LiveAttempt, ...],
) -> policy.Snapshot:
    """The queue and the cluster as plain data for the plan."""
    holders = tuple(
        policy.Holder(a.job_id, a.slices, a.bundle, a.queue, a.owner, a.roles) for a in live
    )
    if cluster is None:
        return policy.Snapshot(waiting, (), connected=False, holders=holders)
    bundles = (*(job.request.bundle for job in waiting), *(each.bundle for each in holders))
    shares_gpus = any(map(is_part_of_gpu, bundles))
    alive = {(attempt.job_id, attempt.attempt) for attempt in live}
    here = [attempt for attempt in live if attempt.cluster_session == cluster.session]
    return policy.Snapshot(
        waiting,
        seen.of(cluster, holders, alive, shares_gpus=shares_gpus),
        connected=True,
        holders=holders,
        growing=tuple(a.growing for a in here if a.growing is not None),
        running=tuple(a.running for a in here if a.running is not None),
        running_of_arrays=Counter(a.array_id for a in live if a.array_id is not None),
    )
