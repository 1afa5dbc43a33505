"""Runs are found by the values of their jobs, with both databases."""

from __future__ import annotations

import math
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from dray.requests import MAX_NOTES, AnnotationRequest
from service.db.models import JobRow
from service.db.repositories.catalog import search as searches
from service.domain.errors import BadCursor, InvalidSearch, NotFound
from service.domain.tracking.mlflow_search import MAX_PATTERN
from service.telemetry.series_filters import MetricsFilter
from service.tracking.mlflow.queries import MlflowQueries, experiment_id
from service.tracking.service import Tracking
from tests.unit.service.helpers import Service, metrics


@pytest.fixture
def mlflow(service: Service) -> MlflowQueries:
    return MlflowQueries(service.database, service.queries)


async def test_each_kind_of_filter_finds_the_jobs_it_holds_for(
    service: Service, mlflow: MlflowQueries
) -> None:
    jobs = [
        await service.running(
            name=f"run_{number}",
            labels={"experiment": name, "odd/key": "x%y"} if number < 3 else {"experiment": ""},
            train={"optimizer": {"name": "adamw", "lr": lr}, "epochs": 3},
        )
        for number, (name, lr) in enumerate([("a", 1e-5), ("a", 0.5), ("b", 0.5), ("", 2.0)])
    ]
    for job_id, value in zip(jobs, (1.5, math.nan, math.inf, -2.0), strict=True):
        service.report(job_id, 1, [metrics(1, {"val/loss": value})])
    service.end(jobs[3], 1)
    written = AnnotationRequest(add_tags=("good", "bad"), notes="Best of the three.")
    await Tracking(service.database).annotate(jobs[1], written)
    everything = [experiment_id(name) for name in ("a", "b", "Default")]

    async def search(filter_: str = "", *order: str, within: list[str] = everything) -> list[int]:
        page = await mlflow.search(within, filter_, order, 100, None)
        return [jobs.index(job.id) for job in page.jobs]

    for filter_, found in {
        "": [3, 2, 1, 0],
        "metrics.`val/loss` < 10": [3, 0],
        "metrics.`val/loss` > 1e308": [2],
        "metrics.`val/loss` = 1.5": [0],
        "metrics.`val/loss` != 1.5": [3, 2],
        "metrics.none > 0": [],
        "params.train.optimizer.lr = '0.5'": [2, 1],
        "params.train.optimizer.lr = '1e-05'": [0],
        "params.train.optimizer.lr != '0.5'": [3, 0],
        "params.train.optimizer.lr IN ('2.0', '0.5')": [3, 2, 1],
        "params.train.epochs = '3' and params.recipe = 'image_classification'": [3, 2, 1, 0],
        "params.train.optimizer.name LIKE 'ada__'": [3, 2, 1, 0],
        "params.train.optimizer.name LIKE 'ADA%'": [],
        "run_name LIKE 'run[_*'": [],
        "params.train.optimizer.name ILIKE 'ADA%'": [3, 2, 1, 0],
        "params.none != 'x'": [],
        "params.`tr\"ain` = 'x'": [],
        "params.`{` = 'x'": [],
        "params.`train.}` LIKE 'x'": [],
        "params.`train, epochs` = '3'": [],
        "tags.experiment = 'a'": [1, 0],
        "tags.`mlflow.runName` = 'run_2'": [2],
        "tags.dray.state = 'SUCCEEDED'": [3],
        "tags.odd/key = 'x%y' and tags.odd/key LIKE 'x__'": [2, 1, 0],
        "tags.`dray.tags` LIKE '%good%'": [1],
        "tags.`mlflow.note.content` ILIKE 'best%'": [1],
        "status = 'FINISHED'": [3],
        "status IN ('RUNNING', 'NONSENSE')": [2, 1, 0],
        "status = 'NONSENSE'": [],
        f"run_id = '{jobs[1]}'": [1],
        "run_name NOT IN ('run_0', 'run_1')": [3, 2],
        "user_id = 'ann'": [3, 2, 1, 0],
        "end_time > 0": [3],
        "start_time < 1": [],
        "start_time < 1e300": [3, 2, 1, 0],
        "start_time > 1e300": [],
    }.items():
        assert await search(filter_) == found, filter_
    assert await search("", "metrics.`val/loss` DESC") == [2, 0, 3, 1]
    assert await search("", "metrics.`val/loss`", "run_name") == [3, 0, 2, 1]
    assert await search("", "params.train.optimizer.lr", "run_name DESC")
    assert await search("", "tags.experiment DESC", "start_time") == [2, 1, 0, 3]
    assert await search("", "status", "end_time", "params.`{`")
    assert await search("", within=[experiment_id("a")]) == [1, 0]
    assert await search("", within=["0"]) == [3]
    assert await search("", within=["none"]) == []


PARAMS = ("clé", 'a"b', "a\\b", "plain")


