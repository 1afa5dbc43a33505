"""The variants of trials and the colours of jobs, wherever jobs are shown, with both databases."""

from __future__ import annotations

from typing import Any

from sqlalchemy import update

from dray.filters import JobFilter
from dray.requests import AnnotationRequest
from service.db.models import JobRow
from service.db.repositories.catalog import mlflow_exports
from service.db.repositories.submission import sweeps as sweeps_repository
from service.jobs.status_cache import StatusCache
from service.tracking.mlflow.parts import JobPart, next_part
from service.tracking.service import Tracking
from tests.unit.service.helpers import Service, spec

SWEEP: dict[str, Any] = {
    "metric": "val/loss",
    "sampler": "grid",
    "parameters": {
        "train.optimizer.lr": [0.1, 0.01],
        "model.width": [8, 16],
        "train.seed": [3],
    },
}
VARIANTS = ["#0 lr 0.1, width 8", "#1 lr 0.1, width 16", "#2 lr 0.01, width 8"]


async def swept(service: Service, **fields: Any) -> tuple[str, list[str]]:
    job, _ = await service.jobs.submit(spec(sweep={**SWEEP, **fields}), owner="ann")
    assert job.array_id is not None
    page = await service.jobs.sweeps.trials(job.array_id, limit=100, cursor=None)
    return job.array_id, [trial.job_id for trial in page.items]


def exported(service: Service, job_id: str) -> JobPart:
    """Return what the export of the job to MLflow begins with."""

    def work(session: Any) -> JobPart | None:
        mlflow_exports.add(session, [{"job_id": job_id, "number": 1}])
        return next_part(session, job_id)

    part = service.database.write_sync(work)
    assert part is not None
    return part


async def test_a_trial_has_its_variant_everywhere(service: Service) -> None:
    sweep_id, jobs = await swept(service)
    plain, _ = await service.jobs.submit(spec(name="plain"), owner="ann")
    assert plain.variant is None
    assert plain.title == "plain"
    first = await service.jobs.get(jobs[0])
    assert first.variant == VARIANTS[0]
    assert first.title == f"{first.name} {VARIANTS[0]}"
    trials = await service.jobs.sweeps.trials(sweep_id, limit=3, cursor=None)
    assert [trial.variant for trial in trials.items] == VARIANTS
    listed = await service.jobs.list(JobFilter(array=sweep_id), limit=10)
    assert [job.variant for job in listed.items][:0:-1] == VARIANTS
    assert (await service.jobs.list(JobFilter(name="plain"), limit=1)).items[0].variant is None
    compared = await Tracking(service.database).compare([jobs[2], plain.id])
    assert [job.variant for job in compared.jobs] == [VARIANTS[2], None]
    assert [job.array_id for job in compared.jobs] == [sweep_id, None]
    status = await StatusCache(service.database).read(jobs[1])
    assert f'"variant":"{VARIANTS[1]}"'.encode() in status
    part = exported(service, jobs[2])
    assert part.run.name == part.tags["mlflow.runName"] == f"{first.name} {VARIANTS[2]}"


async def test_a_trial_without_values_and_a_job_of_an_array_have_their_index(
    service: Service,
) -> None:
    array, _ = await service.jobs.submit(spec(array={"size": 2}), owner="ann")
    assert array.variant == "#0"
    _, jobs = await swept(service, sampler="optuna", trials=2)
    assert [(await service.jobs.get(one)).variant for one in jobs] == ["#0", "#1"]
    document = (await service.jobs.get(jobs[1])).spec
    values = {"train.optimizer.lr": 0.01, "model.width": 16, "train.seed": 3}
    service.database.write_sync(
        lambda s: sweeps_repository.set_values(s, jobs[1], values, document)
    )
    assert (await service.jobs.get(jobs[1])).variant == "#1 lr 0.01, width 16"


async def test_a_colour_is_kept_and_taken_back(service: Service) -> None:
    tracking = Tracking(service.database)
    job, _ = await service.jobs.submit(spec(), owner="ann")
    assert job.colour is None
    changed = await tracking.annotate(job.id, AnnotationRequest(colour=0), actor="ann")
    assert (changed.colour, changed.revision, changed.tags) == (0, 1, [])
    assert (await service.jobs.get(job.id)).colour == 0
    again = await tracking.annotate(job.id, AnnotationRequest(colour=0, notes=""), actor="bert")
    assert (again.revision, again.updated_by) == (1, "ann")
    await tracking.annotate(job.id, AnnotationRequest(add_tags=("good",)), actor="ann")
    assert (await tracking.annotations(job.id)).colour == 0
    gone = await tracking.annotate(job.id, AnnotationRequest(colour="auto"), actor="ann")
    assert (gone.colour, gone.tags) == (None, ["good"])
    assert (await service.jobs.get(job.id)).colour is None


async def test_a_default_that_an_older_document_lacks_is_no_difference(service: Service) -> None:
    old, _ = await service.jobs.submit(spec(), owner="ann")
    new, _ = await service.jobs.submit(spec(train={"epochs": 2}), owner="ann")
    train = {name: one for name, one in old.spec["train"].items() if name != "batch_scaling"}
    service.database.write_sync(
        lambda session: session.execute(
            update(JobRow).where(JobRow.id == old.id).values(spec={**old.spec, "train": train})
        )
    )
    found = await Tracking(service.database).compare([old.id, new.id])
    assert [one.pointer for one in found.differences] == ["/train/epochs"]
