"""The jobs and models from which a job was made, and those that were made from it."""

from __future__ import annotations

import random

import pytest

from dray.model_requests import RegistrationRequest
from dray.views import Lineage
from service.domain.callers import Caller
from service.domain.errors import NotFound
from service.jobs.deletions import Deletions
from service.tracking import lineage
from service.tracking.lineage import Lineages
from service.tracking.registry import Registry
from tests.seeds import drawn
from tests.unit.service.helpers import Service
from tests.unit.service.tracking.test_registry import done


@pytest.fixture
def lineages(service: Service) -> Lineages:
    return Lineages(service.database)


def links(found: Lineage) -> set[tuple[str, str, str, int | None]]:
    return {(one.parent, one.child, one.kind, one.step) for one in found.links}


async def test_a_lineage_goes_both_ways(service: Service, lineages: Lineages) -> None:
    first = await done(service, 10, name="first")
    second = await done(service, 5, name="second", init_from={"job": first})
    third = await service.submit(name="third", origin={"job": second})
    sibling = await service.submit(name="sibling", init_from={"job": first})
    registry = Registry(service.database, service.storage)
    wanted = RegistrationRequest(name="digits", job=second, step=5)
    await registry.register(wanted, Caller("ann", False))
    found = await lineages.get(second)
    assert {job.id: job.name for job in found.jobs} == {
        second: "second",
        first: "first",
        third: "third",
    }
    assert links(found) == {
        (first, second, "init_from", 10),
        (second, third, "edited", None),
        (second, "model://digits@1", "registered", 5),
    }
    assert found.is_complete
    assert {job.id for job in (await lineages.get(first)).jobs} == {first, second, third, sibling}
    assert {job.id for job in (await lineages.get(third)).jobs} == {first, second, third}
    with pytest.raises(NotFound):
        await lineages.get("job-none")


async def test_a_deleted_parent_is_named_by_its_id(service: Service, lineages: Lineages) -> None:
    first = await done(service, 10)
    second = await service.submit(origin={"job": first})
    deletions = Deletions(service.database, service.storage)
    assert not await deletions.delete([first], actor="ann")
    found = await lineages.get(second)
    (gone,) = [job for job in found.jobs if job.id == first]
    assert (gone.name, gone.state) == (None, None)
    assert links(found) == {(first, second, "edited", None)}


async def test_the_jobs_of_an_array_were_edited_from_its_parent(
    service: Service, lineages: Lineages
) -> None:
    first = await service.submit(name="first")
    await service.submit(origin={"job": first}, array={"size": 3})
    found = await lineages.get(first)
    assert len(found.links) == 3
    (trial, *_) = [job for job in found.jobs if job.id != first]
    assert trial.variant is not None
    own = await lineages.get(trial.id)
    assert own.array_id is not None
    assert not own.is_sweep
    assert {job.id for job in own.jobs} == {first, trial.id}


async def test_a_large_lineage_is_cut(
    service: Service, lineages: Lineages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage, "MAX_JOBS", 5)
    first = await service.submit()
    for _ in range(6):
        await service.submit(origin={"job": first})
    found = await lineages.get(first)
    assert len(found.jobs) == 5
    assert not found.is_complete
    assert all({one.parent, one.child} <= {job.id for job in found.jobs} for one in found.links)


@pytest.mark.parametrize("seed", drawn(3))
async def test_any_lineage_is_what_a_walk_finds(
    service: Service, lineages: Lineages, seed: int
) -> None:
    random_ = random.Random(seed)
    jobs: list[str] = []
    parent_of: dict[str, str] = {}
    for _ in range(12):
        parent = random_.choice([None, *jobs]) if jobs else None
        job_id = await service.submit(origin=None if parent is None else {"job": parent})
        jobs.append(job_id)
        if parent is not None:
            parent_of[job_id] = parent
    for job_id in jobs:
        expected = {job_id}
        above = job_id
        while above in parent_of:
            above = parent_of[above]
            expected.add(above)
        for other in jobs:
            above = other
            while above in parent_of and above != job_id:
                above = parent_of[above]
            if above == job_id:
                expected.add(other)
        assert {job.id for job in (await lineages.get(job_id)).jobs} == expected
