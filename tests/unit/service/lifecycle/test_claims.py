"""Claiming many jobs at once: attempts start for the jobs that have not changed."""

from __future__ import annotations

import pytest
from sqlalchemy.orm import Session

from dray.views import JobState
from ray_workers.shared.contracts import AttemptSpec
from ray_workers.shared.slices import Slice
from service.db.repositories import jobs as repository
from service.domain import documents
from service.domain.documents import DocumentRefused, checked
from service.lifecycle.claims import Wanted, claim
from tests.unit.service.helpers import Service, spec


def wanted(job_id: str, attempt_seen: int = 0, queue: str = "default") -> Wanted:
    return Wanted(job_id, attempt_seen, queue, (Slice("node-a", 1),), {"CPU": 1.0})


def claimed(service: Service, *jobs: Wanted) -> list[AttemptSpec | None]:
    return service.database.write_sync(lambda s: claim(s, jobs, service.deployment, service.now))


async def test_each_job_of_a_round_gets_what_a_claim_of_it_alone_gives(service: Service) -> None:
    jobs = [await service.submit(name=f"n{number}") for number in range(3)]
    found = claimed(service, *map(wanted, jobs))
    alone = service.claim(await service.submit(name="alone"))
    assert alone is not None
    for number, (job_id, one) in enumerate(zip(jobs, found, strict=True)):
        assert one is not None
        assert (one.job_id, one.attempt, one.spec["name"]) == (job_id, 1, f"n{number}")
        assert {**one.spec, "name": "alone"} == alone.spec
        job = await service.jobs.get(job_id)
        assert (job.state, job.attempt, job.reason.code) == (JobState.STARTING, 1, "claimed")
        events = (await service.queries.events(job_id)).items
        assert [(event.seq, event.code) for event in events] == [(1, "submitted"), (2, "claimed")]
        (attempt,) = (await service.queries.attempts(job_id)).items
        assert (attempt.attempt, attempt.world_size) == (1, 1)


async def test_jobs_that_changed_since_they_were_seen_are_left_out(service: Service) -> None:
    jobs = {name: await service.submit(name=name) for name in ("held", "cancelled", "ran", "good")}
    await service.change(jobs["held"], held=True)
    await service.jobs.cancel(jobs["cancelled"])
    found = claimed(
        service,
        *(wanted(jobs["held"]), wanted(jobs["cancelled"]), wanted(jobs["ran"], attempt_seen=1)),
        *(wanted(jobs["good"]), wanted("job-nobody")),
    )
    assert [one and one.job_name for one in found] == [None, None, None, "good", None]
    assert (await service.jobs.get(jobs["held"])).state is JobState.QUEUED


async def test_a_job_that_fails_its_claim_takes_no_other_along(service: Service) -> None:
    spent, good = await service.submit(max_runtime_s=5), await service.submit()

    def spend(session: Session) -> None:
        row = repository.lock(session, spent)
        assert row is not None
        row.runtime_used_s = 5.0

    service.database.write_sync(spend)
    found = claimed(service, wanted(spent), wanted(good))
    assert [one is None for one in found] == [True, False]
    job = await service.jobs.get(spent)
    assert (job.state, job.reason.code) == (JobState.FAILED, "runtime_exceeded")


def test_a_remembered_document_keeps_its_own_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    first = spec(name="seeded").model_dump(mode="json")
    second = {**first, "train": {**first["train"], "seed": 7}}
    assert checked(first).document == first
    monkeypatch.setattr(documents, "read", None)  # the second one is not checked again
    assert checked(second).document == second
    assert checked(second).spec.train.seed == 7


@pytest.mark.parametrize("seed", [-1, 2**63, "7", True, None])
def test_a_seed_that_no_document_may_have_is_refused(seed: object) -> None:
    document = spec(name="badly seeded").model_dump(mode="json")
    checked(document)
    document["train"]["seed"] = seed
    with pytest.raises(DocumentRefused):
        checked(document)
