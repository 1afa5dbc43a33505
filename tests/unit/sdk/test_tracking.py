"""Searches, comparisons, experiments, notes and frames in both clients."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from dray import AsyncClient, Client, errors, frames, views
from tests.unit.api.serving import LiveServer
from tests.unit.service.helpers import metrics


def trained(server: LiveServer, accuracy: float, lr: float, **fields: Any) -> str:
    job_id = server.submit(train={"optimizer": {"lr": lr}}, **fields)
    server.train(job_id, metrics(1, {"val/accuracy": 0.25}))
    server.succeed(job_id, metrics(2, {"val/accuracy": accuracy}))
    return job_id


@pytest.fixture(scope="module")
def jobs(server: LiveServer) -> list[str]:
    labels = {"experiment": "sdk/tracking"}
    return [trained(server, 0.5, 0.1, labels=labels), trained(server, 0.75, 0.01, labels=labels)]


def test_both_clients_search_compare_and_annotate(server: LiveServer, jobs: list[str]) -> None:
    with Client(server.url) as client:
        where = "experiment = 'sdk/tracking' and val/accuracy > 0.6"
        assert [job.id for job in client.jobs(where=where)] == jobs[1:]
        with pytest.raises(errors.InvalidSearch, match="column 10: expected a number"):
            next(client.jobs(where="val/a >= "))
        found = client.compare(client.jobs(where="experiment = 'sdk/tracking'"))
        assert [job.id for job in found.jobs] == jobs[::-1]
        assert found.differences[0].values == [0.01, 0.1]
        assert client.pin_baseline("sdk/tracking", jobs[0]).baseline == jobs[0]
        assert client.compare([jobs[1]]).metrics[0].changes == [0.0, 0.25]
        changed = client.annotate(jobs[0], add_tags=["good"], notes="why", revision=0)
        assert (changed.tags, changed.notes) == (["good"], "why")
        assert client.annotate(jobs[0], colour=3, revision=1).colour == 3
        assert client.get(jobs[0]).colour == client.annotations(jobs[0]).colour == 3
        assert client.annotate(jobs[0], colour="auto").colour is None
        for colour in (20, -1, 1.5, True):
            with pytest.raises(errors.Unprocessable):
                client.annotate(jobs[0], colour=colour)  # type: ignore[arg-type]
        with pytest.raises(errors.AnnotationsChanged):
            client.annotate(jobs[0], remove_tags=["good"], revision=0)
        with pytest.raises(errors.NotComparable):
            client.compare([server.submit()])

    async def ask() -> None:
        async with AsyncClient(server.url) as client:
            assert (await client.annotations(jobs[0])).notes == "why"
            assert "sdk/tracking" in [one.name async for one in client.experiments(page_size=1)]
            assert (await client.experiment("sdk/tracking")).num_jobs == 2
            where = "experiment = 'sdk/tracking'"
            assert (await client.compare(client.jobs(where=where))).baseline == jobs[0]
            assert (await client.pin_baseline("sdk/tracking", None)).baseline is None
            assert (await client.annotate(jobs[0], remove_tags=["good"])).tags == []
            with pytest.raises(errors.ExperimentNotFound):
                await client.experiment("none")

    asyncio.run(ask())


def test_frames_without_pandas_say_what_to_install(
    server: LiveServer, jobs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with Client(server.url) as client:
        for frame in (client.frame, client.series_frame):
            with pytest.raises(
                ImportError, match=r"DataFrames require the package pandas: pip install"
            ):
                frame(jobs)


NO_PANDAS = "the extra 'dev' is not installed: pandas"


def test_frames_have_a_row_for_each_job_and_each_point(server: LiveServer, jobs: list[str]) -> None:
    pytest.importorskip("pandas", reason=NO_PANDAS)
    waits = server.submit(name="waits")
    with Client(server.url) as client:
        frame = client.frame([*jobs, client.get(waits)])
        assert list(frame.index) == [*jobs, waits]
        assert frame.loc[jobs[1], "val/accuracy"] == 0.75
        assert frame["val/accuracy"].isna().tolist() == [False, False, True]
        assert frame.loc[jobs[0], "train.optimizer.lr"] == 0.1
        assert "train.epochs" not in frame.columns
        assert frame["state"].tolist() == ["SUCCEEDED", "SUCCEEDED", "QUEUED"]
        assert str(frame["created_at"].dtype).startswith("datetime64")
        series = client.series_frame(jobs, ["val/accuracy"])
        assert series["value"].tolist() == [0.25, 0.5, 0.25, 0.75]
        assert series["job"].tolist() == [jobs[0], jobs[0], jobs[1], jobs[1]]
        assert client.frame([]).empty
        assert client.series_frame([]).empty

    async def ask() -> None:
        async with AsyncClient(server.url) as client:
            found = await client.frame(client.jobs(where="experiment = 'sdk/tracking'"))
            assert list(found.index) == jobs[::-1]
            assert len(await client.series_frame(jobs)) == 4

    asyncio.run(ask())


def test_values_that_json_names_are_numbers_in_a_frame() -> None:
    pytest.importorskip("pandas", reason=NO_PANDAS)
    series = {"x": views.Series(steps=[1, 2], values=["NaN", "-Infinity"])}
    frame = frames.of_series([("job-a", views.Metrics(series=series, next_step=2))])
    assert frame["value"].isna().tolist() == [True, False]
    assert frame["value"][1] == float("-inf")
