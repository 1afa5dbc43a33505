"""Stages that carry out the decisions of a round, except for starts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from service.db.session import touch
from service.domain.scheduling import policy
from service.domain.scheduling.policy.batch_changes import batch_changes
from service.domain.scheduling.rules.reservations import RESERVED
from service.lifecycle import preemption, resizing, transitions
from service.loops.scheduling.stages import SchedulerRound, Stage
from service.loops.shared.term import LoopContext

LONG_QUEUE = 200
"""If more jobs than this are waiting, their wait reasons are stored once per `NOTE_PERIOD`."""
NOTE_PERIOD = timedelta(seconds=1)


class UnansweredRecalls(Stage):
    """Withdraws recalls to which groups did not respond in time. The next round plans with the
    slots that the groups then hold."""

    def __init__(self, context: LoopContext) -> None:
        self._database = context.database

    async def before(self, seen: SchedulerRound) -> None:
        late = [attempt for attempt in seen.live if attempt.is_recall_unanswered]

        def withdraw(session: Session, now: datetime) -> None:
            touch(session)
            for attempt in late:
                resizing.withdraw(session, attempt.job_id, attempt.attempt, now)

        if late:
            await self._database.write(withdraw)
            seen.is_over = True


class ImpossibleJobs(Stage):
    """Lets impossible jobs wait for a while before they fail, because missing nodes might return. A
    job that has run before waits without a time limit."""

    def __init__(self, context: LoopContext) -> None:
        self._grace = timedelta(seconds=context.timings.impossible_grace_s)
        self._since: dict[str, datetime] = {}
        """The time at which each job was first found to be impossible."""

    async def after(self, seen: SchedulerRound) -> None:
        have_run = {job.job_id for job in seen.snapshot.queue if job.attempt > 0}
        impossible = {
            decision.job_id
            for decision in seen.decisions
            if isinstance(decision, policy.Impossible) and decision.job_id not in have_run
        }
        self._since = {job_id: self._since.get(job_id, seen.now) for job_id in impossible}
        failing = {job for job, since in self._since.items() if seen.now - since >= self._grace}
        seen.decisions = [
            policy.Wait(decision.job_id, decision.reason, position)
            if isinstance(decision, policy.Impossible) and decision.job_id not in failing
            else decision
            for position, decision in enumerate(seen.decisions, start=1)
        ]


class StoredDecisions(Stage):
    """Stores why jobs wait, and the decisions that end jobs or take slots away from jobs."""

    def __init__(self, context: LoopContext) -> None:
        self._database = context.database
        self._grace_s = context.settings.preempt_grace_s
        self._noted_at: datetime | None = None
        """The time at which the reasons of all waiting jobs were last stored."""

    async def after(self, seen: SchedulerRound) -> None:
        decisions = self._without_late_waits(seen.decisions, seen.now) if seen.planned else ()
        waiting = [d for d in decisions if isinstance(d, policy.Wait)]
        waits = []
        if waiting:
            waits = await self._database.read(lambda s, _: transitions.waits_with_news(s, waiting))
        stays = [d for d in decisions if isinstance(d, policy.Stay)]
        others = [
            d
            for d in decisions
            if isinstance(d, policy.Impossible | policy.Preempt | policy.Shrink)
        ]
        attempts, grace_s = seen.attempts, self._grace_s
        requests = {job.job_id: job.request for job in seen.snapshot.queue}

        def work(session: Session, now: datetime) -> None:
            touch(session)  # jobs with an unchanged reason have not changed
            transitions.note_waiting(session, waits, now)
            resizing.note_stays(session, stays)
            for decision in others:
                which, reason = decision.job_id, decision.reason
                if isinstance(decision, policy.Impossible):
                    if not resizing.still_requests(session, which, requests[which]):
                        continue  # its document has been changed
                    transitions.fail_impossible(session, which, reason, now)
                elif isinstance(decision, policy.Preempt) and decision.ends:
                    preemption.cancel_for(session, which, attempts[which], reason, now)
                elif isinstance(decision, policy.Preempt):
                    asked = session, which, attempts[which], reason.message, grace_s, now
                    code = RESERVED if reason.code == RESERVED else "makes_room"
                    preemption.preempt_for(*asked, code=code)
                else:
                    resizing.recall(session, decision, attempts[which], now)

        if waits or stays or others:
            await self._database.write(work)

    def _without_late_waits(
        self, decisions: Sequence[policy.Decision], now: datetime
    ) -> Sequence[policy.Decision]:
        """Omit the reasons of the jobs in a long queue if reasons were stored recently. Each start
        changes the positions of all jobs behind it."""
        num_waits = sum(isinstance(decision, policy.Wait) for decision in decisions)
        since = None if self._noted_at is None else now - self._noted_at
        if num_waits > LONG_QUEUE and since is not None and timedelta(0) <= since < NOTE_PERIOD:
            return [d for d in decisions if not isinstance(d, policy.Wait)]
        self._noted_at = now
        return decisions


class Grants(Stage):
    """Grants slots to groups that have not changed since the snapshot. The reconciler then sends
    the grants."""

    def __init__(self, context: LoopContext) -> None:
        self._database, self._halted = context.database, context.halted

    async def after(self, seen: SchedulerRound) -> None:
        growing = {a.job_id: a.growing for a in seen.live if a.growing is not None}
        for decision in seen.decisions:
            if isinstance(decision, policy.Grow) and not self._halted.is_set():
                await self._grant(growing[decision.job_id], decision)

    async def _grant(self, group: policy.Growing, grow: policy.Grow) -> None:
        size = grow.batch_size
        await self._database.write(lambda s, at: resizing.grant(s, group, grow.slices, at, size))


class BatchChanges(Stage):
    """Changes the batch size of a group that keeps its number of workers if the new size clearly
    speeds up its progress."""

    def __init__(self, context: LoopContext) -> None:
        self._database, self._halted = context.database, context.halted

    async def after(self, seen: SchedulerRound) -> None:
        resized = (policy.Grow, policy.Shrink, policy.Preempt)
        but = {d.job_id for d in seen.decisions if isinstance(d, resized)}
        changes, attempts = batch_changes(seen.snapshot, but), seen.attempts

        def change(session: Session, at: datetime) -> None:
            touch(session)
            for job_id, size in changes.items():
                resizing.change_batch(session, job_id, attempts[job_id], size, at)

        if changes and not self._halted.is_set():
            await self._database.write(change)
