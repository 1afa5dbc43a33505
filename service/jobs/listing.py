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
from dray.filters import BasicJobFilter, JobFilter, JobTable
from service.db.repositories import jobs as jobs_repository
from service.db.repositories.catalog import listing as repository
from service.db.repositories.catalog import sorting
from service.db.repositories.catalog.sort_stages import Chosen, SortPosition
from service.db.types import storable
from service.domain.cursors import decode_cursor, encode_cursor
from service.domain.errors import BadCursor, InvalidSearch
from service.domain.tracking.columns import parse_columns, parse_sort
from service.domain.tracking.search import parse_search
from service.jobs import job_values, serializers

MAX_PAGE = 500


def table_of(wanted: JobFilter | None) -> JobTable:
    """Return the filter as a list that is not sorted, unless it states how the list is sorted."""
    if isinstance(wanted, JobTable):
        return wanted
    return JobTable.model_construct(**({} if wanted is None else dict(wanted)))


def scope(wanted: JobTable) -> str:
    """Return a name that identifies this listing, so that its cursors are not valid for other
    listings."""
    order = "" if wanted.sort is None else f"by {wanted.sort}:"
    return f"jobs:{order}{digest(wanted, JobFilter)}"


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
    session: Session, wanted: JobTable, *, limit: int, after: SortPosition | None
) -> views.JobPage:
    """Return up to `limit` jobs (at most 500) behind the position `after`.

    Raises InvalidSearch if the search expression or a column can't be parsed.
    """
    limit = max(1, min(limit, MAX_PAGE))
    columns = [] if wanted.columns is None else parse_columns(wanted.columns)
    if wanted.sort is None:
        where = None if wanted.where is None else parse_search(wanted.where)
        before_id = None if after is None else after.job_id
        rows = repository.page(session, wanted, where=where, before_id=before_id, limit=limit + 1)
        positions = [SortPosition(0, None, row.id) for row in rows]
    else:
        positions = _sorted(session, wanted, wanted.sort, after, limit + 1)
        by_id = jobs_repository.several(session, [each.job_id for each in positions])
        rows = [by_id[each.job_id] for each in positions]
    shown = rows[:limit]
    items = serializers.jobs(session, shown)
    if columns:
        job_values.add(session, shown, items, columns)
    more = _cursor(wanted, positions[limit - 1]) if len(rows) > limit else None
    return views.JobPage(items=items, next_cursor=more)


def _sorted(
    session: Session, wanted: JobTable, sort: str, after: SortPosition | None, limit: int
) -> list[SortPosition]:
    by = parse_sort(sort)
    return sorting.page(session, chosen(session, wanted), by, after, limit)


def chosen(session: Session, wanted: JobFilter) -> Chosen:
    """Return the jobs that the filter selects, for a list that is not in the order of ids. Raises
    InvalidSearch if the search expression can't be parsed, or if arrays are collapsed."""
    refuse_collapsed(wanted)
    where = None if wanted.where is None else parse_search(wanted.where)
    return sorting.choose(session, wanted, where)


def refuse_collapsed(wanted: JobFilter) -> None:
    if wanted.collapse_arrays:
        raise InvalidSearch(
            "arrays can't be collapsed in sorted lists and groups of jobs",
            pointer="/collapse_arrays",
            hint="leave out collapse_arrays",
        )


def owners(session: Session, wanted: JobFilter, *, limit: int) -> dict[str, str]:
    """Return the owners of the first `limit` jobs of the list, keyed by the jobs' ids.

    Raises InvalidSearch if the search expression can't be parsed.
    """
    if not can_match(wanted):
        return {}
    where = None if wanted.where is None else parse_search(wanted.where)
    rows = repository.owners(session, wanted, where=where, limit=limit)
    return {row.id: row.owner for row in rows}


def _cursor(wanted: JobTable, last: SortPosition) -> str:
    at = last.job_id if wanted.sort is None else [last.stage, last.value, last.job_id]
    return encode_cursor(scope(wanted), at)


def position(wanted: JobTable, cursor: str | None) -> SortPosition | None:
    """Return the position in a cursor. Raises BadCursor if the cursor is not from this listing."""
    if cursor is None:
        return None
    found = decode_cursor(scope(wanted), cursor)
    match [0, None, found] if wanted.sort is None else found:
        case [int(stage), str() | float() | None as value, str(job_id)]:
            is_id = re.fullmatch(r"job-[0-9a-z]{1,60}", job_id)
            if is_id and (not isinstance(value, str) or storable(value)):
                return SortPosition(stage, value, job_id)
    raise BadCursor("the cursor does not belong to this listing")
