"""The stage that enforces the deadlines of jobs."""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy.orm import Session

from service.db.session import touch
from service.lifecycle import deadlines
from service.loops.scheduling.stages import SchedulerRound, Stage
from service.loops.shared.term import LoopContext

MOST = 200
"""Maximum number of waiting jobs that one round cancels."""


class Deadlines(Stage):
    """Cancels waiting jobs that can't end before their deadlines, and asks running jobs to leave at
    their deadlines."""

    def __init__(self, context: LoopContext) -> None:
        self._database = context.database
        self._grace_s = context.settings.preempt_grace_s

    async def before(self, seen: SchedulerRound) -> None:
        now, queue = seen.now, seen.snapshot.queue
        late = {job.job_id for job in queue if job.start_by is not None and job.start_by <= now}
        running = [attempt for attempt in seen.live if attempt.is_past_deadline]
        if not late and not running:
            return

        def work(session: Session, at: object) -> None:
            touch(session)
            deadlines.cancel_waiting(session, sorted(late)[:MOST], now)
            for one in running:
                deadlines.stop_running(session, one.job_id, one.attempt, self._grace_s, now)

        await self._database.write(work)
        kept = tuple(job for job in queue if job.job_id not in late)
        seen.snapshot = replace(seen.snapshot, queue=kept)
