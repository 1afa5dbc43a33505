"""SQL for dependencies: jobs and arrays that wait for other jobs and arrays to end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any

from sqlalchemy import (
    Row,
    Select,
    and_,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal,
    select,
)
from sqlalchemy.orm import Session

from dray.spec.ordering import Condition
from dray.views import JobState
from service.db.models import JobDependencyRow, JobRow
from service.db.repositories.bulk import CHUNK, in_chunks
from service.db.repositories.submission.arrays import by_unit
from service.db.session import wait_for_others
from service.domain.scheduling.rules.dependencies import Prerequisite, is_against
from service.domain.states import STOPPED_EARLY, UNFINISHED


def insert_all(session: Session, waiter: str, after: Iterable[Prerequisite]) -> None:
    """Insert the dependencies of `waiter`."""
    rows = [
        {
            "waiter": waiter,
            "after_id": one.id,
            "on_success": one.on == "success",
            "on_failure": one.on == "failure",
            "each": one.each,
        }
        for one in after
    ]
    if rows:
        session.execute(insert(JobDependencyRow), rows)


def all_open(session: Session) -> list[tuple[str, Prerequisite]]:
    """Return all unsettled dependencies, each with its waiter."""
    return [(row.waiter, _prerequisite(row)) for row in session.connection().execute(_all_open())]


def _prerequisite(row: Row[Any]) -> Prerequisite:
    on: Condition = "success" if row.on_success else "failure" if row.on_failure else "end"
    return Prerequisite(row.after_id, on, row.each)


@cache
def _all_open() -> Select[Any]:
    c = JobDependencyRow.__table__.c
    names = ("waiter", "after_id", "on_success", "on_failure", "each")
    return select(*(c[name] for name in names)).order_by(c.waiter, c.after_id)


def waiters(session: Session, units: Collection[str]) -> set[str]:
    """Return the jobs and arrays among `units` that wait for other jobs or arrays, and not element
    by element."""
    return {
        waiter
        for some in in_chunks(sorted(units), CHUNK)
        for waiter in session.connection().execute(_waiters(), {"units": some}).scalars()
    }


@cache
def _waiters() -> Select[str]:
    c = JobDependencyRow.__table__.c
    query = select(c.waiter).where(c.waiter.in_(bindparam("units", expanding=True)), ~c.each)
    return query.distinct()


def waiting_for(
    session: Session, job_ids: Sequence[str], array_ids: Collection[str]
) -> list[tuple[str, Prerequisite]]:
    """Return all dependencies on these jobs and arrays, each with its waiter.

    The rows remain locked. If two jobs of an array end at the same time, the second transaction
    waits for the lock, and can then see that the other job has ended. A dependency that is being
    removed from a document is not returned.
    """
    query = _waiting_for().with_for_update()
    return [
        (row.waiter, _prerequisite(row))
        for some in in_chunks([*job_ids, *sorted(array_ids)], CHUNK)
        for row in session.execute(query, {"after_ids": some})
    ]


@cache
def _waiting_for() -> Select[Any]:
    return _all_open().where(
        JobDependencyRow.__table__.c.after_id.in_(bindparam("after_ids", expanding=True))
    )


def settle(session: Session, after_ids: Iterable[str]) -> None:
    """Delete all dependencies on these jobs and arrays."""
    for some in in_chunks(sorted(after_ids), CHUNK):
        session.execute(delete(JobDependencyRow).where(JobDependencyRow.after_id.in_(some)))


def withdraw(session: Session, waiters: Iterable[str]) -> None:
    """Delete all dependencies of these jobs and arrays on other jobs and arrays."""
    for some in in_chunks(sorted(waiters), CHUNK):
        session.execute(delete(JobDependencyRow).where(JobDependencyRow.waiter.in_(some)))


LOCK_OF_CHANGES = 0x61667465
"""Key of the advisory lock of transactions that change the dependencies of stored jobs. Without the
lock, two such transactions could close a circle together. A submission needs no lock, because no
other job waits for a new job."""


def lock_changes(session: Session) -> None:
    """Wait for all other transactions that change dependencies of stored jobs."""
    wait_for_others(session, LOCK_OF_CHANGES)


def chain(session: Session, first: str, last: str) -> list[str] | None:
    """Return ids of jobs and arrays from `first` to `last`, each of which waits for the next; None
    if `first` does not wait for `last`. `first` and `last` can be the same."""
    j, d = JobRow.__table__.c, JobDependencyRow.__table__.c
    reached_from: dict[str, str] = {}
    expanded: dict[tuple[str, str], int] = {}
    newest = [first]
    while newest and last not in reached_from:
        arrays = select(j.array_id, j.id).where(j.array_id.is_not(None))
        waiters = {one: one for one in newest}
        for some in in_chunks(newest, CHUNK):
            waiters.update(session.execute(arrays.where(j.id.in_(some))).all())
        waits: list[tuple[str, str]] = [
            (row.waiter, row.after_id)
            for some in in_chunks(sorted(waiters), CHUNK)
            for row in session.execute(select(d.waiter, d.after_id).where(d.waiter.in_(some)))
        ]
        waits += _earlier(session, newest, expanded)
        newest = [after for _, after in waits if after not in reached_from]
        reached_from |= {after: waiters[by] for by, after in waits if after not in reached_from}
    if last not in reached_from:
        return None
    found = [last]
    while len(found) == 1 or found[-1] != first:
        found.append(reached_from[found[-1]])
    return found[::-1]


def _earlier(
    session: Session, ids: Sequence[str], expanded: dict[tuple[str, str], int]
) -> list[tuple[str, str]]:
    """Return pairs of a singleton among these jobs and an earlier job for which the singleton
    waits.

    For each owner and name, `expanded` contains the highest number of a singleton whose earlier
    jobs have been returned. These jobs are not returned again.
    """
    c = JobRow.__table__.c
    of_singletons = select(c.owner, c.name, c.number, c.id).where(
        c.singleton, c.finished_at.is_(None)
    )
    found: list[tuple[str, str]] = []
    for some in in_chunks(ids, CHUNK):
        for owner, name, number, job_id in sorted(
            session.execute(of_singletons.where(c.id.in_(some))).all(), reverse=True
        ):
            before = expanded.get((owner, name), -1)
            if number <= before:
                continue
            expanded[owner, name] = number
            same = select(c.id).where(
                c.owner == owner,
                c.name == name,
                c.finished_at.is_(None),
                c.number >= before,
                c.number < number,
            )
            found += [(job_id, other) for other in session.scalars(same)]
    return found


def hold_unfinished(session: Session, ids: Collection[str]) -> None:
    """Prevent these jobs, and the jobs of these arrays, from ending before this transaction
    ends."""
    query = select(JobRow.id).where(JobRow.finished_at.is_(None)).order_by(JobRow.id)
    for which in by_unit(ids):
        session.execute(query.where(which).with_for_update(read=True)).all()


def states(
    session: Session, ids: Sequence[str], *, each: bool = False
) -> dict[str, dict[JobState, str]]:
    """Return the states of each of these jobs and arrays. Each state is mapped to the id of a job
    in this state.

    A sweep succeeds even if trials were stopped early because other trials were better. Therefore
    such trials count as succeeded, except with `each`, which waits for each job of the array
    individually. Jobs and arrays that do not exist or are being deleted are omitted.
    """
    c = JobRow.__table__.c
    found: dict[str, dict[JobState, str]] = {}
    stopped_early = and_(c.reason_code == STOPPED_EARLY, c.state == JobState.CANCELLED)
    of_sweep = case((stopped_early, literal(JobState.SUCCEEDED, c.state.type)), else_=c.state)
    for column, state in ((c.id, c.state), (c.array_id, c.state if each else of_sweep)):
        query = select(column.label("unit"), state.label("state"), c.id)
        rows = query.where(c.deleted_at.is_(None), column.in_(ids)).subquery().c
        grouped = select(rows.unit, rows.state, func.min(rows.id)).group_by(rows.unit, rows.state)
        for one, state, job_id in session.execute(grouped):
            found.setdefault(one, {})[state] = job_id
    return found


def unfinished_arrays(session: Session, array_ids: Collection[str]) -> set[str]:
    """Return the ids of the given arrays that have unfinished jobs."""
    c = JobRow.__table__.c
    # Search by state, because the index contains no `finished_at`: an array has up to 10,000 jobs,
    # and this query is made whenever one of them ends.
    one = select(c.id).where(c.array_id == bindparam("array_id"), c.state.in_(UNFINISHED)).limit(1)
    return {each for each in array_ids if session.scalar(one, {"array_id": each}) is not None}


def with_indices(session: Session, array_id: str, indices: Collection[int]) -> list[str]:
    """Return the ids of the jobs with these indices in an array."""
    c = JobRow.__table__.c
    return [
        job_id
        for some in in_chunks(sorted(indices), CHUNK)
        for job_id in session.scalars(
            select(c.id).where(c.array_id == array_id, c.array_index.in_(some))
        )
    ]


def is_unfinished(session: Session, array_id: str, *, index: int) -> bool:
    """Whether the job with this index in an array has not ended."""
    c = JobRow.__table__.c
    query = select(c.state).where(c.array_id == array_id, c.array_index == index)
    return session.scalar(query) in UNFINISHED


def ended_against(session: Session, array_id: str, on: Condition) -> dict[int | None, JobState]:
    """Return the states of the array's jobs whose end does not meet the condition `on`, keyed by
    their indices."""
    c = JobRow.__table__.c
    states = [state for state in JobState if state.is_terminal and is_against(state, on)]
    query = select(c.array_index, c.state).where(c.array_id == array_id, c.state.in_(states))
    return {row.array_index: row.state for row in session.execute(query)}
