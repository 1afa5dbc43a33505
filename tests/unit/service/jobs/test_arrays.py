"""Arrays: many jobs from one document, with both databases."""

from __future__ import annotations

from typing import Any

import pytest

from dray import views
from dray.filters import JobFilter
from dray.spec import JobSpec
from dray.views import JobState
from service.db.repositories import jobs as repository
from service.domain.errors import (
    ArrayNotFound,
    ArrayTooLarge,
    CheckpointInUse,
    JobLive,
    NotFound,
    StorageUnavailable,
)
from service.jobs.idempotency import IdempotencyKey
from tests.marks import ONE_SET, SOAK
from tests.unit.service.helpers import Service, events_of, spec
from tests.unit.service.jobs.test_dependencies import array_of

NONE = "array-none"


async def members(service: Service, array_id: str) -> list[views.Job]:
    """Return the jobs of the array by index."""
    found = (await service.jobs.list(JobFilter(array=array_id), limit=500)).items
    return sorted(found, key=lambda job: job.array_index or 0)


async def test_one_submit_makes_many_jobs_that_differ_by_their_index(service: Service) -> None:
    document = spec(array={"size": 5, "max_running": 2}, labels={"a": "b"}, name="sweep")
    first, created = await service.jobs.submit(document, owner="ann", project="p")
    assert created
    assert first.array_id is not None
    assert first.array_index == 0
    jobs = await members(service, first.array_id)
    assert [job.array_index for job in jobs] == [0, 1, 2, 3, 4]
    assert jobs[0] == first
    assert [job.id for job in jobs] == sorted({job.id for job in jobs})
    for index, job in enumerate(jobs):
        own = {"id", "array_index", "links", "spec", "variant"}
        assert job.model_dump(exclude=own) == first.model_dump(exclude=own)
        assert job.variant == f"#{index}"
        assert job.spec["train"].pop("seed") == index
        assert [e.code for e in await events_of(service, job.id)] == ["submitted"]
    assert len({str(job.spec) for job in jobs}) == 1


async def test_jobs_of_a_script_have_the_very_same_document(service: Service) -> None:
    script = {"script": {"entrypoint": "a.py"}, "array": {"size": 3}, "train": {"seed": 7}}
    first, _ = await service.jobs.submit(JobSpec.model_validate(script))
    jobs = await members(service, first.array_id or "")
    assert [job.spec for job in jobs] == [first.spec] * 3


async def test_the_seed_of_a_recipe_stays_a_seed(service: Service) -> None:
    array_id, _ = await array_of(service, 2, train={"seed": 2**63 - 1})
    seeds = [job.spec["train"]["seed"] for job in await members(service, array_id)]
    assert seeds == [2**63 - 1, 0]


async def test_a_claim_knows_the_index(service: Service) -> None:
    _, jobs = await array_of(service, 3)
    claimed = service.claim(jobs[2])
    assert claimed is not None
    assert claimed.array_index == 2


async def test_the_same_key_and_request_make_one_array(service: Service) -> None:
    key = IdempotencyKey("k1", "hash-1")
    document = spec(array={"size": 3})
    first, created = await service.jobs.submit(document, owner="ann", idempotency=key)
    again, created_again = await service.jobs.submit(document, owner="ann", idempotency=key)
    assert (created, created_again) == (True, False)
    assert first == again
    assert len((await service.jobs.list()).items) == 3


async def test_an_array_beyond_the_limit_is_refused_by_its_name(service: Service) -> None:
    with pytest.raises(ArrayTooLarge, match="10,000,000 jobs, but this server allows at most"):
        await service.submit(array={"size": 10**7})
    assert (await service.jobs.list()).items == []


