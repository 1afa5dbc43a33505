"""Elastic recipes report the duration of their steps, and the scheduler uses it."""

from __future__ import annotations

import pytest
from sqlalchemy.orm import Session

from dray.spec import JobSpec
from ray_workers.shared.contracts import Frame
from service.db.repositories import attempts
from service.domain.scheduling.elastic.sizing import ElasticJob, ReportedStep
from service.ingest.step_times import alike
from service.outlook.step_times import elastic_jobs
from tests.marks import RULES
from tests.unit.service.helpers import Service, metrics

pytestmark = RULES

ELASTIC = {
    "resources": {"num_workers": 4},
    "elastic": {"min_workers": 1},
    "train": {"global_batch_size": 64, "micro_batch_size": 16},
}


def at(step: int, speed: float) -> Frame:
    return metrics(step, {"x": 1.0}, total_steps=100, samples_per_s=speed)


async def training(service: Service, workers: int = 2, **fields: object) -> str:
    job_id = await service.submit(**{**ELASTIC, **fields})
    service.claim(job_id, workers=workers)
    service.report(job_id, 1)
    return job_id


def seen(service: Service) -> dict[str, ElasticJob]:
    return service.database.read_sync(elastic_jobs)


async def test_the_step_time_is_kept_with_the_size_that_it_was_taken_with(
    service: Service,
) -> None:
    job_id = await training(service)
    assert seen(service) == {}
    service.report(job_id, 1, [at(10, 32.0)])
    assert seen(service) == {
        job_id: ElasticJob(
            least=1,
            most=4,
            batch_size=64,
            micro_batch_size=16,
            step_times=(ReportedStep(2, 1, 64, 2.0),),
            in_place=True,
            steps_left=90,
        )
    }


async def test_small_changes_are_not_noted_and_large_ones_are_smoothed(service: Service) -> None:
    job_id = await training(service)
    for step, speed, expected in ((10, 32.0, 2.0), (11, 31.0, 2.0), (12, 16.0, 2.6)):
        service.report(job_id, 1, [at(step, speed)])
        (kept,) = seen(service)[job_id].step_times
        assert kept.seconds == pytest.approx(expected), step


async def test_speeds_that_no_column_takes_are_not_noted(service: Service) -> None:
    job_id = await training(service)
    service.report(job_id, 1, [at(10, 5e-324), at(11, -1.0)])
    service.report(job_id, 1, [at(12, -1.0)])
    assert seen(service) == {}


async def test_nothing_is_noted_while_nobody_knows_the_size(service: Service) -> None:
    job_id = await training(service)

    def lacks(session: Session) -> None:
        row = attempts.get(session, job_id, 1)
        assert row is not None
        row.lacking = 1

    service.database.write_sync(lacks)
    service.report(job_id, 1, [at(10, 32.0)])
    assert seen(service) == {}


async def test_jobs_of_fixed_size_tell_nothing(service: Service) -> None:
    job_id = await training(service, elastic=None, workers=4)
    service.report(job_id, 1, [at(10, 32.0)])
    assert seen(service) == {}


async def test_jobs_that_are_alike_tell_of_each_other_and_others_do_not(
    service: Service,
) -> None:
    first = await training(service, workers=4)
    service.report(first, 1, [at(10, 64.0)])
    service.end(first, 1)
    second = await training(service, workers=2)
    service.report(second, 1, [at(10, 40.0)])
    other = await training(service, workers=1, name="other")
    service.report(other, 1, [at(10, 40.0)])
    found = seen(service)
    assert set(found) == {second, other}, "the first has ended"
    assert set(found[second].step_times) == {
        ReportedStep(4, 1, 64, 1.0),
        ReportedStep(2, 1, 64, 1.6),
    }
    assert found[other].step_times == (ReportedStep(1, 1, 64, 1.6),)


def test_jobs_of_fine_tuning_with_different_methods_or_sources_are_not_alike() -> None:
    """A step of dpo computes two answers with two models."""
    sources = [{"source": "file:///a.jsonl"}, {"source": "file:///b.jsonl"}]
    keys = []
    for fields in (
        {},
        {"method": {"max_length": 64}},
        {"method": "dpo"},
        {"data": {"sources": sources[:1]}},
        {"data": {"sources": sources}},
    ):
        document = {"model": {"base": "file:///base"}, "data": sources[0], **fields}
        spec = JobSpec.model_validate({"recipe": "fine_tuning", **document})
        keys.append(alike(spec.model_dump(mode="json")))
    assert len(set(keys)) == len(keys)


async def test_a_job_that_wants_no_size_chosen_is_not_noted(service: Service) -> None:
    job_id = await training(service, elastic={"min_workers": 1, "by_speed": False})
    service.report(job_id, 1, [at(10, 32.0)])
    assert seen(service) == {}


RANGED = {
    "train": {"global_batch_size": 64, "batch_range": [32, 512], "measure_noise": True},
}


def with_batch(step: int, size: float, noise: float | None = None, speed: float = 32.0) -> Frame:
    values = {"train/global_batch_size": size}
    if noise is not None:
        values["train/gradient_noise_scale"] = noise
    return metrics(step, values, total_steps=100, samples_per_s=speed)


async def test_the_batch_in_force_and_the_noise_scale_are_kept_of_a_job_with_a_range(
    service: Service,
) -> None:
    job_id = await training(service, **RANGED)
    service.report(job_id, 1, [at(10, 32.0)])
    found = seen(service)[job_id]
    assert (found.batch_size, found.batch_range, found.noise_scale) == (64, (32, 512), None)
    service.report(job_id, 1, [with_batch(12, 64.0, 900.0), with_batch(14, 64.0)])
    found = seen(service)[job_id]
    assert (found.noise_scale, found.steps_left) == (900.0, 43), (
        "steps are counted in the least batch"
    )
    service.report(job_id, 1, [with_batch(20, 128.0, 910.0, 64.0)])
    found = seen(service)[job_id]
    assert (found.batch_size, found.noise_scale) == (128, 900.0)
    assert set(found.step_times) == {ReportedStep(2, 1, 64, 2.0), ReportedStep(2, 1, 128, 2.0)}


@pytest.mark.parametrize("size", [16.0, 1024.0, float("nan"), float("inf")])
async def test_a_batch_out_of_the_range_counts_as_not_said(service: Service, size: float) -> None:
    job_id = await training(service, **RANGED)
    service.report(job_id, 1, [with_batch(10, size, float("inf"))])
    found = seen(service)[job_id]
    assert (found.batch_size, found.noise_scale) == (64, None)


async def test_rounds_of_clients_are_no_step_times(service: Service) -> None:
    clients = {"clients": 20, "clients_per_round": 5, "rounds": 30}
    job_id = await training(service, train={}, federated=clients)
    service.report(job_id, 1, [at(10, 32.0)])
    assert seen(service) == {}
