"""A queue gives jobs a default limit of their running time, and refuses longer limits."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import ValidationError
from sqlalchemy.orm import Session

from dray.queue_requests import QueueChangeRequest, QueueRequest
from ray_workers.shared.contracts import Cause
from service.db.repositories import jobs as jobs_repository
from service.db.repositories.scheduling import queues as queues_repository
from service.domain.errors import InvalidQueue, RuntimeTooLong
from service.domain.scheduling.rules.tree import QueueTree
from service.outlook import answers
from tests.marks import RULES
from tests.unit.service.helpers import Service, events_of

pytestmark = RULES
Limit = tuple[int | None, str | None]


async def limit_of(service: Service, job_id: str) -> Limit:
    job = await service.jobs.get(job_id)
    return job.max_runtime_s, job.max_runtime_from


async def test_a_job_without_a_limit_gets_the_default_of_its_queue(service: Service) -> None:
    await service.queue("night", default_max_runtime_s="2h", max_runtime_s="1d")
    job_id = await service.submit(queue="night")
    own = await service.submit(queue="night", max_runtime_s=60)
    other = await service.submit()
    assert await limit_of(service, job_id) == (7200, "queue")
    assert await limit_of(service, own) == (60, "job")
    assert await limit_of(service, other) == (None, None)
    (first,) = await events_of(service, job_id)
    assert first.message == (
        "submitted to the queue 'night', whose default for max_runtime_s is 7200"
    )
    claimed = service.claim(job_id)
    assert claimed is not None
    assert claimed.max_runtime_s == 7200
    assert (await service.jobs.get(job_id)).spec["max_runtime_s"] is None


async def test_the_maximum_is_the_default_if_the_queue_has_none(service: Service) -> None:
    await service.queue("night", max_runtime_s=600)
    assert await limit_of(service, await service.submit(queue="night")) == (600, "queue")


async def test_every_job_of_an_array_gets_the_default(service: Service) -> None:
    await service.queue("night", default_max_runtime_s=600)
    await service.submit(queue="night", array={"size": 3})
    jobs = (await service.jobs.list()).items
    assert [(job.max_runtime_s, job.max_runtime_from) for job in jobs] == [(600, "queue")] * 3


async def test_a_longer_limit_is_refused_with_the_maximum(service: Service) -> None:
    await service.queue("night", max_runtime_s=600)
    with pytest.raises(RuntimeTooLong) as told:
        await service.submit(queue="night", max_runtime_s=601)
    assert (told.value.message, told.value.pointer, told.value.hint) == (
        "is 601 s, but the maximum of the queue 'night' is 600 s",
        "/max_runtime_s",
        "set max_runtime_s to at most 600, or choose another queue",
    )
    await service.submit(queue="night", max_runtime_s=600)
    assert len((await service.jobs.list()).items) == 1


async def test_a_moved_job_gets_the_default_of_its_new_queue(service: Service) -> None:
    await service.queue("night", default_max_runtime_s=600, max_runtime_s=900)
    job_id = await service.submit()
    own = await service.submit(max_runtime_s=901)
    await service.change(job_id, queue="night")
    assert await limit_of(service, job_id) == (600, "queue")
    (moved,) = await events_of(service, job_id, "queue")
    assert moved.message == "moved to the queue 'night', whose default for max_runtime_s is 600"
    with pytest.raises(RuntimeTooLong) as told:
        await service.change(own, queue="night", priority=60)
    assert told.value.pointer == "/queue"
    refused = await service.jobs.get(own)
    assert (refused.queue, refused.priority, refused.max_runtime_s) == ("default", 50, 901)
    await service.change(job_id, queue="default")
    assert await limit_of(service, job_id) == (None, None)


async def test_a_job_is_not_moved_to_a_queue_in_which_its_time_is_over(service: Service) -> None:
    await service.queue("night", default_max_runtime_s=600)
    job_id = await service.running()
    service.end(job_id, 1, Cause.PREEMPTED, ran_s=700.0)
    with pytest.raises(RuntimeTooLong, match="has already run for 700 s"):
        await service.change(job_id, queue="night")


async def test_a_changed_rule_counts_for_new_jobs(service: Service) -> None:
    await service.queue("night", default_max_runtime_s=600)
    before = await service.submit(queue="night")
    changes = QueueChangeRequest(default_max_runtime_s=None, max_runtime_s=60)
    shown = await service.queues.change("night", changes)
    assert (shown.default_max_runtime_s, shown.max_runtime_s) == (None, 60)
    assert await limit_of(service, before) == (600, "queue")
    assert await limit_of(service, await service.submit(queue="night")) == (60, "queue")
    await service.change(before, priority=60)
    assert await limit_of(service, before) == (600, "queue")


async def test_a_submission_and_a_change_at_once_agree_on_the_limit(service: Service) -> None:
    await service.queue("night", default_max_runtime_s=600)
    changes = QueueChangeRequest(default_max_runtime_s=60)
    job_ids = await asyncio.gather(
        *(service.submit(queue="night") for _ in range(4)),
        service.queues.change("night", changes),
    )
    for job_id in job_ids[:-1]:
        assert await limit_of(service, str(job_id)) in ((600, "queue"), (60, "queue"))


async def test_a_default_above_the_maximum_is_refused(service: Service) -> None:
    with pytest.raises(InvalidQueue) as told:
        await service.queue("night", default_max_runtime_s=601, max_runtime_s=600)
    assert told.value.pointer == "/default_max_runtime_s"


@pytest.mark.parametrize("value", [0, -1, "2 parsecs", True, 1.5])
def test_a_limit_is_a_number_of_seconds_or_a_duration(value: object) -> None:
    with pytest.raises(ValidationError):
        QueueRequest.model_validate({"max_runtime_s": value})


async def test_a_queue_whose_default_is_used_up_is_not_suggested(service: Service) -> None:
    await service.queue("short", default_max_runtime_s=300)
    await service.queue("long", default_max_runtime_s=3600)
    await service.queue("full", max_queued=0)
    job_id = await service.running()
    service.advance(600)
    service.end(job_id, 1, Cause.PREEMPTED, ran_s=600.0)

    def suggested(session: Session) -> dict[str, float | None]:
        row = jobs_repository.get(session, job_id)
        assert row is not None
        tree = QueueTree(queues_repository.every(session))
        found = answers.that_accept(session, tree, row, service.now)
        return {one.queue.name: one.ends_within_s for one in found}

    assert service.database.read_sync(suggested) == {"long": 3000.0}
    with pytest.raises(RuntimeTooLong):
        await service.change(job_id, queue="short")
