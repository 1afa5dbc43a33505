"""Views of schedules, which submit a job at the times of a cron expression."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from dray.views.base import View
from dray.views.jobs import JobState


class Overlap(StrEnum):
    """The rule for a run that is due while the previous run has not ended."""

    SKIP = "skip"
    """The run is not submitted."""
    QUEUE = "queue"
    """The run is submitted, and starts once the previous run has ended."""
    REPLACE = "replace"
    """The previous run is cancelled, and the run starts once the previous run has ended."""


class MissedRuns(StrEnum):
    """The rule for runs whose time passed while the service did not run, or while the schedule was
    paused."""

    SKIP = "skip"
    """They are not submitted."""
    LAST = "last"
    """The last of them is submitted."""
    ALL = "all"
    """The last 100 of them are submitted."""


class RunOutcome(StrEnum):
    """The outcome of a run of a schedule."""

    SUBMITTED = "submitted"
    SKIPPED = "skipped"
    """The previous run had not ended."""
    REFUSED = "refused"
    """The job was refused as `dray submit` would have refused it."""
    MISSED = "missed"
    """The time passed without a run, because of `missed` or `deadline_s`."""


class RunProblem(View):
    """The reason why a run was refused, in the same form as in the response to a submission."""

    code: str
    detail: str
    pointer: str | None = None
    """JSON pointer to the field of the job document."""
    hint: str | None = None


class ScheduleRun(View):
    """A run of a schedule: a time for which a job was submitted, or the reason why no job was
    submitted."""

    at: datetime
    """The time of the run according to the schedule, with the schedule's offset from UTC. For a run
    that a user requested, the time of the request."""
    outcome: RunOutcome
    message: str | None = None
    """Why no job was submitted."""
    problem: RunProblem | None = None
    """Set if the run was refused."""
    job_id: str | None = None
    """The submitted job; for an array or a sweep, the job with index 0."""
    array_id: str | None = None
    job_state: JobState | None = None
    """The current state of the job; unset for arrays, and if the job was deleted."""
    decided_at: datetime
    """When the job was submitted, or when it was decided that none is."""


class ScheduleRunPage(View):
    """Runs, the latest first."""

    items: list[ScheduleRun]


class JobSchedule(View):
    """Submits a job at each time of a cron expression."""

    id: str
    name: str
    owner: str
    cron: str
    time_zone: str
    overlap: Overlap
    missed: MissedRuns
    deadline_s: int | None = None
    """A run that can't be submitted within this number of seconds of its time counts as missed. If
    unset, `missed: skip` allows 300 seconds, and the other rules any delay."""
    job: dict[str, Any]
    """The job document, without the URLs of silos' data."""
    paused: bool
    paused_reason: str | None = None
    """Why the service paused the schedule; unset if a user did."""
    next_times: list[datetime]
    """The next three times, with the schedule's offset from UTC; in lists, only the first. Empty
    while it is paused."""
    last_run: ScheduleRun | None = None
    """The run that was decided last."""
    created_at: datetime
    changed_at: datetime


class SchedulePage(View):
    """Schedules, sorted by creation time."""

    items: list[JobSchedule]
    next_cursor: str | None = None
