"""Jobs that start after the failure of others, and arrays whose jobs wait for each other one by
one, with both databases."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event

from dray.views import JobState
from ray_workers.shared.contracts import Cause
from service.db.repositories.submission import dependencies as repository
from service.domain.errors import DependencyNeverSatisfied, InvalidDocument
from tests.marks import RULES
from tests.unit.service.helpers import Service, events_of
from tests.unit.service.jobs.test_dependencies import (
    array_of,
    num_open,
    starts,
    state_of,
    why_waits,
)

pytestmark = RULES


def if_fails(job_id: str, **more: Any) -> list[dict[str, Any]]:
    return [{"job": job_id, "on": "failure", **more}]


async def test_a_job_after_a_failure_starts_once_the_other_has_failed(service: Service) -> None:
    first = await service.running()
    repair = await service.submit(after=if_fails(first))
    assert why_waits(service, repair) == f"waits for the failure of {first} (RUNNING)"
    service.end(first, 1, Cause.BAD_DATA)
    assert starts(service, repair)
    assert num_open(service) == 0


async def test_a_cancelled_job_counts_as_failed(service: Service) -> None:
    first = await service.submit()
    repair = await service.submit(after=if_fails(first))
    await service.jobs.cancel(first)
    assert starts(service, repair)


async def test_a_job_after_a_failure_is_cancelled_once_the_other_has_succeeded(
    service: Service,
) -> None:
    first = await service.running()
    repair = await service.submit(after=if_fails(first))
    report = await service.submit(after=[repair])
    anyway = await service.submit(after=if_fails(repair))
    service.end(first, 1)
    job = await service.jobs.get(repair)
    assert (job.state, job.reason.code) == (JobState.CANCELLED, "dependency_never_satisfied")
    assert job.reason.message == f"depends on the failure of {first}, which succeeded"
    assert (await events_of(service, repair))[-1].data == {"after": first, "job": first}
    assert await state_of(service, report) is JobState.CANCELLED
    assert starts(service, anyway)
    assert num_open(service) == 0


async def test_a_retry_is_no_failure(service: Service) -> None:
    first = await service.running(max_retries=1)
    repair = await service.submit(after=if_fails(first))
    service.end(first, 1, Cause.USER_ERROR)
    assert why_waits(service, repair)


async def test_a_failure_before_the_submission(service: Service) -> None:
    first, second = await service.running(), await service.running()
    service.end(first, 1, Cause.BAD_DATA)
    service.end(second, 1)
    assert starts(service, await service.submit(after=if_fails(first)))
    with pytest.raises(DependencyNeverSatisfied) as refused:
        await service.submit(after=if_fails(second))
    assert str(refused.value) == (
        f"this job could never start: it depends on the failure of {second}, which succeeded"
    )


@pytest.mark.parametrize("fails", [True, False])
async def test_an_array_fails_once_all_its_jobs_have_ended_and_one_has_failed(
    service: Service, *, fails: bool
) -> None:
    array, (one, two) = await array_of(service, 2)
    repair = await service.submit(after=if_fails(array))
    for job_id in (one, two):
        assert why_waits(service, repair).startswith(f"waits for the failure of {array}")
        service.claim(job_id)
        service.end(job_id, 1, Cause.BAD_DATA if fails and job_id == one else Cause.SUCCEEDED)
    assert num_open(service) == 0
    if fails:
        assert starts(service, repair)
    else:
        assert (await service.jobs.get(repair)).reason.message == (
            f"depends on the failure of {array}, all jobs of which succeeded"
        )


def each(array: str, on: str = "success") -> list[dict[str, Any]]:
    return [{"job": array, "on": on, "each": True}]


async def test_each_job_of_an_array_waits_for_its_counterpart(service: Service) -> None:
    first, a = await array_of(service, 3)
    _, b = await array_of(service, 3, after=each(first))
    assert why_waits(service, b[1]) == f"waits for the success of {a[1]} (QUEUED)"
    assert num_open(service) == 1
    service.claim(a[1])
    service.end(a[1], 1)
    assert [starts(service, job_id) for job_id in b] == [False, True, False]
    assert service.claim(b[1]) is not None
    service.claim(a[0])
    service.end(a[0], 1, Cause.BAD_DATA)
    job = await service.jobs.get(b[0])
    assert (job.state, job.reason.code) == (JobState.CANCELLED, "dependency_never_satisfied")
    assert job.reason.message == (
        f"depends on the success of the job with the same index in {first}, which failed"
    )
    assert await state_of(service, b[1]) is JobState.STARTING
    assert why_waits(service, b[2])
    await service.jobs.cancel(a[2])
    assert await state_of(service, b[2]) is JobState.CANCELLED
    assert num_open(service) == 0


async def test_each_job_that_repairs_its_counterpart(service: Service) -> None:
    first, a = await array_of(service, 2)
    _, b = await array_of(service, 2, after=each(first, "failure"))
    _, c = await array_of(service, 2, after=each((await service.jobs.get(b[0])).array_id or ""))
    for job_id, cause in zip(a, (Cause.SUCCEEDED, Cause.BAD_DATA), strict=True):
        service.claim(job_id)
        service.end(job_id, 1, cause)
    assert [await state_of(service, job) for job in (b[0], c[0])] == [JobState.CANCELLED] * 2
    assert starts(service, b[1])
    assert why_waits(service, c[1])


async def test_counterparts_that_ended_before_the_submission(service: Service) -> None:
    first, a = await array_of(service, 3)
    for job_id, cause in ((a[0], Cause.SUCCEEDED), (a[1], Cause.BAD_DATA)):
        service.claim(job_id)
        service.end(job_id, 1, cause)
    _, b = await array_of(service, 3, after=each(first))
    assert starts(service, b[0])
    assert await state_of(service, b[1]) is JobState.CANCELLED
    assert why_waits(service, b[2])
    service.claim(a[2])
    service.end(a[2], 1)
    _, again = await array_of(service, 3, after=each(first))
    assert [await state_of(service, job) for job in again] == [
        *(JobState.QUEUED, JobState.CANCELLED, JobState.QUEUED)
    ]
    assert num_open(service) == 0


async def test_each_is_refused_unless_both_are_arrays_of_the_same_size(service: Service) -> None:
    first, a = await array_of(service, 2)
    with pytest.raises(InvalidDocument, match="requires arrays of equal size") as refused:
        await service.submit(array={"size": 3}, after=each(first))
    assert refused.value.pointer == "/after/0/each"
    with pytest.raises(
        InvalidDocument, match="requires this document to define an array or a sweep"
    ):
        await service.submit(after=each(first))
    with pytest.raises(ValueError, match="requires the id of an array"):
        await service.submit(array={"size": 2}, after=each(a[0]))


async def test_a_long_array_costs_few_statements(service: Service) -> None:
    statements: list[str] = []

    def note(_c: object, _cursor: object, statement: str, *_more: object) -> None:
        statements.append(statement)

    async def submit(size: int) -> tuple[int, int]:
        first, a = await array_of(service, size)
        statements.clear()
        await service.submit(array={"size": size}, after=each(first))
        at_submission = len(statements)
        service.claim(a[0])
        statements.clear()
        service.end(a[0], 1)
        return at_submission, len(statements)

    for engine in (service.database.engine,):
        event.listen(engine, "before_cursor_execute", note)
    short, long = await submit(3), await submit(300)
    assert min(short) > 0
    assert long == short


async def test_the_dependencies_of_a_deleted_counterpart(service: Service) -> None:
    first, a = await array_of(service, 2)
    service.claim(a[0])
    service.end(a[0], 1)
    await service.jobs.delete(a[0])
    _, b = await array_of(service, 2, after=each(first))
    assert starts(service, b[0])
    assert why_waits(service, b[1])
    assert service.database.read_sync(repository.all_open)
