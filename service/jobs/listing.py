"""The list of jobs: queries, and pages that cost the same however many jobs there are.

Jobs are listed by id, newest first. An id begins with the time at which it was made, so a page is a
walk along one index, from the cursor on, also if the query names a time, state, queue or label.
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import datetime

from sqlalchemy.orm import Session

from dray import views
from dray.filters import JobFilter
from service.db.repositories.catalog import listing as repository
from service.db.types import storable
from service.domain.cursors import decode_cursor, encode_cursor
from service.domain.errors import BadCursor
from service.domain.tracking.search import parse_search
from service.jobs import serializers

MAX_PAGE = 500


def scope(wanted: JobFilter) -> str:
    """Name of this listing: a cursor of one is no place in another."""
    parts = wanted.model_dump(include=set(JobFilter.model_fields), exclude={"state", "label"})
    parts |= {"state": sorted(set(wanted.state)), "label": sorted(set(wanted.label))}
    text = json.dumps(parts, default=datetime.isoformat, sort_keys=True)
    return f"jobs:{hashlib.sha256(text.encode()).hexdigest()}"


def can_match(wanted: JobFilter) -> bool:
    """False if the filter holds text that no row can, or two values of one label."""
    if len(dict(wanted.labels)) < len(wanted.labels):
        return False
    words = (wanted.queue, wanted.owner, wanted.project, wanted.name, wanted.name_glob, wanted.text)
    return all(storable(word) for word in (*words, *wanted.label) if word is not None)


def page(
    session: Session, wanted: JobFilter, *, limit: int, before_id: str | None
) -> views.JobPage:
    """Up to `limit` jobs (at most 500) after the one that the page before ended with.
    InvalidSearch if the expression can't be read."""
    where = None if wanted.where is None else parse_search(wanted.where)
    limit = max(1, min(limit, MAX_PAGE))
    rows = repository.page(
        session,
        wanted,
        where=where,
        before_id=before_id,
        limit=limit + 1,
    )
    shown = rows[:limit]
    more = encode_cursor(scope(wanted), shown[-1].id) if len(rows) > limit else None
    return views.JobPage(items=serializers.jobs(session, shown), next_cursor=more)


def place(wanted: JobFilter, cursor: str | None) -> str | None:
    """The id that a cursor stands for; BadCursor if this listing did not give it out."""
    if cursor is None:
        return None
    job_id = decode_cursor(scope(wanted), cursor)
    if not isinstance(job_id, str) or not re.fullmatch(r"job-[0-9a-z]{1,60}", job_id):
        raise BadCursor("the cursor is not one that this listing gave out")
    return job_id
