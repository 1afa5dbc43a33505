"""An action on all jobs that a filter selects leaves the same database as the action on each job of
the list, and reports the same problems."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select, text

from dray.bulk_requests import BulkRequest
from dray.filters import JobFilter
from dray.requests import AnnotationRequest
from service.db.models import JobRow
from service.db.session import Database
from service.domain.errors import DomainError
from service.jobs.bulk import BulkChanges
from service.storage.storage import Storage
from service.tracking.service import Tracking, annotate_row
from tests.databases import migrated_sqlite
from tests.marks import FRESH_SEEDS
from tests.unit.service.helpers import Service, spec

ACTIONS: st.SearchStrategy[tuple[str, dict[str, Any]]] = st.one_of(
    st.sampled_from(["cancel", "delete", "hold", "release", "preempt"]).map(lambda a: (a, {})),
    st.sampled_from(["default", "small", "none"]).map(lambda q: ("move", {"queue": q})),
    st.integers(0, 100).map(lambda n: ("priority", {"priority": n})),
    st.sampled_from("ab").map(lambda tag: ("tag", {"add_tags": [tag]})),
    st.sampled_from("ab").map(lambda tag: ("tag", {"remove_tags": [tag]})),
)
JOBS = st.lists(
    st.tuples(
        st.sampled_from("xyz"),
        st.sampled_from(["ann", "ann", "bob"]),
        st.sampled_from(["waits", "waits", "held", "runs", "asked", "cancelled", "stopping"]),
    ),
    min_size=1,
    max_size=7,
)
FILTERS = st.fixed_dictionaries(
    {},
    optional={
        "where": st.sampled_from(
            ['name = "x"', 'name != "y"', 'state = "QUEUED"', "priority < 50", 'name in ("x", "z")']
        ),
        "state": st.lists(st.sampled_from(["QUEUED", "STARTING", "CANCELLED"]), max_size=2),
        "owner": st.sampled_from(["ann", "bob"]),
        "name": st.sampled_from("xyz"),
    },
)
"""Filters that a user could write."""


class World:
    """A service with its own database, on which the same jobs can be created again."""

    def __init__(self, folder: Path) -> None:
        (folder / "dray.db").write_bytes(migrated_sqlite())
        self._database = Database(f"sqlite:///{folder / 'dray.db'}")
        self.service = Service(self._database, Storage(folder.as_uri()), folder)
        self.ids: list[str] = []

    def close(self) -> None:
        self._database.close()

    async def fill(self, jobs: list[tuple[str, str, str]]) -> None:
        service = self.service
        await service.queue("small", max_queued=2, max_priority=60)
        for name, owner, situation in jobs:
            service.advance(1)
            job, _ = await service.jobs.submit(spec(name=name), owner=owner)
            self.ids.append(job.id)
            if situation in ("runs", "asked", "stopping"):
                assert service.claim(job.id) is not None
            if situation == "held":
                await service.change(job.id, held=True)
            if situation == "asked":
                await service.faults.preempt(job.id)
            if situation in ("cancelled", "stopping"):
                await service.jobs.cancel(job.id)

    def content(self) -> list[tuple[Any, ...]]:
        """Return what is stored about the jobs, without ids, which differ between databases."""
        columns = (
            *("state", "queue", "priority", "rank", "held_by", "reason_code", "event_seq"),
            *("attempt", "owner", "name"),
        )

        def read(session: Any) -> list[tuple[Any, ...]]:
            query = select(JobRow.id, *(getattr(JobRow, name) for name in columns))
            found = {row[0]: tuple(row[1:]) for row in session.execute(query)}
            tags = session.execute(text("select job_id, tag from job_tags order by tag")).all()
            events = session.execute(text("select job_id, code from events order by seq")).all()
            return [
                (
                    found.get(job_id),
                    [tag for of, tag in tags if of == job_id],
                    [code for of, code in events if of == job_id],
                )
                for job_id in self.ids
            ]

        return self._database.read_sync(read)


async def one_by_one(
    world: World, action: str, given: dict[str, Any], chosen: dict[str, Any]
) -> tuple[Counter[str], int]:
    """Apply the action to each job of the list of ann's jobs. Returns the problems, and the number
    of jobs of others."""
    service = world.service
    tracking = Tracking(service.database)
    problems: Counter[str] = Counter()
    listed = (await service.jobs.list(JobFilter.model_validate(chosen), limit=500)).items
    whose = chosen.get("owner", "ann")
    for job in listed:
        if job.owner != whose:
            continue
        try:
            match action:
                case "cancel":
                    await service.jobs.cancel(job.id, actor="ann")
                case "delete":
                    await service.jobs.delete(job.id, actor="ann")
                case "preempt":
                    await service.faults.preempt(job.id, actor="ann")
                case "tag":
                    wanted = AnnotationRequest.model_validate(given)
                    await tracking.annotate(job.id, wanted, actor="ann")
                case "hold" | "release":
                    await service.change(job.id, held=action == "hold")
                case _:
                    await service.change(job.id, **given)
        except DomainError as problem:
            problems[problem.code] += 1
    return problems, sum(job.owner != whose for job in listed)


async def compare(
    jobs: list[tuple[str, str, str]], action: tuple[str, dict[str, Any]], chosen: dict[str, Any]
) -> None:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        single, many = World(Path(first)), World(Path(second))
        try:
            await single.fill(jobs)
            await many.fill(jobs)
            problems, others = await one_by_one(single, *action, chosen)
            service = many.service
            bulk = BulkChanges(
                service.database,
                service.jobs,
                service.settings,
                annotate_row,
                clock=lambda: service.now,
            )
            name, parameters = action
            body = {"action": name, "filter": chosen, "parameters": parameters}
            wanted = BulkRequest.model_validate({**body, "max": len(jobs)})
            before = many.content()
            tried = await bulk.run(
                wanted.model_copy(update={"dry_run": True}), caller="ann", actor="ann"
            )
            assert many.content() == before, "a dry run changes nothing"
            done = await bulk.run(wanted, caller="ann", actor="ann")
            assert many.content() == single.content()
            assert {one.code: one.count for one in done.problems} == problems
            assert done.other_owners == others
            differing = sum(old != new for old, new in zip(before, many.content(), strict=True))
            assert done.changed == differing
            if name != "move":  # each job is tried alone, so a dry run doesn't fill a queue
                assert tried == done.model_copy(update={"dry_run": True})
        finally:
            single.close()
            many.close()


@given(jobs=JOBS, action=ACTIONS, chosen=FILTERS)
@settings(max_examples=200 if FRESH_SEEDS else 20)
def test_many_jobs_are_changed_as_each_alone(
    jobs: list[tuple[str, str, str]], action: tuple[str, dict[str, Any]], chosen: dict[str, Any]
) -> None:
    asyncio.run(compare(jobs, action, chosen))
