"""The importance of parameters of sweeps and of jobs that a search finds, with both databases."""

from __future__ import annotations

from typing import Any

import pytest

from dray import views
from dray.filters import ImportanceFilter
from ray_workers.shared.contracts import Cause
from service.domain.errors import InvalidSearch, SweepNotFound, Unavailable
from service.tracking.importance import forest, process
from service.tracking.importance.service import Importances
from tests.unit.service.helpers import Service, metrics, spec

RATES = [0.1, 0.05, 0.01, 0.005, 0.001]
WIDTHS = [8, 16, 32, 64, 128]


def loss(lr: float, width: int) -> float:
    """A loss that depends on the rate much more than on the width."""
    return 10 * RATES.index(lr) + WIDTHS.index(width)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimate importances in this process, with fewer trees, which takes less time."""

    async def ask(question: Any) -> dict[str, Any]:
        return forest.answer(question)

    monkeypatch.setattr(process, "ask", ask)
    monkeypatch.setattr(forest, "NUM_TREES", 60)
    monkeypatch.setattr(forest, "NUM_RESAMPLES", 4)


async def swept(service: Service, owner: str = "ann") -> tuple[str, list[views.Trial]]:
    """A sweep of 25 trials, none of which has started."""
    wanted = {
        "metric": "val/loss",
        "sampler": "grid",
        "parameters": {
            "train.optimizer.lr": RATES,
            "model.width": WIDTHS,
            "train.schedule.name": ["constant"],
        },
    }
    job, _ = await service.jobs.submit(spec(sweep=wanted, max_retries=0), owner=owner)
    assert job.array_id is not None
    page = await service.jobs.sweeps.trials(job.array_id, limit=100, cursor=None)
    return job.array_id, page.items


def finish(service: Service, trial: views.Trial, cause: Cause = Cause.SUCCEEDED) -> None:
    assert trial.parameters is not None
    value = loss(trial.parameters["train.optimizer.lr"], trial.parameters["model.width"])
    values = {"val/loss": value, "other": 100.0 - value}
    assert service.claim(trial.job_id) is not None
    service.report(trial.job_id, 1, [metrics(1, values)])
    service.end(trial.job_id, 1, cause)


async def of_sweep(service: Service, sweep_id: str, **given: Any) -> views.Importance:
    given = {"metric": None, "include_stopped": False, **given}
    return await Importances(service.database).of_sweep(sweep_id, **given)


async def of_search(service: Service, **given: Any) -> views.Importance:
    return await Importances(service.database).of_search(ImportanceFilter(**given))


@pytest.mark.usefixtures("in_process")
async def test_the_rate_is_more_important_than_the_width(service: Service) -> None:
    sweep_id, trials = await swept(service)
    for trial in trials[:-1]:
        finish(service, trial)
    finish(service, trials[-1], Cause.USER_ERROR)
    found = await of_sweep(service, sweep_id)
    assert (found.metric, found.num_runs, found.num_sampled_from) == ("best:val/loss", 24, 24)
    assert found.left_out == {"failed": 1}
    assert found.reason is None
    assert found.explained is not None
    assert found.explained > 0.5
    assert [each.name for each in found.parameters] == ["train.optimizer.lr", "model.width"]
    first, second = found.parameters
    assert first.importance is not None
    assert second.importance is not None
    assert first.importance > 0.4 > second.importance
    assert first.low is not None
    assert first.high is not None
    assert first.low <= first.importance <= first.high
    assert found.constant == ["train.schedule.name"]
    other = await of_sweep(service, sweep_id, metric="other")
    assert [each.name for each in other.parameters] == ["train.optimizer.lr", "model.width"]
    by_search = await of_search(service, metric="val/loss", array=sweep_id)
    assert {each.name for each in by_search.parameters} == {"train.optimizer.lr", "model.width"}
    assert by_search.parameters[0].importance == pytest.approx(first.importance, abs=0.15)
    assert by_search.left_out == {"failed": 1}


async def test_runs_that_do_not_count_are_counted(service: Service) -> None:
    sweep_id, trials = await swept(service)
    for trial in trials[:3]:
        finish(service, trial)
    await service.jobs.cancel(trials[3].job_id)
    assert service.claim(trials[4].job_id) is not None
    service.report(trials[4].job_id, 1, [metrics(1, {"val/loss": float("nan")})])
    service.end(trials[4].job_id, 1, Cause.SUCCEEDED)
    found = await of_sweep(service, sweep_id)
    assert found.num_runs == 3
    assert found.left_out == {"cancelled": 1, "unfinished": 20, "without_value": 1}
    assert found.reason is not None
    assert found.reason.code == "too_few_runs"
    assert found.explained is None
    assert all(each.importance is None for each in found.parameters)
    by_search = await of_search(service, metric="best:val/loss", array=sweep_id)
    assert by_search.left_out == found.left_out


async def test_what_says_nothing_is_not_estimated(service: Service) -> None:
    nothing = await of_search(service, metric="val/loss")
    assert (nothing.num_runs, nothing.parameters) == (0, [])
    assert nothing.reason is not None
    impossible = await of_search(service, metric="val/loss", owner="\0")
    assert impossible.num_runs == 0
    for _ in range(20):
        job, _ = await service.jobs.submit(spec(), owner="ann")
        service.claim(job.id)
        service.report(job.id, 1, [metrics(1, {"val/loss": 1.0})])
        service.end(job.id, 1, Cause.SUCCEEDED)
    same = await of_search(service, metric="val/loss")
    assert same.reason is not None
    assert same.reason.code == "no_parameters"
    sweep_id, _ = await swept(service)
    for metric in ("name", "-val/loss", "labels.team", "state", "tags", ""):
        with pytest.raises(InvalidSearch) as refused:
            await of_sweep(service, sweep_id, metric=metric)
        assert refused.value.pointer == "/metric"
    for sweep in ("array-none", "\0", ""):
        with pytest.raises(SweepNotFound):
            await of_sweep(service, sweep)


async def test_a_process_that_fails_is_reported() -> None:
    with pytest.raises(Unavailable, match="KeyError"):
        await process.ask({})
