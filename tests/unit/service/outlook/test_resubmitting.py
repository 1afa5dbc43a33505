"""Documents that a suggestion proposes for resubmission follow the rules for submission."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select

from service.db.models import JobRow
from service.domain.scheduling.outlook.counterfactuals import Change
from service.domain.scheduling.policy import Request, WaitingJob
from service.outlook.resubmitting import Resubmission
from service.outlook.step_times import Kind
from tests.marks import RULES
from tests.unit.service.helpers import Service

pytestmark = RULES


def row_of(service: Service, job_id: str) -> JobRow:
    query = select(JobRow).where(JobRow.id == job_id)
    return service.database.read_sync(lambda s: s.scalars(query).one())


async def sizes(service: Service, number: int, **fields: Any) -> list[int]:
    """Return the smaller sizes that the document can have."""
    job_id = await service.submit(resources={"num_workers": number}, **fields)
    row = row_of(service, job_id)
    resubmit = Resubmission(row, {})
    job = WaitingJob(job_id, 1, 50, 7, Request(number, {"CPU": 1.0}), waited_s=90.0)
    found = [resubmit(job, Change(num_workers=size)) for size in range(1, number)]
    return [each.request.num_workers for each in found if each is not None]


@pytest.mark.parametrize(
    ("number", "fields", "expected"),
    [
        (4, {}, [1, 2, 3]),
        (4, {"parallel": {"shard": 2}}, [2]),
        (4, {"parallel": {"data": 4}}, []),
        (5, {"elastic": {"min_workers": 3}}, [3, 4]),
    ],
)
async def test_only_sizes_that_a_submit_takes_are_tried(
    service: Service, number: int, fields: dict[str, Any], expected: list[int]
) -> None:
    assert await sizes(service, number, **fields) == expected


async def test_a_job_of_an_array_can_not_be_submitted_alone(service: Service) -> None:
    assert await sizes(service, 2, array={"size": 2}) == []


async def test_it_comes_last_and_takes_as_long_as_jobs_of_its_new_size(service: Service) -> None:
    job_id = await service.submit(name="big", resources={"num_workers": 4})
    row = row_of(service, job_id)
    job = WaitingJob(job_id, 1, 50, 7, Request(4, {"CPU": 1.0}), left_s=10.0, waited_s=90.0)
    again = Resubmission(row, {Kind(row.owner, "big", 2): [300.0]})(job, Change(num_workers=2))
    assert again is not None
    assert (again.left_s, again.waited_s, again.attempt) == (300.0, 0.0, 0)
    assert again.seq > row.number


@pytest.mark.parametrize(
    ("fields", "change", "expected"),
    [
        ({"elastic": {"min_workers": 4}}, Change(min_workers=2), (2, {"CPU": 1.0})),
        ({}, Change(of_worker=("memory", 2.0**30)), (4, {"CPU": 1.0, "memory": 2.0**30})),
        (
            {"elastic": {"min_workers": 4}},
            Change(of_worker=("GPU", 1.0)),
            (4, {"CPU": 1.0, "GPU": 1.0}),
        ),
        (
            {"elastic": {"min_workers": 4}, "train": {"measure_noise": True}},
            Change(of_worker=("GPU", 1.0)),
            None,
        ),
    ],
)
async def test_less_is_asked_for_by_the_rules_of_a_document(
    service: Service, fields: dict[str, Any], change: Change, expected: tuple[int, Any] | None
) -> None:
    job_id = await service.submit(resources={"num_workers": 4}, **fields)
    job = WaitingJob(job_id, 1, 50, 7, Request(4, {"CPU": 1.0}))
    again = Resubmission(row_of(service, job_id), {})(job, change)
    assert (again and (again.request.least, again.request.bundle)) == expected
