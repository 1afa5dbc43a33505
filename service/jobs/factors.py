"""Report the factors that decide a waiting job's position in the queue."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Session

from dray import views
from dray.views import JobState
from service.db.models import JobRow
from service.db.repositories.scheduling import planned_jobs
from service.domain.scheduling.outlook.factors import Factors
from service.domain.scheduling.rules.limits import HELD, held_message
from service.jobs import serializers
from service.outlook.answers import NO_FORECAST, Answers

MAX_NAMED = 20
"""Maximum number of jobs ahead of the job that are compared with it."""


def of_job(session: Session, answers: Answers, row: JobRow, now: datetime) -> views.JobFactors:
    """Return the factors of a job; for a job without a position, the reason why it has none."""
    nothing = views.JobFactors(job_id=row.id, state=row.state)
    if row.state is not JobState.QUEUED:
        message = "only waiting jobs have a position in the queue"
        return _without(nothing, "not_waiting", message)
    if row.held_by is not None:
        return _without(nothing, HELD, held_message(row.held_by, row.id))
    newest = answers.snapshot(session, now)
    if newest is None:
        return nothing.model_copy(update={"reason": NO_FORECAST})
    made_at, snapshot = newest
    factors = Factors(snapshot, now)
    if row.id not in factors:
        return _without(nothing, row.reason_code, row.reason_message)
    ahead = factors.ahead(row.id, MAX_NAMED)
    named = planned_jobs.named(session, [each.job_id for each in ahead])
    return views.JobFactors(
        job_id=row.id,
        state=row.state,
        made_at=made_at,
        position=factors.num_ahead(row.id) + 1,
        factors=[
            views.Factor(name=each.name, value=each.value, message=each.message)
            for each in factors.of(row.id)
        ],
        ahead=[
            views.JobAhead(
                job=serializers.other_job(named[each.job_id]),
                decided_by=each.decided_by,
                message=each.message,
            )
            for each in ahead
            if each.job_id in named  # another process might have deleted the job meanwhile
        ],
    )


def _without(nothing: views.JobFactors, code: str, message: str) -> views.JobFactors:
    return nothing.model_copy(update={"reason": views.Reason(code=code, message=message)})
