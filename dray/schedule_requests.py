"""The request bodies of schedules."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, StrictBool, StringConstraints

from dray.input.times import zone_named
from dray.spec.fields import Document, QueueName, Seconds
from dray.views import MissedRuns, Overlap

SCHEDULE_ID: Final = r"schedule-[0-9a-z]{26}"
"""Pattern of the ids of schedules."""


def _no_id(name: str) -> str:
    if re.fullmatch(SCHEDULE_ID, name):
        raise ValueError("looks like the id of a schedule: choose another name")
    return name


def _known(name: str) -> str:
    zone_named(name)
    return name


CronText = Annotated[
    str,
    StringConstraints(min_length=1, max_length=256),
    AfterValidator(lambda text: " ".join(text.split())),
]
"""An expression, normalised so that one space separates its fields."""
ZoneName = Annotated[str, StringConstraints(min_length=1), AfterValidator(_known)]


class ScheduleRequest(Document):
    """Submit a job at each time of a cron expression."""

    name: Annotated[QueueName, AfterValidator(_no_id)]
    """Unique among your schedules."""
    cron: CronText
    """Minute, hour, day of the month, month and day of the week, such as `30 2 * * MON-FRI`; or a
    name such as `@daily`."""
    time_zone: ZoneName = "UTC"
    """Time zone of the expression, such as `Europe/Berlin`."""
    job: dict[str, Any]
    """The job document, as in `POST /v1/jobs`, without `after`, `begin_at` and `deadline`."""
    overlap: Overlap = Overlap.SKIP
    """The rule for a run that is due while the previous run has not ended."""
    missed: MissedRuns = MissedRuns.LAST
    """The rule for runs whose time passed while the service did not run, or while the schedule was
    paused."""
    deadline_s: Seconds | None = None
    """A run that can't be submitted within this time counts as missed. If unset, `missed: skip`
    allows 300 seconds, and the other rules any delay."""
    paused: StrictBool = False
    """Whether no runs are submitted until the schedule is resumed."""


class ScheduleChangeRequest(Document):
    """Change a schedule. Omitted fields keep their values. Jobs that were submitted don't
    change."""

    cron: CronText | None = None
    time_zone: ZoneName | None = None
    job: dict[str, Any] | None = None
    """The new job document, which replaces the document as a whole."""
    overlap: Overlap | None = None
    missed: MissedRuns | None = None
    deadline_s: Seconds | None = None
    """null removes the deadline."""
    paused: StrictBool | None = None
