"""The measurements of the page ask for what the page asks for, and judge by what they saw."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from api.page.static_files import FOLDER
from benchmarks.browsing import first_paint, open_pages, page_client, stores, table_speed
from benchmarks.browsing.browser import Visit
from benchmarks.browsing.page_client import JOB_POLLS, LIST_POLLS, METRICS, Asked
from benchmarks.machine import BenchmarkError
from dray.views import JobState
from service.config.settings import Settings
from service.db.session import Database
from service.jobs.queries import Queries
from service.jobs.service import Jobs
from service.storage.storage import Storage
from service.telemetry.series_filters import MetricsFilter


def turns(step_s: float) -> list[open_pages.Turn]:
    quiet = open_pages.Turn(False, 0.0, 7.0, 0.1, [0.1, 0.1, 9.0])
    watched = open_pages.Turn(True, 7.0, 14.0, 0.8, [step_s, step_s, 9.0])
    return [quiet, watched] * 3


def kinds(real: int = 10, route: str = "/v1/jobs") -> list[open_pages.Kind]:
    asked = Asked(routes=Counter({"/v1/jobs": 10}), latencies_s=[0.01] * 10)
    return [open_pages.Kind("the list", {"/v1/jobs": 1.0}, 10.0, asked, 10.0, {route: real})]


async def test_what_is_written_is_what_the_page_reads(tmp_path: Path) -> None:
    job_id = await asyncio.to_thread(stores.fill_dray, tmp_path, 2, 1100)
    settings = Settings(home=tmp_path)
    database = Database(settings.database_url)
    try:
        storage = Storage(settings.storage_url)
        jobs = Jobs(database, storage, database.signals, settings)
        assert (await jobs.get(job_id)).state.is_terminal
        queries = Queries(database, storage, database.signals, settings)
        found = (await queries.metrics(job_id, MetricsFilter(max_points=5000, times=True))).series
        assert set(found) == set(stores.KEYS)
        for points in found.values():
            assert points.steps == list(range(1, 1101))
            assert points.times is not None
    finally:
        database.close()


def test_runs_of_mlflow_are_copied_with_all_that_they_have(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        for table in stores.RUN_TABLES:
            database.execute(f"CREATE TABLE {table} (run_uuid TEXT, start_time INT, key TEXT)")
            database.execute(f"INSERT INTO {table} VALUES ('first', 5, 'a'), ('other', 5, 'b')")
        stores.copy_run(database, "first", 3)
        for table in stores.RUN_TABLES:
            rows = database.execute(f"SELECT * FROM {table} ORDER BY start_time").fetchall()
            assert [(len(name), at, key) for name, at, key in rows[2:]] == [
                (32, 6, "a"),
                (32, 7, "a"),
                (32, 8, "a"),
            ]


def test_imitated_pages_ask_as_often_as_the_page() -> None:
    job = (FOLDER / "views/job.js").read_text() + (FOLDER / "views/job/annotations.js").read_text()
    periods = dict(re.findall(r"const (\w+_MS) = (\d+);", job))
    text = job.replace(
        f"job.data?.state === '{JobState.RUNNING}' ? RUNNING_MS : 10000", "RUNNING_MS"
    )
    text = re.sub(r"\(found\) => pace\(.*, (\w+)\)\);", r"\1);", text)
    text = re.sub(r"\b\w+_MS\b", lambda name: periods.get(name[0], name[0]), text)
    text = text.replace("usePoll(path", "usePoll(`x/annotations`")
    polls = re.findall(r"usePoll\(`[^`]*?(/\w+|)`, \{\}, ([1-9]\d+)\)", text)
    found = {part if part != "/${jobId}" else "": int(ms) / 1000 for part, ms in polls}
    every = r"const EVERY_MS = (\d+);"
    curves = re.search(every, (FOLDER / "views/job/curves.js").read_text())
    listed = re.search(every, (FOLDER / "views/jobs.js").read_text())
    assert curves
    assert listed
    assert {**found, METRICS: int(curves[1]) / 1000} == JOB_POLLS
    assert next(iter(LIST_POLLS.values())) == int(listed[1]) / 1000


def test_routes_are_counted_without_ids() -> None:
    target = "http://127.0.0.1:80/v1/jobs/job-01abc/metrics?after_step=3"
    assert page_client.route_of(target) == "/v1/jobs/{job_id}/metrics"


@pytest.mark.parametrize(("step_s", "met"), [(0.104, True), (0.106, False)])
def test_open_pages_are_judged_by_median_steps(step_s: float, met: bool) -> None:
    (found,) = open_pages.conclude(turns(step_s), kinds()).comparisons
    assert found.ratio.value == pytest.approx(step_s / 0.1)
    assert found.met is met
    assert found.same.value == 1.0


def test_an_imitation_that_asks_for_less_is_refused() -> None:
    open_pages.check_imitation(kinds(14))
    with pytest.raises(BenchmarkError, match=r"for /v1/jobs 15 times, .* 10\.0 times in 10 s"):
        open_pages.check_imitation(kinds(15))
    with pytest.raises(BenchmarkError, match="also asks for /v1/cluster"):
        open_pages.check_imitation(kinds(1, "/v1/cluster"))


def test_the_table_is_judged_by_its_medians() -> None:
    found = table_speed.Samples(frames=[0.016] * 99 + [0.5])
    for times in (*found.first.values(), *found.orders.values()):
        times += [0.25, 0.15, 0.25, 9.0]
    result = table_speed.conclude(found)
    first = len(found.first)
    assert [each.met for each in result.comparisons] == [True] * first + [False] * len(found.orders)
    assert result.tables[0].rows == [["100", "16 ms", "33 ms", "0.5 s"]]


def test_first_paint_is_judged_beside_mlflow() -> None:
    contenders = first_paint.contenders_at(1, "job-1", 2, "run")
    for each in contenders:
        scale = 1.0 if each.server == "dray" else (1.9 if each.page == "list" else 2.1)
        each.visits += [Visit(scale, 2 * scale, round(1000 * scale), 5)] * 4
    found = first_paint.conclude(contenders).comparisons
    assert [each.met for each in found] == [False] * 3 + [True] * 3