@ONE_SET
@pytest.mark.parametrize(
    "many",
    [
        {"array": {"size": 10_000}},
        {"sweep": {"metric": "train/loss", "trials": 10_000, "parameters": {"x": ["x" * 4000]}}},
    ],
)
async def test_many_jobs_of_a_long_document_are_refused(
    service: Service, many: dict[str, Any]
) -> None:
    """Otherwise a request of one megabyte could be stored as ten gigabytes."""
    script = {"entrypoint": "a.py", "args": ["${x}"] * 4 if "sweep" in many else ["x" * 14_000]}
    document = JobSpec.model_validate({"script": script, **many})
    with pytest.raises(
        ArrayTooLarge, match="this server allows 134,217,728 bytes in total"
    ) as said:
        await service.jobs.submit(document)
    assert said.value.pointer == f"/{next(iter(many))}"
    assert (await service.jobs.list()).items == []
    few = JobSpec.model_validate({"script": script, "array": {"size": 3}})
    await service.jobs.submit(few)


@SOAK
async def test_ten_thousand_jobs_are_made_and_ended_as_one(sqlite_service: Service) -> None:
    service = sqlite_service
    array_id, _ = await array_of(service, 10_000)
    last = await service.submit(after=[array_id])
    array = await service.jobs.arrays.cancel(array_id)
    assert array.counts == {JobState.CANCELLED: 10_000}
    assert (await service.jobs.get(last)).state is JobState.CANCELLED


async def test_the_array_counts_its_jobs_by_state(service: Service) -> None:
    array_id, jobs = await array_of(service, 4, name="sweep")
    service.claim(jobs[0])
    service.end(jobs[0], 1)
    service.claim(jobs[1])
    array = await service.jobs.arrays.get(array_id)
    assert (array.id, array.name, array.size, array.max_running) == (array_id, "sweep", 4, None)
    assert array.counts == {JobState.QUEUED: 2, JobState.STARTING: 1, JobState.SUCCEEDED: 1}
    assert array.state == "2 QUEUED, 1 STARTING, 1 SUCCEEDED"
    assert not array.is_settled()
    assert array.is_settled([JobState.QUEUED, JobState.STARTING])


async def test_an_array_is_cancelled_as_one_whatever_its_jobs_do(service: Service) -> None:
    array_id, jobs = await array_of(service, 4)
    service.claim(jobs[0])
    service.end(jobs[0], 1)
    service.claim(jobs[1])
    for _ in range(2):
        array = await service.jobs.arrays.cancel(array_id, actor="ann")
        wanted = {JobState.SUCCEEDED: 1, JobState.CANCELLING: 1, JobState.CANCELLED: 2}
        assert array.counts == wanted
    for job_id, codes in ((jobs[1], ["submitted", "claimed"]), (jobs[3], ["submitted"])):
        events = await events_of(service, job_id)
        assert [event.code for event in events] == [*codes, "cancelled_by_user"]
        assert events[-1].actor == "ann"
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
    job = await service.jobs.get(jobs[3])
    assert job.reason.message == "cancelled by the user before the job started"
    assert job.finished_at == service.now


async def test_an_array_is_deleted_as_one_once_it_is_over(service: Service) -> None:
    array_id, jobs = await array_of(service, 3)
    other = await service.submit()
    with pytest.raises(JobLive):
        await service.jobs.arrays.delete(array_id)
    await service.jobs.arrays.cancel(array_id)
    service.storage.write_bytes(f"jobs/{jobs[1]}/x", b"x")
    await service.jobs.arrays.delete(array_id)
    assert not (service.settings.home / "storage" / "jobs" / jobs[1]).exists()
    assert [job.id for job in (await service.jobs.list()).items] == [other]
    for job_id in jobs:
        with pytest.raises(NotFound):
            await service.jobs.get(job_id)


