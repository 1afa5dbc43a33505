"""An action on all jobs that a filter selects does to each what the action on a single job does."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event

from dray import views
from dray.bulk_requests import BulkRequest
from dray.filters import JobFilter
from dray.views import JobState
from service.domain.errors import InvalidSearch, NotConfirmed, StorageUnavailable
from service.jobs.bulk import BulkChanges
from service.tracking.service import annotate_row
from tests.unit.service.helpers import Service, events_of, spec


async def bulk(
    service: Service, action: str, *, caller: str = "ann", is_admin: bool = False, **fields: Any
) -> views.BulkChange:
    changes = BulkChanges(
        service.database,
        service.jobs,
        service.settings,
        annotate_row,
        clock=lambda: service.now,
    )
    wanted = BulkRequest.model_validate({"action": action, **fields})
    return await changes.run(wanted, caller=caller, actor=caller, is_admin=is_admin)


def counts(done: views.BulkChange) -> tuple[int, int, dict[str, int]]:
    return done.changed, done.unchanged, {one.code: one.count for one in done.problems}


async def test_matching_jobs_are_changed_and_the_others_are_counted(service: Service) -> None:
    waiting = [await service.submit(name="a") for _ in range(3)]
    await service.submit(name="b")
    running = await service.running(name="a")
    await service.change(waiting[0], held=True)
    of_bob, _ = await service.jobs.submit(spec(name="a"), owner="bob")
    tried = await bulk(service, "hold", filter={"where": 'name = "a"'}, dry_run=True)
    assert (await service.jobs.get(waiting[1])).held_by is None
    done = await bulk(service, "hold", filter={"where": 'name = "a"'})
    assert tried == done.model_copy(update={"dry_run": True})
    assert counts(done) == (2, 1, {"job_not_waiting": 1})
    assert (done.matched, done.other_owners, done.refused) == (5, 1, 1)
    assert done.jobs == waiting[:0:-1]
    assert done.problems[0].jobs == [running]
    assert done.problems[0].message.startswith(f"the job {running} is RUNNING: only a waiting")
    assert (await service.jobs.get(of_bob.id)).held_by is None
    held = {"owner": "bob", "where": 'name = "a"'}
    assert counts(await bulk(service, "hold", filter=held)) == (1, 0, {})


@pytest.mark.parametrize("error", [StorageUnavailable("broken"), OSError(5, "broken")])
async def test_a_deletion_goes_on_after_an_error_of_the_storage(
    service: Service, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    jobs = [await service.submit(name="a") for _ in range(25)]
    for job_id in jobs:
        await service.jobs.cancel(job_id)
    delete_tree = service.storage.delete_tree

    def delete(key: str) -> None:
        if key in (f"jobs/{jobs[3]}", f"jobs/{jobs[20]}"):
            raise error
        delete_tree(key)

    monkeypatch.setattr(service.storage, "delete_tree", delete)
    done = await bulk(service, "delete", filter={"name": "a"}, max=25)
    assert counts(done) == (23, 0, {"storage_unavailable": 2})
    assert sorted(done.problems[0].jobs) == sorted([jobs[3], jobs[20]])
    assert "broken" in done.problems[0].message


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("action", "parameters"),
    [
        ("hold", {}),
        ("cancel", {}),
        ("priority", {"priority": 30}),
        ("move", {"queue": "night"}),
        ("delete", {}),
    ],
)
async def test_many_jobs_take_few_statements(
    service: Service, action: str, parameters: dict[str, Any], dry_run: bool
) -> None:
    await service.queue("night")
    await service.submit()
    first = await service.submit(name="a", array={"size": 120})
    if action == "delete":
        await service.jobs.arrays.cancel((await service.jobs.get(first)).array_id or "")
    statements: list[str] = []

    def count(*args: Any) -> None:
        statements.append(args[2])

    before = await service.jobs.get(first)
    event.listen(service.database.engine, "before_cursor_execute", count)
    chosen = {"action": action, "parameters": parameters, "filter": {"name": "a"}}
    done = await bulk(service, **chosen, dry_run=dry_run)
    event.remove(service.database.engine, "before_cursor_execute", count)
    assert counts(done) == (120, 0, {})
    assert len(statements) < 60
    if dry_run:
        assert await service.jobs.get(first) == before


async def test_jobs_that_wait_for_each_other_are_cancelled_together(service: Service) -> None:
    await service.submit()
    first = await service.submit(name="a")
    others = [
        await service.submit(name=name, after=[{"job": first, "on": on}])
        for name in "ab"
        for on in ("success", "failure", "end")
    ]
    done = await bulk(service, "cancel", filter={"name": "a"})
    assert counts(done) == (4, 0, {})
    jobs = [await service.jobs.get(job_id) for job_id in (first, *others)]
    assert [job.reason.code for job in jobs[:4]] == ["cancelled_by_user"] * 4
    assert jobs[4].reason.code == "dependency_never_satisfied"
    assert [job.state for job in jobs[5:]] == [JobState.QUEUED] * 2


async def test_a_job_that_starts_before_its_turn_is_not_cancelled(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, starts = await service.submit(name="a"), await service.submit(name="a")
    await service.submit(name="b")
    read = service.database.read

    async def read_then_claim(work: Any) -> Any:
        found = await read(work)
        monkeypatch.undo()
        assert service.claim(starts) is not None
        return found

    monkeypatch.setattr(service.database, "read", read_then_claim)
    done = await bulk(service, "cancel", filter={"where": 'name = "a"', "state": ["QUEUED"]})
    assert counts(done) == (1, 1, {})
    assert (await service.jobs.get(waits)).state is JobState.CANCELLED
    assert (await service.jobs.get(starts)).state is JobState.STARTING


async def test_a_filter_that_matches_all_jobs_must_be_confirmed(service: Service) -> None:
    jobs = [await service.submit() for _ in range(3)]
    await service.jobs.submit(spec(), owner="bob")
    for chosen in ({}, {"where": "priority >= 0"}, {"state": ["QUEUED"]}):
        with pytest.raises(NotConfirmed, match=r"matches all jobs, so the .* 3,") as refused:
            await bulk(service, "cancel", filter=chosen)
        assert refused.value.hint is not None
        assert refused.value.hint.endswith("with max: 3")
    with pytest.raises(NotConfirmed, match="3 jobs match, but at most 2 were expected"):
        await bulk(service, "cancel", max=2)
    with pytest.raises(InvalidSearch):
        await bulk(service, "cancel", filter={"where": ""})
    assert counts(await bulk(service, "cancel", dry_run=True)) == (3, 0, {})
    assert {(await service.jobs.get(job)).state for job in jobs} == {JobState.QUEUED}
    assert counts(await bulk(service, "cancel", max=3)) == (3, 0, {})
    assert counts(await bulk(service, "cancel", max=3)) == (0, 3, {})


async def test_jobs_are_deleted_with_what_refuses_it_named(service: Service) -> None:
    ended = [await service.submit(name="old") for _ in range(2)]
    live = await service.submit(name="old")
    for job_id in ended:
        await service.jobs.cancel(job_id)
    await service.submit()
    chosen = {"name": "old"}
    tried = await bulk(service, "delete", filter=chosen, dry_run=True)
    assert (await service.jobs.get(ended[0])).id
    done = await bulk(service, "delete", filter=chosen)
    assert tried == done.model_copy(update={"dry_run": True})
    assert counts(done) == (2, 0, {"job_live": 1})
    assert [job.id for job in (await service.jobs.list(JobFilter(name="old"))).items] == [live]


async def test_jobs_are_moved_preempted_and_tagged(service: Service) -> None:
    first = await service.submit()
    jobs = [await service.submit(name="x") for _ in range(3)]
    await service.queue("small", max_queued=2)
    chosen = {"name": "x"}
    done = await bulk(service, "move", filter=chosen, parameters={"queue": "small"})
    assert counts(done) == (2, 0, {"queue_full": 1})
    first_of = await bulk(
        service,
        "move",
        filter=chosen,
        parameters={"queue": "default", "first": True},
        is_admin=True,
    )
    assert counts(first_of) == (3, 0, {})
    rank = {job: len(await events_of(service, job, "queue")) for job in (*jobs, first)}
    assert rank[first] == 0
    tags = {"add_tags": ["t"]}
    assert counts(await bulk(service, "tag", filter=chosen, parameters=tags)) == (3, 0, {})
    assert counts(await bulk(service, "tag", filter=chosen, parameters=tags)) == (0, 3, {})
    assert counts(await bulk(service, "preempt", filter=chosen)) == (0, 0, {"job_not_running": 3})


async def test_a_stop_of_the_server_leaves_the_other_jobs(service: Service) -> None:
    jobs = [await service.submit(name="x") for _ in range(2)]
    await service.submit()
    changes = BulkChanges(service.database, service.jobs, service.settings, annotate_row)
    wanted = BulkRequest.model_validate({"action": "cancel", "filter": {"name": "x"}})
    done = await changes.run(wanted, caller="ann", is_stopping=lambda: True)
    assert counts(done) == (0, 0, {"unavailable": 2})
    assert (await service.jobs.get(jobs[0])).state is JobState.QUEUED


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"action": "priority"}, "needs priority"),
        ({"action": "move"}, "needs queue or first"),
        ({"action": "hold", "parameters": {"priority": 3}}, "does not belong to the action hold"),
        ({"action": "cancel", "filter": {"collapse_arrays": True}}, "only one job of each array"),
        ({"action": "stop"}, "cancel"),
    ],
)
def test_an_invalid_request_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BulkRequest.model_validate(fields)
