"""Determine which changes would make a job start sooner, and when a job would start if it were
submitted now.

Any process can use this module, which reads the situation from which the latest forecast was made.
The process that runs the loops stores this situation every few seconds
(`service.loops.scheduling.forecaster`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.orm import Session

from dray import views
from dray.views import JobState
from service.db.models import JobRow
from service.db.repositories.scheduling import forecasts as repository
from service.db.repositories.scheduling import planned_jobs
from service.db.repositories.scheduling import queues as queues_repository
from service.db.repositories.submission import dependencies
from service.domain.errors import DomainError
from service.domain.scheduling import policy
from service.domain.scheduling.outlook.counterfactuals import (
    Choices,
    Counterfactual,
    JobQuestions,
    OtherQueue,
    sooner,
)
from service.domain.scheduling.outlook.situation import Situation
from service.domain.scheduling.rules.dependencies import Dependency, Prerequisite
from service.domain.scheduling.rules.obstacles import PREPARING, Reason
from service.domain.scheduling.rules.reservations import RESERVED
from service.domain.scheduling.rules.tree import QueueTree
from service.lifecycle import singletons
from service.lifecycle.resizing import request_of
from service.outlook import codec, forecasts
from service.outlook.resubmitting import Resubmission
from service.outlook.step_times import EarlierRuns, RunTimes
from service.outlook.waiting_jobs import limit_left_s, time_left_s, waiting_job, waiting_jobs
from service.queues import admission, reservations

CURRENT_FOR = timedelta(minutes=2)
"""Maximum age of a situation on which answers are based. An older situation means that no process
is running the loops."""
FOR_SLOTS = frozenset(
    {
        *("waiting_for_slots", "behind_in_queue", "room_is_made", "unsatisfiable"),
        *("queue_limit", "user_limit", "lending_limit", RESERVED),
    }
)
"""Reasons why jobs wait although they might start immediately in another queue, with fewer
resources, or with a higher priority."""
MAX_KEPT = 4096


@dataclass(frozen=True)
class _Newest:
    """The latest situation, decoded once."""

    made_at: datetime
    situation: Situation | None
    """None if the situation was written by another release, whose process is still running the
    loops."""
    answers: dict[tuple[Any, ...], list[Counterfactual]] = field(default_factory=dict)
    """Cached answers, keyed by the job and all of its fields that can change."""


class Answers:
    """Answers questions based on the latest situation."""

    def __init__(self) -> None:
        self._earlier = EarlierRuns()
        self._newest: _Newest | None = None

    def counterfactuals(
        self, session: Session, row: JobRow, start: views.Forecast | None, now: datetime
    ) -> list[views.Counterfactual]:
        """Return the changes that would make a job start sooner than its forecast `start`. The list
        is empty if the job is not waiting for slots, or if there is no current forecast."""
        newest = self._current(session, now)
        if newest is None or newest.situation is None or row.reason_code not in FOR_SLOTS:
            return []
        key = (row.id, row.attempt, row.priority, row.queue, row.rank, row.event_seq)
        answers = newest.answers.get(key)  # another thread might clear the answers
        if answers is None:
            job = self._waiting(session, newest.situation, row, now)
            questions = JobQuestions(newest.situation, job, newest.made_at)
            why = Reason(row.reason_code, row.reason_message)
            answers = questions.answers(
                _choices(session, row, self._earlier.get(session, now), now), why
            )
            if len(newest.answers) >= MAX_KEPT:
                newest.answers.clear()
            newest.answers[key] = answers
        return _views(answers, None if start is None else start.at, newest.made_at, now)

    def favoured(self, session: Session, row: JobRow, now: datetime) -> list[views.Reason]:
        """Return the rules by which other jobs take precedence over this job, if it is waiting for
        slots."""
        newest = self._current(session, now)
        if newest is None or newest.situation is None or row.reason_code not in FOR_SLOTS:
            return []
        return _favoured(newest.situation, row)

    def of_unsubmitted(
        self, session: Session, row: JobRow, after: Sequence[Prerequisite], now: datetime
    ) -> views.Explanation:
        """Return the explanation for the job of `row` as if the job were submitted now. `after`
        contains the jobs and arrays for which the job would wait."""
        newest = self._current(session, now)
        queue_length = planned_jobs.count_queued(session) + 1
        if newest is None or newest.situation is None:
            return views.Explanation(state=row.state, reason=NO_FORECAST, queue_length=queue_length)
        waits_for = tuple(
            Dependency(one.id, one.on, "has not ended")
            for one in after
            if not one.each or dependencies.is_unfinished(session, one.id, index=0)
        )
        if row.singleton:
            waits_for += singletons.of_new_job(session, row.owner, row.name)
        job = waiting_job(row, waits_for, self._earlier.get(session, now), now)
        questions = JobQuestions(newest.situation, job, now)
        decision = questions.decision
        waits = decision if isinstance(decision, policy.Wait) else None
        start = forecasts.view(questions.expected(), now)
        found: list[Counterfactual] = []
        if isinstance(decision, policy.Wait | policy.Impossible) and not waits_for:
            choices = _choices(session, row, self._earlier.get(session, now), now)
            found = questions.answers(choices, decision.reason)
        return views.Explanation(
            state=row.state,
            reason=_reason(decision),
            position=waits and waits.position,
            queue_length=queue_length,
            blocked_by=list(waits.blocked_by) if waits else [],
            favoured=_favoured(newest.situation, row),
            expected_start_at=start.at,
            start=start,
            counterfactuals=_views(found, start.at, now, now),
            forecast_error=errors(session).starts,
        )

    def situation(self, session: Session, now: datetime) -> tuple[datetime, Situation] | None:
        """Return the latest situation and its time; None if there is no current forecast that this
        process can read."""
        newest = self._current(session, now)
        if newest is None or newest.situation is None:
            return None
        return newest.made_at, newest.situation

    def snapshot(self, session: Session, now: datetime) -> tuple[datetime, policy.Snapshot] | None:
        """Return the latest snapshot and its time, with the current queues and waiting jobs; None
        if there is no current forecast that this process can read."""
        newest = self.situation(session, now)
        if newest is None:
            return None
        made_at, situation = newest
        runs = self._earlier.get(session, now)
        preparing = planned_jobs.waiting_for(session, PREPARING)
        queue = tuple(
            replace(job, preparing=preparing[job.job_id]) if job.job_id in preparing else job
            for job in waiting_jobs(session, planned_jobs.unfinished(session), runs, now)
        )
        waiting = {job.job_id for job in queue}
        there = tuple(job for job in situation.snapshot.running if job.job_id not in waiting)
        queues = queues_repository.every(session)
        return made_at, replace(situation.snapshot, queue=queue, running=there, queues=queues)

    def _current(self, session: Session, now: datetime) -> _Newest | None:
        made_at = repository.outlook_made_at(session)
        if made_at is None or now - made_at > CURRENT_FOR:
            return None
        newest = self._newest
        if newest is None or newest.made_at != made_at:
            found = repository.outlook(session)
            assert found is not None, "the row is never deleted"
            self._newest = newest = _Newest(found.made_at, _decoded(found.situation))
        return newest

    def _waiting(
        self, session: Session, situation: Situation, row: JobRow, now: datetime
    ) -> policy.WaitingJob:
        """Return the job as in the scheduler's snapshot, with its current document, priority, queue
        and rank."""
        seen = next((job for job in situation.snapshot.queue if job.job_id == row.id), None)
        if seen is None:  # the job waits for slots, so it has no unfinished dependencies
            return waiting_job(row, (), self._earlier.get(session, now), now)
        return replace(
            seen,
            priority=row.priority,
            queue=row.queue,
            place=row.rank,
            request=request_of(row),
            ends_within_s=limit_left_s(row, row.runtime_used_s, now),
            reservation=row.reservation,
        )


WOULD_START = views.Reason(code="would_start", message="would start now")
NO_FORECAST = views.Reason(
    code="no_forecast",
    message="this process has no readable forecast from the last 2 minutes",
)


def _decoded(data: bytes) -> Situation | None:
    try:
        return codec.decode(data)
    except codec.Unreadable:
        return None


def _reason(decision: policy.Decision) -> views.Reason:
    if isinstance(decision, policy.Start | policy.Grow):
        return WOULD_START
    return views.Reason(code=decision.reason.code, message=decision.reason.message)


def errors(session: Session) -> views.ForecastErrors:
    """Return the errors of past forecasts, as computed when forecasts were last made."""
    found = repository.errors(session)
    if not found:
        nothing = views.ForecastError(count=0)
        return views.ForecastErrors(starts=nothing, ends=nothing)
    return views.ForecastErrors.model_validate(found)


def error_of(session: Session, state: JobState) -> views.ForecastError | None:
    """Return the forecast error for the next event (start or end) of a job in this state."""
    if state.is_terminal:
        return None
    found = errors(session)
    return found.starts if state is JobState.QUEUED else found.ends


def _favoured(situation: Situation, row: JobRow) -> list[views.Reason]:
    found = situation.favoured(row.queue, row.owner)
    return [views.Reason(code=each.code, message=each.message) for each in found]


def _choices(session: Session, row: JobRow, earlier: RunTimes, now: datetime) -> Choices:
    tree = QueueTree(queues_repository.every(session))
    return Choices(
        resubmit=Resubmission(row, earlier),
        queues=tuple(that_accept(session, tree, row, now)),
        max_priority=tree.combined(row.queue).max_priority,
    )


def that_accept(
    session: Session, tree: QueueTree, row: JobRow, now: datetime
) -> Iterator[OtherQueue]:
    """Yield the queues to which the job could be moved."""
    own_s = None if row.is_runtime_of_queue else row.max_runtime_s
    is_submitted = row.number is not None
    coming = {row.queue if is_submitted else None: 1}
    for name in tree.queues:
        if name == row.queue or tree.children.get(name):
            continue
        queue = tree.combined(name)
        try:
            admission.refuse_if_full(session, tree.upwards(name), row.owner, coming)
            reservations.refuse_leaving(session, row, name, now)
            limit_s = admission.limit_in(queue, own_s, row.runtime_used_s)
        except DomainError:
            continue
        yield OtherQueue(queue, time_left_s(limit_s, row, row.runtime_used_s, now))


def _view(each: Counterfactual, made_at: datetime, now: datetime) -> views.Counterfactual | None:
    """Return the view; None if the start is in the past. If the change makes the job start at
    `made_at`, the view shows that the job would start now."""
    at = now if each.at == made_at else each.at
    if at is not None and at < now:
        return None
    return views.Counterfactual(
        message=each.message,
        at=at,
        num_workers=each.num_workers,
        queue=each.queue,
        priority=each.priority,
    )


def _views(
    found: Iterable[Counterfactual], start_at: datetime | None, made_at: datetime, now: datetime
) -> list[views.Counterfactual]:
    """Return the views of the changes that would make the job start sooner than expected."""
    shown = (_view(each, made_at, now) for each in sooner(found, start_at))
    return [each for each in shown if each is not None]
