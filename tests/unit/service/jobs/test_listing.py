"""Lists of jobs: filters by time, cursors within a listing, and pages that require no sorting."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.orm import Session

from dray.filters import JobFilter
from dray.views import JobState
from service.db.repositories.catalog.sort_stages import SortPosition
from service.db.session import Database
from service.domain.errors import BadCursor
from service.domain.ids import ids_since, ids_up_to, new_job_id
from service.jobs import listing
from tests.unit.service.helpers import START, Service


async def ids(service: Service, **wanted: Any) -> list[str]:
    """Return the ids from all pages, with two jobs per page."""
    found: list[str] = []
    cursor = None
    while True:
        page = await service.jobs.list(JobFilter(**wanted), limit=2, cursor=cursor)
        found += [job.id for job in page.items]
        cursor = page.next_cursor
        if cursor is None:
            return found


async def test_a_time_is_in_the_page_that_begins_with_it_and_not_in_the_one_that_ends_there(
    service: Service,
) -> None:
    made = []
    for _ in range(5):
        made.append(await service.submit())
        service.advance(0.0004)  # several jobs in one millisecond
    middle = START + timedelta(seconds=0.0008)
    newest_first = made[::-1]
    assert await ids(service, created_after=middle) == newest_first[:3]
    assert await ids(service, created_before=middle) == newest_first[3:]
    later = middle + timedelta(seconds=0.0004)
    assert await ids(service, created_after=middle, created_before=later) == [made[2]]
    assert await ids(service, created_after=later, created_before=middle) == []


@pytest.mark.parametrize(
    "time", [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)]
)
async def test_a_time_that_no_job_can_be_from_is_no_error(service: Service, time: datetime) -> None:
    job_id = await service.submit()
    assert await ids(service, created_after=time) == ([job_id] if time.year == 1 else [])
    assert await ids(service, created_before=time) == ([] if time.year == 1 else [job_id])


async def test_pages_of_several_states_are_merged_newest_first(service: Service) -> None:
    made = [await service.submit() for _ in range(7)]
    for job_id in made[::3]:
        await service.jobs.cancel(job_id)
    assert await ids(service, state=(JobState.QUEUED, JobState.CANCELLED)) == made[::-1]
    assert await ids(service, state=(JobState.CANCELLED,)) == made[::3][::-1]
    assert await ids(service, state=(JobState.CANCELLED, JobState.CANCELLED)) == made[::3][::-1]


async def test_pages_by_labels_hold_the_jobs_with_all_of_them(service: Service) -> None:
    made = [
        await service.submit(labels={"all": "yes", "odd": str(n % 2), "n": str(n)})
        for n in range(6)
    ]
    assert await ids(service, label=("all=yes",)) == made[::-1]
    assert await ids(service, label=("all=yes", "odd=1")) == made[1::2][::-1]
    assert await ids(service, label=("odd=1", "n=2")) == []


async def test_jobs_are_found_by_name_and_by_how_their_id_begins(service: Service) -> None:
    made = [await service.submit(name=name) for name in ("a", "b", "a")]
    assert await ids(service, name="a") == [made[2], made[0]]
    assert await ids(service, name="c\0") == []
    for job_id in made:
        assert await ids(service, id_prefix=job_id) == [job_id]
        assert await ids(service, id_prefix=job_id[:-1]) == [
            other for other in made[::-1] if other.startswith(job_id[:-1])
        ]
    assert await ids(service, id_prefix="job-") == made[::-1]
    assert await ids(service, id_prefix="job-z") == []


async def test_jobs_are_found_by_a_part_of_their_name(service: Service) -> None:
    made = [await service.submit(name=name) for name in ("ResNet_a", "unet", "resnet%b")]
    assert await ids(service, text="resnet") == [made[2], made[0]]
    assert await ids(service, text="T_A") == [made[0]]
    assert await ids(service, text="%") == [made[2]]
    assert await ids(service, text="\0") == []


async def test_a_cursor_is_refused_in_a_listing_with_other_filters(service: Service) -> None:
    for _ in range(3):
        await service.submit(labels={"a": "1", "b": "2"})
    first = JobFilter(
        state=(JobState.QUEUED, JobState.RUNNING), label=("a=1", "b=2"), created_after=START
    )
    cursor = (await service.jobs.list(first, limit=1)).next_cursor
    same = JobFilter(
        state=(JobState.RUNNING, JobState.QUEUED), label=("b=2", "a=1"), created_after=START
    )
    assert len((await service.jobs.list(same, limit=1, cursor=cursor)).items) == 1
    for other in (
        JobFilter(),
        JobFilter(state=(JobState.QUEUED,), label=("a=1", "b=2"), created_after=START),
        JobFilter(state=first.state, label=("a=1",), created_after=START),
        JobFilter(state=first.state, label=first.label, created_before=START),
        JobFilter(state=first.state, label=first.label, created_after=START, name="a"),
    ):
        with pytest.raises(BadCursor):
            await service.jobs.list(other, limit=1, cursor=cursor)


def test_ids_of_one_moment_rise_and_lie_between_its_bounds() -> None:
    made = [new_job_id(START) for _ in range(50)]
    assert made == sorted(set(made))
    assert all(ids_since(START) < job_id < ids_up_to(START) for job_id in made)
    assert made[-1] < new_job_id(START + timedelta(milliseconds=1))


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        (JobFilter(), "sqlite_autoindex_jobs_1"),
        (JobFilter(state=(JobState.QUEUED, JobState.FAILED)), "ix_jobs_state_id"),
        (JobFilter(queue="a"), "ix_jobs_queue_id"),
        (JobFilter(owner="a"), "ix_jobs_owner_id"),
        (JobFilter(project="a"), "ix_jobs_project_id"),
        (JobFilter(name="a"), "ix_jobs_name_id"),
        (JobFilter(reservation="a"), "ix_jobs_reservation_id"),
        (JobFilter(id_prefix="job-01k"), "sqlite_autoindex_jobs_1"),
        (JobFilter(label=("a=b",)), "ix_job_labels_key_value_job_id"),
        (JobFilter(label=("a=b", "c=d")), "ix_job_labels_key_value_job_id"),
        (JobFilter(created_after=START), "sqlite_autoindex_jobs_1"),
        (JobFilter(created_before=START, queue="a"), "ix_jobs_queue_id"),
        (JobFilter(created_before=START, label=("a=b",)), "ix_job_labels_key_value_job_id"),
    ],
)
def test_a_page_walks_one_index_and_never_sorts(
    sqlite_url: str, wanted: JobFilter, index: str
) -> None:
    """Sorting would read all matching jobs, whereas an index scan only reads the page."""
    database = Database(sqlite_url)
    statements: list[tuple[str, Any]] = []
    engine = database.engine

    @event.listens_for(engine, "before_cursor_execute")
    def _keep(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        if "ORDER BY" in statement and "FROM queues" not in statement:
            statements.append((statement, parameters))

    after = SortPosition(0, None, new_job_id(START))
    with Session(engine) as session:
        listing.page(session, listing.table_of(wanted), limit=10, after=after)
        assert len(statements) == max(1, len(wanted.state))
        for statement, parameters in statements[:]:
            raw = session.connection().exec_driver_sql(
                f"EXPLAIN QUERY PLAN {statement}", parameters
            )
            plan = [row[3] for row in raw]
            assert not [step for step in plan if "TEMP B-TREE" in step], plan
            assert index in plan[0], plan
        assert session.scalar(text("SELECT count(*) FROM jobs")) == 0
    database.close()


async def test_a_pattern_of_names_matches_as_a_shell_does(service: Service) -> None:
    names = ["lin-1", "lin-2", "lin-10", "Lin-1", "a*b", "a_b", "a%b", "a[b", "a\\b", "äöü", "x"]
    made = {name: await service.submit(name=name) for name in names}
    patterns = [
        "lin-*",
        "lin-?",
        "*",
        "?",
        "a?b",
        "a*b",
        "a[*",
        "a_*",
        "a%?",
        "a\\?",
        "???",
        "*1*",
        "",
    ]
    for pattern in patterns:
        as_regex = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
        matching = [made[name] for name in names[::-1] if re.fullmatch(as_regex, name)]
        assert await ids(service, name_glob=pattern) == matching, pattern
