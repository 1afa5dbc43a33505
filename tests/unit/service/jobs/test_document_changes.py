"""The document of a waiting job is changed in place, with the checks of a submission."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dray import views
from dray.filters import JobFilter
from dray.requests import JobChangeRequest
from dray.views import JobState
from ray_workers.shared.commands import Limit
from ray_workers.shared.contracts import Cause
from ray_workers.shared.slices import Slice
from service.db.repositories.submission import dependencies as repository
from service.domain.errors import (
    DependencyCircular,
    DependencyNeverSatisfied,
    DependencyNotFound,
    InvalidDocument,
    JobFinished,
    JobNotWaiting,
    LimitRaised,
    PriorityTooHigh,
    QueueFull,
    UnknownQueue,
    Unsatisfiable,
)
from service.lifecycle import claims, resizing
from service.lifecycle.claims import Wanted
from service.loops.shared.queue_view import snapshot
from tests.unit.service.helpers import Service, events_of
from tests.unit.service.jobs.test_dependencies import array_of, starts, why_waits


async def changed(service: Service, job_id: str, **document: Any) -> views.Job:
    return await service.change(job_id, document=document)


async def found_by(service: Service, where: str) -> list[str]:
    return [job.id for job in (await service.jobs.list(JobFilter(where=where))).items]


async def test_a_change_is_in_the_document_the_plan_the_search_and_an_event(
    service: Service,
) -> None:
    job_id = await service.submit(labels={"team": "vision"}, resources={"num_workers": 4})
    await service.submit()
    job = await changed(
        service,
        job_id,
        name="smaller",
        labels={"team": None, "stage": "2"},
        resources={"num_workers": 2, "cpus_per_worker": 3},
        max_runtime_s=7200,
        max_retries=5,
    )
    assert (job.name, job.labels, job.world_size) == ("smaller", {"stage": "2"}, 2)
    assert job.spec["labels"] == {"stage": "2"}
    assert (job.spec["max_runtime_s"], job.spec["max_retries"]) == (7200, 5)
    assert (await service.jobs.get(job_id)) == job
    waiting, _ = service.database.read_sync(lambda s: snapshot(s, service.now))
    (planned,) = [one for one in waiting if one.job_id == job_id]
    assert (planned.request.num_workers, planned.request.bundle["CPU"]) == (2, 3.0)
    assert planned.ends_within_s == 7200
    assert await found_by(service, "resources.num_workers = 2") == [job_id]
    assert await found_by(service, "resources.num_workers = 4") == []
    assert await found_by(service, "labels.stage = '2'") == [job_id]
    (event,) = await events_of(service, job_id, "changed")
    assert (event.code, event.actor) == ("document_changed", "ann")
    assert event.message == (
        "changed name from job to smaller; labels.team from vision to unset; "
        "labels.stage from unset to 2; resources.num_workers from 4 to 2; "
        "resources.cpus_per_worker from 1 to 3; max_retries from 1 to 5; "
        "max_runtime_s from unset to 7200"
    )
    assert event.data["changes"][3] == {"pointer": "/resources/num_workers", "from": 4, "to": 2}
    assert job.reason.code == "document_changed"


async def test_a_repeated_change_adds_no_event(service: Service) -> None:
    job_id = await service.submit()
    first = await changed(service, job_id, max_retries=3)
    assert await changed(service, job_id, max_retries=3) == first
    assert len(await events_of(service, job_id, "changed")) == 1


async def test_null_restores_a_default(service: Service) -> None:
    job_id = await service.submit(
        resources={"num_workers": 4}, elastic={"min_workers": 2}, max_runtime_s=60
    )
    job = await changed(service, job_id, elastic=None, max_runtime_s=None)
    assert (job.spec["elastic"], job.spec["max_runtime_s"]) == (None, None)
    assert service.claim(job_id, workers=4) is not None


async def test_a_held_job_stays_held(service: Service) -> None:
    job_id = await service.submit()
    await service.change(job_id, held=True)
    job = await changed(service, job_id, max_retries=3)
    assert (job.held_by, job.reason.code) == ("ann", "held")


async def test_the_queue_and_the_priority_of_the_document_move_the_job(service: Service) -> None:
    await service.queue("night", max_priority=60)
    job_id = await service.submit()
    job = await changed(service, job_id, queue="night", priority=60, max_retries=0)
    assert (job.queue, job.priority) == ("night", 60)
    assert (job.spec["queue"], job.spec["priority"], job.spec["max_retries"]) == ("night", 60, 0)
    events = await events_of(service, job_id, "changed", "queue")
    assert [event.code for event in events] == ["document_changed", "moved", "priority"]
    with pytest.raises(PriorityTooHigh):
        await changed(service, job_id, priority=61)
    assert (await service.change(job_id, is_admin=True, document={"priority": 61})).priority == 61
    moved = await service.change(job_id, queue="default", document={"max_retries": 4})
    assert (moved.queue, moved.spec["queue"]) == ("default", "default")


REFUSED: list[tuple[dict[str, Any], type[Exception], str, str]] = [
    ({"resources": {"num_workers": 0}}, InvalidDocument, "/document/resources/num_workers", ""),
    ({"resources": {"workers": 2}}, InvalidDocument, "/document/resources/workers", ""),
    ({"labels": {"a b": "c"}}, InvalidDocument, "/document/labels", ""),
    ({"elastic": {"min_workers": 9}}, InvalidDocument, "/document/elastic/min_workers", ""),
    ({"queue": "nigth"}, UnknownQueue, "/document/queue", "there is no queue 'nigth'"),
    ({"queue": "full"}, QueueFull, "/document/queue", ""),
    ({"resources": {"num_workers": 9}}, Unsatisfiable, "/document/queue", "could never start"),
    ({"after": ["job-0"]}, DependencyNotFound, "/document/after/0/job", ""),
]


@pytest.mark.parametrize(("document", "error", "pointer", "said"), REFUSED)
async def test_a_change_that_a_submission_would_refuse_stores_nothing(
    service: Service, document: dict[str, Any], error: type[Exception], pointer: str, said: str
) -> None:
    await service.queue("full", max_queued=0)
    await service.queue("default", limit={"CPU": 8})
    job_id = await service.submit(resources={"num_workers": 2})
    before = await service.jobs.get(job_id)
    with pytest.raises(error) as refused:
        await changed(service, job_id, **{"name": "other", "labels": {"x": "y"}, **document})
    assert said in str(refused.value)
    assert str(refused.value.pointer).startswith(pointer)  # type: ignore[attr-defined]
    assert await service.jobs.get(job_id) == before
    assert len(await events_of(service, job_id)) == 1


async def test_a_full_queue_does_not_refuse_a_change_of_its_own_job(service: Service) -> None:
    job_id = await service.submit()
    await service.queue("default", max_queued=0)
    assert (await changed(service, job_id, max_retries=3)).spec["max_retries"] == 3


async def test_only_a_waiting_job_is_changed(service: Service) -> None:
    job_id = await service.running()
    before = (await service.jobs.get(job_id)).spec
    with pytest.raises(JobNotWaiting, match="only a waiting job can be changed"):
        await changed(service, job_id, resources={"num_workers": 2})
    assert (await service.jobs.get(job_id)).spec == before
    service.end(job_id, 1)
    with pytest.raises(JobFinished):
        await changed(service, job_id, max_retries=2)


async def test_a_job_that_starts_while_its_change_is_checked_keeps_its_document(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await service.submit()
    resolve = service.changes._plans.resolve

    async def resolve_late(spec: Any) -> Any:
        assert service.claim(job_id) is not None
        return await resolve(spec)

    monkeypatch.setattr(service.changes._plans, "resolve", resolve_late)
    with pytest.raises(JobNotWaiting):
        await changed(service, job_id, resources={"num_workers": 2})
    assert (await service.jobs.get(job_id)).spec["resources"]["num_workers"] == 1


async def test_a_plan_of_the_earlier_document_does_not_start_the_job(service: Service) -> None:
    job_id, other = await service.submit(), await service.running()
    waiting, _ = service.database.read_sync(lambda s: snapshot(s, service.now))
    (seen,) = [one for one in waiting if one.job_id == job_id]

    def claim() -> object:
        wanted = Wanted(
            *(job_id, 0, "default", (Slice("node-a", 1),), seen.request.bundle),
            request_seen=seen.request,
        )
        return service.database.write_sync(
            lambda s: claims.claim(s, [wanted], service.deployment, service.now)
        )[0]

    await changed(service, job_id, resources={"cpus_per_worker": 2})
    assert claim() is None
    await changed(service, job_id, resources={"cpus_per_worker": 1}, after=[other])
    assert claim() is None
    await changed(service, job_id, after=None)
    assert claim() is not None


async def test_a_plan_of_the_earlier_document_does_not_fail_the_job(service: Service) -> None:
    job_id = await service.submit()
    waiting, _ = service.database.read_sync(lambda s: snapshot(s, service.now))
    (seen,) = [one for one in waiting if one.job_id == job_id]

    def still() -> bool:
        return service.database.write_sync(
            lambda s: resizing.still_requests(s, job_id, seen.request)
        )

    assert still()
    await changed(service, job_id, resources={"num_workers": 2})
    assert not still()


async def test_an_admins_priority_does_not_prevent_other_changes(service: Service) -> None:
    await service.queue("default", max_priority=60)
    job_id = await service.submit()
    await service.change(job_id, is_admin=True, priority=90)
    job = await changed(service, job_id, max_retries=3)
    assert (job.priority, job.spec["priority"]) == (90, 90)


async def test_two_changes_at_once_are_both_kept(service: Service) -> None:
    job_id = await service.submit()
    await asyncio.gather(
        changed(service, job_id, resources={"num_workers": 2}),
        changed(service, job_id, resources={"cpus_per_worker": 2}),
        changed(service, job_id, max_retries=7),
        changed(service, job_id, labels={"a": "b"}),
    )
    spec = (await service.jobs.get(job_id)).spec
    assert (spec["resources"]["num_workers"], spec["resources"]["cpus_per_worker"]) == (2, 2)
    assert (spec["max_retries"], spec["labels"]) == (7, {"a": "b"})


async def test_a_job_that_waits_for_a_retry_resumes_with_the_new_document(
    service: Service,
) -> None:
    job_id = await service.running(max_retries=3, max_runtime_s=100)
    service.report(job_id, 1, [service.checkpoint(job_id, 1, 50)])
    service.end(job_id, 1, Cause.USER_ERROR, ran_s=60.0)
    assert (await service.jobs.get(job_id)).state is JobState.QUEUED
    with pytest.raises(Unsatisfiable, match="has already run for 60 s"):
        await changed(service, job_id, max_runtime_s=60)
    other = await service.submit()
    with pytest.raises(JobNotWaiting, match="has already started once"):
        await changed(service, job_id, after=[other])
    await changed(service, job_id, resources={"num_workers": 2}, max_runtime_s=90)
    started = service.claim(job_id, 1, workers=2)
    assert started is not None
    assert (started.max_runtime_s, started.resume_from[0].step) == (30.0, 50)
    assert started.spec["resources"]["num_workers"] == 2


async def test_the_limit_of_a_running_job_is_lowered_by_anyone_and_raised_by_an_admin(
    service: Service,
) -> None:
    job_id = await service.running(max_runtime_s=600)
    service.advance(100)
    job = await changed(service, job_id, max_runtime_s=300)
    assert (job.state, job.spec["max_runtime_s"]) == (JobState.RUNNING, 300)
    assert service.followed(job_id).commands == (Limit(1, 300.0),)
    (event,) = await events_of(service, job_id, "changed")
    assert event.message == "changed max_runtime_s from 600 to 300"
    assert await found_by(service, "max_runtime_s = 300") == [job_id]
    for longer in (301, None):
        with pytest.raises(LimitRaised, match="only an admin can raise it"):
            await changed(service, job_id, max_runtime_s=longer)
    with pytest.raises(Unsatisfiable, match="has already run for 100 s"):
        await changed(service, job_id, max_runtime_s=100)
    with pytest.raises(JobNotWaiting):
        await changed(service, job_id, max_runtime_s=200, max_retries=2)
    await changed(service, job_id, max_runtime_s=300)
    await service.change(job_id, is_admin=True, document={"max_runtime_s": None})
    assert service.followed(job_id).commands == (Limit(2, None),)


async def test_after_is_replaced(service: Service) -> None:
    first, second, third = [await service.running() for _ in range(3)]
    job_id = await service.submit(after=[first])
    await changed(service, job_id, after=[{"job": second, "on": "end"}, third])
    assert why_waits(service, job_id) == (
        f"waits for the end of {second} (RUNNING), the success of {third} (RUNNING)"
    )
    service.end(first, 1, Cause.BAD_DATA)
    assert (await service.jobs.get(job_id)).state is JobState.QUEUED
    with pytest.raises(DependencyNeverSatisfied):
        await changed(service, job_id, after=[first])
    await changed(service, job_id, after=[])
    assert starts(service, job_id)
    assert service.database.read_sync(repository.all_open) == []


async def test_a_job_can_not_be_made_to_wait_for_itself(service: Service) -> None:
    first = await service.submit()
    array, members = await array_of(service, 2, after=[first])
    last = await service.submit(after=[{"job": members[1], "on": "end"}])
    for after, chain in (
        (first, first),
        (array, f"{array}, which waits for {first}"),
        (last, f"{last}, which waits for {members[1]}, which waits for {first}"),
    ):
        with pytest.raises(DependencyCircular) as refused:
            await changed(service, first, after=[after])
        assert str(refused.value) == f"the job would wait for itself: {chain}"
    assert (await service.jobs.get(first)).spec["after"] == []
    assert starts(service, first)


async def test_two_changes_at_once_close_no_circle(service: Service) -> None:
    one, two, three, four = [await service.submit() for _ in range(4)]
    await changed(service, two, after=[three])
    await changed(service, four, after=[one])
    results = await asyncio.gather(
        changed(service, one, after=[two]),
        changed(service, three, after=[four]),
        return_exceptions=True,
    )
    assert sorted(type(each).__name__ for each in results) == ["DependencyCircular", "Job"]


async def test_one_job_of_an_array_is_changed(service: Service) -> None:
    array, (first, second, third) = await array_of(service, 3, train={"seed": 5})
    await changed(service, second, resources={"num_workers": 2})
    assert await found_by(service, "resources.num_workers = 2") == [second]
    assert sorted(await found_by(service, "resources.num_workers = 1")) == sorted([first, third])
    assert await found_by(service, "train.seed = 6") == [second]
    assert (await service.jobs.arrays.get(array)).size == 3
    with pytest.raises(InvalidDocument, match="all jobs of an array wait together"):
        await changed(service, second, after=[])


async def test_a_trial_is_changed_once_it_has_its_values(service: Service) -> None:
    values = {"train.epochs": [2, 3]}
    grid = {"parameters": values, "sampler": "grid", "metric": "val/loss"}
    first = await service.jobs.get(await service.submit(sweep=grid))
    await changed(service, first.id, resources={"num_workers": 2})
    assert await found_by(service, "resources.num_workers = 2 and train.epochs = 2") == [first.id]


@pytest.mark.parametrize(
    ("body", "pointer", "said"),
    [
        ({"document": {"train": {"epochs": 2}}}, "/document/train", "can't be changed after"),
        ({"document": {}}, "", "specify at least one of"),
        ({"queue": "a", "document": {"queue": "b"}}, "/document/queue", "is given twice"),
    ],
)
def test_what_can_not_be_changed_is_refused(body: dict[str, Any], pointer: str, said: str) -> None:
    from dray.input.validation import Fault, check_as

    with pytest.raises(Fault, match=said) as refused:
        check_as(JobChangeRequest, body)
    assert (refused.value.pointer or "") == pointer


async def test_a_trial_without_values_is_not_changed(service: Service) -> None:
    values = {"train.epochs": {"min": 1, "max": 9}}
    sweep = {"parameters": values, "sampler": "optuna", "trials": 2, "metric": "val/loss"}
    job_id = await service.submit(sweep=sweep)
    with pytest.raises(
        JobNotWaiting, match="gets its parameter values and its document when it starts"
    ):
        await changed(service, job_id, max_retries=2)