async def test_files_that_cannot_be_deleted_do_not_stop_the_deletion_of_others(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await service.jobs.get(await service.submit(array={"size": 5}))
    array_id = job.array_id or ""
    await service.jobs.arrays.cancel(array_id)
    stuck = (await members(service, array_id))[2].id
    delete_tree, works = service.storage.delete_tree, False

    def delete(key: str) -> None:
        if key == f"jobs/{stuck}" and not works:
            raise StorageUnavailable("the disk is broken")
        delete_tree(key)

    monkeypatch.setattr(service.storage, "delete_tree", delete)
    with pytest.raises(StorageUnavailable, match=f"the files of job {stuck} can't be deleted yet"):
        await service.jobs.arrays.delete(array_id)
    left = service.database.read_sync(repository.marked_deleted)
    assert left == [stuck]
    with pytest.raises(ArrayNotFound):
        await service.jobs.arrays.get(array_id)
    works = True
    assert await service.jobs.deletions.finish() == 1
    assert service.database.read_sync(repository.marked_deleted) == []


async def test_an_array_from_whose_checkpoint_a_job_starts_is_not_deleted(
    service: Service,
) -> None:
    array_id, jobs = await array_of(service, 2)
    service.claim(jobs[1])
    service.report(jobs[1], 1, [service.checkpoint(jobs[1], 1, 10)])
    service.end(jobs[1], 1)
    await service.jobs.arrays.cancel(array_id)
    await service.submit(init_from={"job": jobs[1]})
    with pytest.raises(CheckpointInUse):
        await service.jobs.arrays.delete(array_id)
    assert len(await members(service, array_id)) == 2


async def test_what_is_no_array_is_not_found(service: Service) -> None:
    arrays = service.jobs.arrays
    for name in (NONE, await service.submit(), "a\0b"):
        for call in (arrays.get(name), arrays.cancel(name), arrays.delete(name)):
            with pytest.raises(ArrayNotFound):
                await call


def collapsed(**more: Any) -> JobFilter:
    return JobFilter(collapse_arrays=True, **more)


async def test_a_list_has_each_array_once_if_it_is_asked_to(service: Service) -> None:
    array_id, jobs = await array_of(service, 3, name="sweep")
    service.advance(1)
    alone = await service.submit()
    service.advance(1)
    other, more = await array_of(service, 2)
    service.claim(jobs[1])

    async def ids(query: JobFilter, limit: int = 50) -> list[str | None]:
        found = (await service.jobs.list(query, limit=limit)).items
        return [job.array_id or job.id for job in found]

    assert await ids(collapsed()) == [other, alone, array_id]
    assert await ids(collapsed(state=(JobState.STARTING,))) == [array_id]
    queued = (JobState.QUEUED, JobState.STARTING)
    assert await ids(collapsed(state=queued)) == [other, alone, array_id]
    assert await ids(collapsed(name="sweep")) == [array_id]
    assert await ids(collapsed(array=array_id[:10])) == [other, array_id]
    assert await ids(JobFilter(array=array_id, array_index=2)) == [array_id]
    page = await service.jobs.list(collapsed(), limit=1)
    rest = await service.jobs.list(collapsed(), limit=5, cursor=page.next_cursor)
    assert [job.array_id or job.id for job in rest.items] == [alone, array_id]
    for deleted in more:
        await service.jobs.cancel(deleted)
        await service.jobs.delete(deleted)
        left = await ids(collapsed())
        assert left == ([other] if deleted != more[-1] else []) + [alone, array_id]


async def test_a_deletion_that_is_under_way_is_not_handed_the_list(service: Service) -> None:
    """Instead, the next job of the array represents it."""
    array_id, jobs = await array_of(service, 3)
    await service.jobs.arrays.cancel(array_id)
    service.database.write_sync(lambda s: hide(service, s, jobs[1]))
    await service.jobs.delete(jobs[0])
    (left,) = (await service.jobs.list(collapsed())).items
    assert left.id == jobs[2]


def hide(service: Service, session: Any, job_id: str) -> None:
    row = repository.lock(session, job_id)
    assert row is not None
    row.deleted_at = service.now
