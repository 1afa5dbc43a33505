"""Sweeps: trials, values, early stopping, and completion, with both databases."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dray import views
from dray.filters import JobFilter
from dray.spec import JobSpec
from dray.views import JobState
from ray_workers.shared.contracts import Cause
from service.db.models import SweepRow, TrialRow, TrialRungRow
from service.domain.documents import read
from service.domain.errors import (
    ArrayTooLarge,
    BadCursor,
    DependencyNeverSatisfied,
    InvalidTrial,
    SamplerUnavailable,
    SweepNotFound,
)
from service.sweeps import optuna_sampler
from tests.unit.service.helpers import Service, events_of, metrics, spec

LRS = [0.1, 0.01, 0.001, 0.0001]
GRID: dict[str, Any] = {
    "metric": "val/loss",
    "sampler": "grid",
    "parameters": {"train.optimizer.lr": LRS},
}
HALVING = {"min_steps": 10, "eta": 2}


async def swept(service: Service, **fields: Any) -> tuple[str, list[str]]:
    """Return the id of a sweep, and the ids of its jobs by index."""
    job, created = await service.jobs.submit(spec(sweep={**GRID, **fields}), owner="ann")
    assert created
    assert job.array_id is not None
    return job.array_id, [trial.job_id for trial in await trials_of(service, job.array_id)]


async def trials_of(service: Service, sweep_id: str) -> list[views.Trial]:
    found: list[views.Trial] = []
    cursor = None
    while True:
        page = await service.jobs.sweeps.trials(sweep_id, limit=3, cursor=cursor)
        found += page.items
        if (cursor := page.next_cursor) is None:
            return found


def report(service: Service, job_id: str, *points: tuple[int, float]) -> None:
    frames = [metrics(step, {"val/loss": value, "other": 0.0}) for step, value in points]
    service.report(job_id, 1, frames)


def start(service: Service, *job_ids: str) -> None:
    for job_id in job_ids:
        assert service.claim(job_id) is not None


async def state_of(service: Service, job_id: str) -> JobState:
    return (await service.jobs.get(job_id)).state


def num_rows(service: Service) -> list[int]:
    return service.database.read_sync(
        lambda s: [s.query(kind).count() for kind in (SweepRow, TrialRow, TrialRungRow)]
    )


async def test_a_grid_makes_a_job_of_each_value_whose_document_is_complete(
    service: Service,
) -> None:
    sweep_id, jobs = await swept(service, max_running=2)
    sweep = await service.jobs.sweeps.get(sweep_id)
    assert (sweep.size, sweep.counts, sweep.max_running) == (4, {JobState.QUEUED: 4}, 2)
    assert (sweep.metric, sweep.mode, sweep.by, sweep.best) == ("val/loss", "min", "best", None)
    assert sweep.is_sweep
    trials = await trials_of(service, sweep_id)
    assert [trial.parameters for trial in trials] == [{"train.optimizer.lr": lr} for lr in LRS]
    for trial, lr in zip(trials, LRS, strict=True):
        document = read((await service.jobs.get(trial.job_id)).spec)
        assert document.sweep is None
        assert (document.train.optimizer.lr, document.train.seed) == (lr, 0)
        assert JobSpec.model_validate(document.model_dump()).num_jobs == 1
    claimed = service.claim(jobs[2])
    assert claimed is not None
    assert claimed.parameters == {"train.optimizer.lr": 0.001}
    assert claimed.array_index == 2


async def test_a_sweep_over_models_has_the_fields_of_each_model(service: Service) -> None:
    _, jobs = await swept(service, parameters={"model.name": ["mlp", "cnn", "resnet"]})
    names = [(await service.jobs.get(job)).spec["model"]["name"] for job in jobs]
    assert names == ["mlp", "cnn", "resnet"]


async def test_a_random_sweep_makes_the_same_trials_again(service: Service) -> None:
    given = {"sampler": "random", "trials": 7, "seed": 5}
    parameters = {"train.optimizer.lr": {"min": 1e-4, "max": 0.1, "log": True}}
    found = []
    for _ in range(2):
        sweep_id, _ = await swept(service, parameters=parameters, **given)
        found.append([trial.parameters for trial in await trials_of(service, sweep_id)])
    assert found[0] == found[1]
    assert len({str(values) for values in found[0]}) == 7


async def test_values_that_do_not_go_together_are_refused_and_nothing_is_stored(
    service: Service,
) -> None:
    parameters = {"train.optimizer.name": ["sgd", "adamw"], "train.optimizer.nesterov": [True]}
    document = spec(
        sweep={**GRID, "parameters": parameters},
        train={"optimizer": {"name": "sgd", "momentum": 0.9}},
    )
    with pytest.raises(InvalidTrial, match=r"trial 1 \(train.optimizer.name=adamw") as refused:
        await service.jobs.submit(document)
    assert refused.value.pointer == "/sweep/parameters"
    assert (await service.jobs.list()).items == []
    assert num_rows(service) == [0, 0, 0]


async def test_values_that_go_together_only_with_each_other_are_taken(service: Service) -> None:
    """The optimizer in the document, adamw, has no momentum."""
    parameters = {"train.optimizer.name": ["sgd"], "train.optimizer.momentum": [0.5, 0.9]}
    for sampler in ({}, {"sampler": "optuna", "trials": 2}):
        _, jobs = await swept(service, parameters=parameters, **sampler)
        assert len(jobs) == 2


async def test_values_of_optuna_that_never_go_together_are_refused(service: Service) -> None:
    parameters = {"train.optimizer.momentum": [0.5, 0.9]}
    with pytest.raises(InvalidTrial, match="momentum is an option of sgd and lars, not of adamw"):
        await swept(service, parameters=parameters, sampler="optuna", trials=2)


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"sampler": "random", "trials": 10**7}, "/sweep/trials"),
        ({"parameters": {"train.seed": {"min": 1, "max": 10**7}}}, "/sweep/parameters"),
    ],
)
async def test_ten_million_trials_are_refused_by_their_number(
    service: Service, fields: dict[str, Any], pointer: str
) -> None:
    with pytest.raises(ArrayTooLarge, match="has 10,000,000 trials, but this server") as refused:
        await swept(service, **fields)
    assert refused.value.pointer == pointer


async def test_optuna_is_refused_where_it_is_not_installed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optuna_sampler, "is_installed", lambda: False)
    with pytest.raises(SamplerUnavailable) as refused:
        await swept(service, sampler="optuna", trials=3)
    assert refused.value.pointer == "/sweep/sampler"
    assert "dray[optuna]" in (refused.value.hint or "")
    assert (await service.jobs.list()).items == []


async def test_the_best_trial_is_marked(service: Service) -> None:
    sweep_id, jobs = await swept(service)
    start(service, *jobs[:3])
    report(service, jobs[0], (1, 3.0), (2, 2.0), (3, 2.5))
    report(service, jobs[1], (1, math.nan))
    report(service, jobs[2], (1, 0.5))
    trials = await trials_of(service, sweep_id)
    seen = [(trial.value, trial.step, trial.last_step, trial.is_best) for trial in trials]
    assert seen == [
        (2.0, 2, 3, False),
        (None, None, 1, False),
        (0.5, 1, 1, True),
        (None, None, None, False),
    ]
    service.end(jobs[2], 1, Cause.BAD_DATA)
    best = (await service.jobs.sweeps.get(sweep_id)).best
    assert best is not None
    assert (best.index, best.value, best.is_best) == (0, 2.0, True)


async def test_the_last_value_counts_if_the_sweep_says_so(service: Service) -> None:
    sweep_id, jobs = await swept(service, by="last", mode="max")
    start(service, *jobs[:2])
    report(service, jobs[0], (1, 3.0), (2, 1.0))
    report(service, jobs[1], (1, 2.0))
    best = (await service.jobs.sweeps.get(sweep_id)).best
    assert best is not None
    assert (best.index, best.value) == (1, 2.0)


async def test_a_trial_that_is_worse_at_a_rung_is_stopped_and_has_not_failed(
    service: Service,
) -> None:
    sweep_id, jobs = await swept(service, early_stopping=HALVING)
    start(service, *jobs)
    for job_id, loss in zip(jobs, (2.0, 1.0, 3.0), strict=False):
        report(service, job_id, (5, 9.0), (10, loss))
    states = [await state_of(service, job_id) for job_id in jobs]
    assert states == [JobState.RUNNING, JobState.RUNNING, JobState.CANCELLING, JobState.STARTING]
    service.end(jobs[2], 1, Cause.STOPPED)
    job = await service.jobs.get(jobs[2])
    assert (job.state, job.reason.code) == (JobState.CANCELLED, "stopped_early")
    assert job.reason.message == (
        "stopped early at step 10: 2 of 2 trials that reached this step earlier had a better "
        "val/loss than 3, and only the best 1 in 2 continues"
    )
    codes = [event.code for event in await events_of(service, jobs[2], "state")]
    assert codes == ["submitted", "claimed", "running", "stopped_early", "stopped_early"]
    sweep = await service.jobs.sweeps.get(sweep_id)
    assert sweep.stopped_early == 1
    assert not sweep.has_bad_ends
    best = sweep.best
    assert best is not None
    assert best.index == 1


async def test_a_trial_without_a_number_is_stopped_once_another_has_one(service: Service) -> None:
    _, jobs = await swept(service, early_stopping=HALVING)
    start(service, *jobs)
    report(service, jobs[0], (10, math.nan))
    assert await state_of(service, jobs[0]) is JobState.RUNNING
    report(service, jobs[1], (10, 5.0))
    report(service, jobs[2], (10, math.nan))
    assert await state_of(service, jobs[1]) is JobState.RUNNING
    assert (await service.jobs.get(jobs[2])).reason.code == "stopped_early"


async def test_no_trial_is_stopped_for_one_that_has_failed_since(service: Service) -> None:
    _, jobs = await swept(service, early_stopping=HALVING)
    start(service, *jobs[:3])
    report(service, jobs[0], (10, 1.0))
    service.end(jobs[0], 1, Cause.CANNOT_RUN)
    assert await state_of(service, jobs[0]) is JobState.FAILED
    report(service, jobs[1], (10, 2.0))
    assert await state_of(service, jobs[1]) is JobState.RUNNING
    report(service, jobs[2], (10, 3.0))
    job = await service.jobs.get(jobs[2])
    assert job.reason.message.startswith("stopped early at step 10: 1 of 1 trials that reached")


async def test_a_trial_that_has_just_succeeded_is_not_stopped(service: Service) -> None:
    _, jobs = await swept(service, early_stopping=HALVING)
    start(service, *jobs[:2])
    report(service, jobs[0], (10, 1.0))
    service.end(jobs[1], 1, Cause.SUCCEEDED, frames=[metrics(10, {"val/loss": 2.0})])
    assert await state_of(service, jobs[1]) is JobState.SUCCEEDED
    assert num_rows(service)[2] == 2


async def test_a_trial_that_ends_badly_at_a_rung_is_stopped_rather_than_tried_again(
    service: Service,
) -> None:
    _, jobs = await swept(service, early_stopping=HALVING)
    start(service, *jobs[:2])
    report(service, jobs[0], (10, 1.0))
    service.end(jobs[1], 1, Cause.WORKER_LOST, frames=[metrics(10, {"val/loss": 2.0})])
    job = await service.jobs.get(jobs[1])
    assert (job.state, job.reason.code) == (JobState.CANCELLED, "stopped_early")


async def test_trials_that_are_judged_at_once_are_judged_one_after_the_other(
    service: Service,
) -> None:
    _, jobs = await swept(service, early_stopping=HALVING)
    start(service, *jobs)
    with ThreadPoolExecutor(4) as threads:
        reports = [
            asyncio.get_running_loop().run_in_executor(
                threads, report, service, job_id, (10, float(loss))
            )
            for loss, job_id in enumerate(jobs)
        ]
        await asyncio.gather(*reports)
    going = [await state_of(service, job_id) is JobState.RUNNING for job_id in jobs]
    assert going[0], "the best was stopped"
    assert num_rows(service)[2] == 4


async def test_a_job_after_a_sweep_starts_though_trials_were_stopped_early(
    service: Service,
) -> None:
    sweep_id, jobs = await swept(service, early_stopping=HALVING)
    after = await service.submit(after=[sweep_id])
    start(service, *jobs)
    for loss, job_id in enumerate(jobs):
        report(service, job_id, (10, float(loss)))
    for loss, job_id in enumerate(jobs):
        service.end(job_id, 1, Cause.SUCCEEDED if loss == 0 else Cause.STOPPED)
    counts = (await service.jobs.arrays.get(sweep_id)).counts
    assert counts == {JobState.SUCCEEDED: 1, JobState.CANCELLED: 3}
    assert await state_of(service, after) is JobState.QUEUED
    assert service.claim(after) is not None
    later = await service.submit(after=[sweep_id])
    assert service.claim(later) is not None
    with pytest.raises(DependencyNeverSatisfied):
        await service.submit(after=[jobs[3]])


async def test_each_trial_counts_as_a_job_of_its_own_before_and_after_its_end(
    service: Service,
) -> None:
    sweep_id, jobs = await swept(service, early_stopping=HALVING)

    async def waiting(on: str) -> list[str]:
        """Return the jobs of an array of which each waits for the trial with its index."""
        after = [{"job": sweep_id, "each": True, "on": on}]
        first = await service.jobs.get(await service.submit(array={"size": 4}, after=after))
        found = await service.jobs.list(JobFilter(array=first.array_id))
        return [job.id for job in sorted(found.items, key=lambda job: job.array_index or 0)]

    async def states(job_ids: list[str]) -> list[bool]:
        return [await state_of(service, job_id) is JobState.QUEUED for job_id in job_ids]

    conditions = ("success", "failure", "end")
    before = {on: await waiting(on) for on in conditions}
    start(service, *jobs)
    for loss, job_id in enumerate(jobs):
        report(service, job_id, (10, float(loss)))
    for loss, job_id in enumerate(jobs):
        service.end(job_id, 1, Cause.SUCCEEDED if loss == 0 else Cause.STOPPED)
    for on, expected in zip(conditions, ([1, 0, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1]), strict=True):
        assert await states(before[on]) == expected
        assert await states(await waiting(on)) == expected


async def test_a_sweep_goes_on_after_a_failure_up_to_its_limit(service: Service) -> None:
    sweep_id, jobs = await swept(service, max_failed=1)
    start(service, *jobs[:3])
    service.end(jobs[0], 1, Cause.BAD_DATA)
    assert await state_of(service, jobs[3]) is JobState.QUEUED
    service.end(jobs[1], 1, Cause.BAD_DATA)
    last = await service.jobs.get(jobs[3])
    assert (last.state, last.reason.code) == (JobState.CANCELLED, "too_many_failed")
    assert last.reason.message == "never started: 2 trials of its sweep failed, and max_failed is 1"
    assert await state_of(service, jobs[2]) is JobState.STARTING
    service.end(jobs[2], 1)
    sweep = await service.jobs.sweeps.get(sweep_id)
    assert sweep.is_settled()
    assert sweep.has_bad_ends


async def test_a_sweep_without_a_limit_goes_on_however_many_fail(service: Service) -> None:
    _, jobs = await swept(service)
    start(service, *jobs[:3])
    for job_id in jobs[:3]:
        service.end(job_id, 1, Cause.BAD_DATA)
    assert await state_of(service, jobs[3]) is JobState.QUEUED


async def test_a_retry_changes_neither_the_value_nor_the_rungs(service: Service) -> None:
    sweep_id, jobs = await swept(service, early_stopping=HALVING)
    start(service, jobs[0])
    report(service, jobs[0], (10, 1.0), (20, 2.0))
    service.end(jobs[0], 1, Cause.WORKER_LOST)
    service.advance(60.0)
    assert service.claim(jobs[0], 1) is not None
    service.report(jobs[0], 2, [metrics(10, {"val/loss": 0.1}), metrics(21, {"val/loss": 3.0})])
    trial = (await trials_of(service, sweep_id))[0]
    assert (trial.value, trial.step, trial.last_step) == (1.0, 10, 21)
    assert num_rows(service)[2] == 2


async def test_a_sweep_is_cancelled_and_deleted_as_an_array(service: Service) -> None:
    sweep_id, jobs = await swept(service, early_stopping=HALVING)
    start(service, jobs[0])
    report(service, jobs[0], (10, 1.0))
    array = await service.jobs.arrays.cancel(sweep_id)
    assert array.counts == {JobState.CANCELLING: 1, JobState.CANCELLED: 3}
    service.end(jobs[0], 1, Cause.STOPPED)
    assert (await service.jobs.get(jobs[0])).reason.code == "cancelled_by_user"
    best = (await service.jobs.sweeps.get(sweep_id)).best
    assert best is not None
    assert best.index == 0
    await service.jobs.delete(jobs[0])
    assert num_rows(service) == [1, 3, 0]
    await service.jobs.arrays.delete(sweep_id)
    assert num_rows(service) == [0, 0, 0]
    for call in (service.jobs.sweeps.get(sweep_id), trials_of(service, sweep_id)):
        with pytest.raises(SweepNotFound):
            await call


async def test_deleting_one_trial_after_the_other_leaves_nothing(service: Service) -> None:
    sweep_id, jobs = await swept(service)
    await service.jobs.arrays.cancel(sweep_id)
    for job_id in jobs:
        await service.jobs.delete(job_id)
    assert num_rows(service) == [0, 0, 0]


async def test_an_array_is_no_sweep(service: Service) -> None:
    job = await service.jobs.get(await service.submit(array={"size": 2}))
    assert job.array_id is not None
    with pytest.raises(SweepNotFound):
        await service.jobs.sweeps.get(job.array_id)
    assert not (await service.jobs.arrays.get(job.array_id)).is_sweep


async def test_a_cursor_is_of_one_sweep(service: Service) -> None:
    first, _ = await swept(service)
    second, _ = await swept(service)
    page = await service.jobs.sweeps.trials(first, limit=1, cursor=None)
    with pytest.raises(BadCursor):
        await service.jobs.sweeps.trials(second, limit=1, cursor=page.next_cursor)


async def test_trials_are_listed_by_their_index_over_all_pages(service: Service) -> None:
    sweep_id, _ = await swept(service, parameters={"train.seed": {"min": 1, "max": 13}})
    seeds = [(trial.parameters or {})["train.seed"] for trial in await trials_of(service, sweep_id)]
    assert seeds == list(range(1, 14))
