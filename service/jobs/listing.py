"""The list of jobs: queries, and pages that cost the same however many jobs there are.

Jobs are listed by id, newest first. An id begins with the time at which it was made, so a page is a
walk along one index, from the cursor on, also if the query names a time, state, queue or label.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sqlalchemy.orm import Session

from dray import views
from dray.views import JobState
from service.db.repositories.catalog import listing as repository
from service.db.types import storable
from service.domain.cursors import decode_cursor, encode_cursor
from service.domain.errors import BadCursor
from service.domain.tracking.search import parse_search
from service.jobs import serializers

MAX_PAGE = 500


@dataclass(frozen=True)
class JobQuery:
    """Which jobs are listed: those for which all that is given holds. Of several states, any."""

    states: tuple[JobState, ...] = ()
    queue: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    owner: str | None = None
    project: str | None = None
    name: str | None = None
    name_glob: str | None = None
    """Matches the whole name: `*` stands for any text, `?` for one character."""
    text: str | None = None
    """Is contained in the name, in whatever case of its letters."""
    id_prefix: str | None = None
    """The beginning of the id: `job-` and more."""
    array: str | None = None
    """The id of an array, or its beginning: `array-` and more."""
    array_index: int | None = None
    collapse_arrays: bool = False
    """Of each array, one job alone; with states, if any job of the array is in one of them."""
    created_after: datetime | None = None
    """At this time or later."""
    created_before: datetime | None = None
    """Earlier than this time."""
    where: str | None = None
    """A search expression: `service.domain.tracking.search`."""

    @property
    def scope(self) -> str:
        """Name of this listing: a cursor of one is no place in another."""
        times = (self.created_after, self.created_before)
        parts = [
            sorted(set(self.states)),
            self.queue,
            sorted(self.labels.items()),
            self.owner,
            self.project,
            self.name,
            self.name_glob,
            self.text,
            self.id_prefix,
            self.array,
            self.array_index,
            self.collapse_arrays,
            *(time and time.astimezone(UTC).isoformat() for time in times),
            self.where,
        ]
        return f"jobs:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"

    @property
    def can_match(self) -> bool:
        """False if it holds text that no row can."""
        words = [
            self.queue,
            self.owner,
            self.project,
            self.name,
            self.name_glob,
            self.text,
            *self.labels,
            *self.labels.values(),
        ]
        return all(storable(word) for word in words if word is not None)


def page(session: Session, wanted: JobQuery, *, limit: int, before_id: str | None) -> views.JobPage:
    """Up to `limit` jobs (at most 500) after the one that the page before ended with.
    InvalidSearch if the expression can't be read."""
    where = None if wanted.where is None else parse_search(wanted.where)
    limit = max(1, min(limit, MAX_PAGE))
    rows = repository.page(
        session,
        states=wanted.states,
        queue=wanted.queue,
        owner=wanted.owner,
        project=wanted.project,
        name=wanted.name,
        name_glob=wanted.name_glob,
        text=wanted.text,
        id_prefix=wanted.id_prefix,
        job_labels=wanted.labels,
        array=wanted.array,
        array_index=wanted.array_index,
        collapse_arrays=wanted.collapse_arrays,
        created_after=wanted.created_after,
        created_before=wanted.created_before,
        where=where,
        before_id=before_id,
        limit=limit + 1,
    )
    shown = rows[:limit]
    more = encode_cursor(wanted.scope, shown[-1].id) if len(rows) > limit else None
    return views.JobPage(items=serializers.jobs(session, shown), next_cursor=more)


def place(wanted: JobQuery, cursor: str | None) -> str | None:
    """The id that a cursor stands for; BadCursor if this listing did not give it out."""
    if cursor is None:
        return None
    job_id = decode_cursor(wanted.scope, cursor)
    if not isinstance(job_id, str) or not re.fullmatch(r"job-[0-9a-z]{1,60}", job_id):
        raise BadCursor("the cursor is not one that this listing gave out")
    return job_id
