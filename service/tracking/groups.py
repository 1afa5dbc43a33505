"""Groups of jobs, such as the trials of each sweep, with the best value of each group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy.orm import Session

from dray import views
from dray.filters import JobGroups
from service.db.repositories.catalog import grouping as repository
from service.db.session import Database
from service.domain.cursors import decode_cursor, encode_cursor
from service.domain.errors import BadCursor, InvalidSearch
from service.domain.tracking.columns import Sort, parse_sort
from service.domain.tracking.search_tree import EXPERIMENT, JobColumn, LabelField
from service.jobs import listing
from service.telemetry.chunk_columns import by_name

MAX_JOBS = 200_000
LABEL = "label:"

Order = tuple[bool, float, bool, str]
"""Groups without a value are last, and among equal groups, the jobs without a group are last."""


@dataclass
class GroupOfJobs:
    key: str | None
    num_jobs: int = 0
    values: list[tuple[float, str]] = field(default_factory=list)
    """The values with the ids of their jobs."""
    as_of: datetime | None = None
    """The earliest time up to which a value of a running job covers its points."""

    def best(self, sort: Sort | None) -> tuple[float, str] | None:
        """Return the first value in this order, and its job; the newest job if values are equal in
        descending order, otherwise the oldest."""
        if sort is None or not self.values:
            return None
        return max(self.values) if sort.descending else min(self.values)

    def order(self, sort: Sort | None) -> Order:
        best = self.best(sort)
        if best is None or sort is None:
            return (True, 0.0, self.key is None, self.key or "")
        value = -best[0] if sort.descending else best[0]
        return (False, value, self.key is None, self.key or "")


class JobGrouping:
    """Use cases for groups of jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def groups(
        self, wanted: JobGroups, *, limit: int, cursor: str | None
    ) -> views.JobGroupPage:
        """Return groups in the order of their best values.

        Raises InvalidSearch if an expression can't be parsed, if the value is not a number, or if
        more than `MAX_JOBS` jobs match. Raises BadCursor for a cursor from another list.
        """
        scope = f"groups:{listing.digest(wanted, JobGroups)}"
        after = None if cursor is None else _position(decode_cursor(scope, cursor))
        sort = None if wanted.sort is None else numeric(wanted.sort)
        if not listing.can_match(wanted):
            return views.JobGroupPage(items=[], next_cursor=None)

        def work(session: Session) -> views.JobGroupPage:
            groups = _groups(session, wanted, sort)
            ordered = sorted(groups, key=lambda group: group.order(sort))
            left = [one for one in ordered if after is None or one.order(sort) > after]
            shown = left[:limit]
            names = {}
            if wanted.by == "sweep":
                array_ids = [one.key for one in shown if one.key is not None]
                names = repository.names_of_arrays(session, array_ids)
            more = encode_cursor(scope, shown[-1].order(sort)) if len(left) > limit else None
            items = [_view(one, sort, names) for one in shown]
            return views.JobGroupPage(items=items, next_cursor=more)

        return await self._database.read(work)


def _groups(session: Session, wanted: JobGroups, sort: Sort | None) -> Sequence[GroupOfJobs]:
    chosen = listing.chosen(session, wanted)
    rows = repository.keys(session, chosen, _grouped_by(wanted.by), MAX_JOBS + 1)
    if len(rows) > MAX_JOBS:
        raise InvalidSearch(
            f"more than {MAX_JOBS:,} jobs match",
            hint="narrow the list down with a time, a label or an owner",
        )
    numbers, times = {}, {}
    if sort is not None:
        times = repository.times_of_live_jobs(session, sort.field)
        numbers = repository.numbers(session, sort.field, [job_id for job_id, _ in rows])
    found: dict[str | None, GroupOfJobs] = {}
    for job_id, key in rows:
        group = found.setdefault(key, GroupOfJobs(key))
        group.num_jobs += 1
        if job_id in numbers:
            group.values.append((float(numbers[job_id]), job_id))
        if job_id in times:
            group.as_of = min(group.as_of or times[job_id], times[job_id])
    return list(found.values())


def _grouped_by(by: str) -> repository.GroupedBy:
    if by == "sweep":
        return None
    if by == "user":
        return JobColumn("owner")
    return LabelField(EXPERIMENT if by == EXPERIMENT else by.removeprefix(LABEL))


def numeric(text: str) -> Sort:
    """Parse the column by which groups are compared. Raises InvalidSearch if it is not a number."""
    sort = parse_sort(text)
    if isinstance(sort.field, JobColumn | LabelField):
        raise InvalidSearch(
            f"{text!r} is not a number, and groups are compared by numbers",
            pointer="/sort",
            hint="use a metric, a parameter, cost or duration",
        )
    return sort


def _position(found: object) -> Order:
    match found:
        case [bool(is_empty), int() | float() as value, bool(is_rest), str(key)]:
            return (is_empty, value, is_rest, key)
    raise BadCursor("the cursor does not belong to this listing")


def _view(group: GroupOfJobs, sort: Sort | None, names: Mapping[str, str]) -> views.JobGroup:
    best = group.best(sort)
    found = views.JobGroup(
        key=group.key,
        name=None if group.key is None else names.get(group.key),
        num_jobs=group.num_jobs,
        num_values=len(group.values),
        as_of=group.as_of,
    )
    if best is None:
        return found
    values = [value for value, _ in group.values]
    found.best, found.best_job = by_name(best[0]), best[1]
    found.min, found.max = by_name(min(values)), by_name(max(values))
    mean, std = _moments(values)
    found.mean = by_name(mean)
    found.std = None if std is None else by_name(std)
    return found


def _moments(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the sample standard deviation; None for the deviation of a single value.
    Both are NaN if they are not defined because of infinities."""
    if not all(map(math.isfinite, values)):
        mean = sum(values) / len(values)
        return mean, None if len(values) == 1 else math.nan
    largest = max(map(abs, values)) or 1.0
    scaled = [value / largest for value in values]  # squares of large values would overflow
    mean = math.fsum(scaled) / len(values)
    if len(values) == 1:
        return values[0], None
    variance = math.fsum((value - mean) ** 2 for value in scaled) / (len(values) - 1)
    return mean * largest, math.sqrt(variance) * largest
