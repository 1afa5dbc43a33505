"""The list of jobs: filters, and pages whose cost does not depend on the number of jobs.

Jobs are listed by id, newest first. An id begins with its creation time, so a page is read from one
index, starting at the cursor, even if the filter has a time, state, queue or label.
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import datetime

from pydantic import BaseModel
from sqlalchemy.orm import Session

from dray import views
from dray.filters import BasicJobFilter, JobFilter
from service.db.repositories.catalog import listing as repository
from service.db.types import storable
from service.domain.cursors import decode_cursor, encode_cursor
from service.domain.errors import BadCursor
from service.domain.tracking.search import parse_search
from service.jobs import serializers

MAX_PAGE = 500


def scope(wanted: JobFilter) -> str:
    """Return a name that identifies this listing, so that its cursors are not valid for other
    listings."""
    return f"jobs:{digest(wanted, JobFilter)}"


def digest(wanted: BasicJobFilter, of: type[BaseModel]) -> str:
    """Return a hash of the fields that the class `of` declares. The order of states and labels does
    not matter."""
    parts = wanted.model_dump(include=set(of.model_fields), exclude={"state", "label"})
    parts |= {"state": sorted(set(wanted.state)), "label": sorted(set(wanted.label))}
    text = json.dumps(parts, default=datetime.isoformat, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def can_match(wanted: BasicJobFilter) -> bool:
    """Return False if the filter contains a string that no row can contain, or two values for a
    label."""
    if len(dict(wanted.labels)) < len(wanted.labels):
        return False
    words = (wanted.queue, wanted.owner, wanted.project, wanted.name, wanted.name_glob, wanted.text)
    others = (wanted.schedule, wanted.reservation, *wanted.label)
    return all(storable(word) for word in (*words, *others) if word is not None)


def page(
    session: Session, wanted: JobFilter, *, limit: int, before_id: str | None
) -> views.JobPage:
    """Return up to `limit` jobs (at most 500) that were created before the job `before_id`.

    Raises InvalidSearch if the search expression can't be parsed.
    """
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


def owners(session: Session, wanted: JobFilter, *, limit: int) -> dict[str, str]:
    """Return the owners of the first `limit` jobs of the list, keyed by the jobs' ids.

    Raises InvalidSearch if the search expression can't be parsed.
    """
    if not can_match(wanted):
        return {}
    where = None if wanted.where is None else parse_search(wanted.where)
    rows = repository.owners(session, wanted, where=where, limit=limit)
    return {row.id: row.owner for row in rows}


def position(wanted: JobFilter, cursor: str | None) -> str | None:
    """Return the id in a cursor. Raises BadCursor if the cursor is not from this listing."""
    if cursor is None:
        return None
    job_id = decode_cursor(scope(wanted), cursor)
    if not isinstance(job_id, str) or not re.fullmatch(r"job-[0-9a-z]{1,60}", job_id):
        raise BadCursor("the cursor does not belong to this listing")
    return job_id