async def test_names_with_any_letters_and_quotes_are_found(
    service: Service, mlflow: MlflowQueries
) -> None:
    names = ["précision", 'a"b', "a\\b", "it's", "precision, recall", "日本", "a.b", "$[0]", '"']
    jobs = [await service.running(name=f"run_{at}") for at in range(2)]
    with Session(service.database.engine) as session, session.begin():
        for at, job_id in enumerate(jobs):
            row = session.scalars(select(JobRow).where(JobRow.id == job_id)).one()
            row.spec = {**row.spec, "labels": dict.fromkeys(PARAMS, f"é{at}")}
    for job_id, value in zip(jobs, (-math.inf, 0.5), strict=True):
        service.report(job_id, 1, [metrics(1, dict.fromkeys(names, value))])
    for name in names:
        for filter_, found in {
            f"metrics.`{name}` < 0": [0],
            f"metrics.`{name}` = 0.5": [1],
        }.items():
            page = await mlflow.search([experiment_id("Default")], filter_, (), 100, None)
            assert [jobs.index(job.id) for job in page.jobs] == found, filter_
        order = [f"metrics.`{name}` DESC"]
        page = await mlflow.search([experiment_id("Default")], "", order, 100, None)
        assert [jobs.index(job.id) for job in page.jobs] == [1, 0], name
    answer = await service.queries.metrics(jobs[1], MetricsFilter(keys=("precision, recall",)))
    assert answer.series.keys() == {"precision, recall"}
    answer = await service.queries.metrics(jobs[1], MetricsFilter(keys=("a.b,it's",)))
    assert answer.series.keys() == {"a.b", "it's"}


async def test_pages_stay_as_they_are_while_jobs_are_submitted(
    service: Service, mlflow: MlflowQueries
) -> None:
    jobs = [await service.submit() for _ in range(5)]
    page = await mlflow.search(["0"], "", [], 2, None)
    await service.submit()
    rest = await mlflow.search(["0"], "", [], 100, page.next_token)
    assert [job.id for job in [*page.jobs, *rest.jobs]] == jobs[::-1]
    assert rest.next_token is None
    with pytest.raises(BadCursor):
        await mlflow.search(["0"], "status = 'RUNNING'", [], 2, page.next_token)
    with pytest.raises(BadCursor):
        await mlflow.history(jobs[0], "loss", 2, page.next_token)


async def test_the_experiment_of_a_job_without_the_label_is_default(
    service: Service, mlflow: MlflowQueries
) -> None:
    await service.submit(labels={"experiment": "Default"})
    await service.submit()
    assert [one.id for one in await mlflow.experiments()] == ["0"]
    assert len((await mlflow.search(["0"], "", [], 100, None)).jobs) == 2


async def test_experiments_are_found_by_name(service: Service, mlflow: MlflowQueries) -> None:
    """With one of the patterns, a regular expression would try 10^15 ways of dividing a name."""
    long = 250 * "a"
    for name in ("a.bc", "Default", long):
        await service.submit(labels={"experiment": name})

    async def search(filter_: str) -> list[str]:
        return [found.name for found in await mlflow.experiments(filter_)]

    assert await search("") == ["Default", "a.bc", long]
    assert await search("name = 'a.bc'") == ["a.bc"]
    assert await search("name != 'a.bc'") == ["Default", long]
    assert await search("attribute.name LIKE 'a%_' AND name LIKE '%.%'") == ["a.bc"]
    assert await search("name LIKE 'A%'") == []
    assert await search("name ILIKE 'A.%'") == ["a.bc"]
    assert await search("name IN ('Default', 'x')") == ["Default"]
    assert await search(f"name LIKE '{10 * '%a'}b'") == []


@pytest.mark.parametrize("place", [True, -2, 1.5, 2**63, "x"])
async def test_forged_tokens_of_pages_are_refused(
    service: Service, mlflow: MlflowQueries, place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await service.submit()
    monkeypatch.setattr("service.tracking.mlflow.queries.decode_cursor", lambda *_: place)
    with pytest.raises(BadCursor):
        await mlflow.search(["0"], "", [], 10, "token")
    with pytest.raises(BadCursor):
        await mlflow.history(job_id, "loss", 10, "token")


async def test_a_history_of_a_job_that_is_not_there(mlflow: MlflowQueries) -> None:
    with pytest.raises(NotFound):
        await mlflow.history("job-none", "loss", 10, None)


async def test_a_search_that_takes_too_long_is_given_up(
    service: Service, mlflow: MlflowQueries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pattern matches late in long notes."""
    notes = AnnotationRequest(notes="a" * MAX_NOTES)
    for _ in range(4):
        await Tracking(service.database).annotate(await service.submit(), notes)
    late = f"tags.mlflow.note.content LIKE '%{'a' * (MAX_PATTERN - 3)}b%'"
    monkeypatch.setattr(searches, "LIMIT_S", 0.001)
    monkeypatch.setattr(searches, "_STEPS", 1)
    with pytest.raises(InvalidSearch, match="took longer"):
        await mlflow.search([experiment_id("Default")], late, [], 10, None)
