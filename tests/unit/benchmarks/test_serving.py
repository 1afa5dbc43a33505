"""The measurements of the service do the work that they claim, on both sides."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from benchmarks.machine import BenchmarkError
from benchmarks.serving import jobs, load, metrics, onlookers, plain, scale, start_up, status_get
from dray.filters import JobFilter
from service.config.settings import Settings
from service.db.session import Database
from service.jobs.service import Jobs
from service.jobs.status_cache import StatusCache
from service.storage.storage import Storage

ANSWERS = {
    b"/length": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"/chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
    b"/missing": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
}


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while request := await reader.readline():
        while await reader.readline() != b"\r\n":
            pass
        writer.write(ANSWERS[request.split()[1]])
    writer.close()


@pytest.mark.parametrize("path", ["/length", "/chunks"])
async def test_the_client_counts_every_answer(path: str) -> None:
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        request = load.get(path, port)
        done = await load.ask(port, lambda: request, num_requests=50, num_connections=4)
        assert len(done.latencies_s) == 50
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await load.exchange(reader, writer, request) == b"hello"
        writer.close()


async def test_an_answer_that_is_no_success_ends_the_measurement() -> None:
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(BenchmarkError, match="404"):
            await load.ask(port, lambda: load.get("/missing", port), num_requests=1)


def test_a_post_says_how_long_it_is() -> None:
    head, _, body = load.post("/v1/jobs", 1, b"{}").partition(b"\r\n\r\n")
    assert body == b"{}"
    assert b"Content-Length: 2" in head


async def test_the_jobs_are_there_and_the_plain_route_answers_as_dray_does(
    tmp_path: Path,
) -> None:
    ids = await asyncio.to_thread(jobs.finished, tmp_path, 30)
    settings = Settings(home=tmp_path)
    database = Database(settings.database_url)
    try:
        service = Jobs(database, Storage(settings.storage_url), database.signals, settings)
        page = await service.list(JobFilter(label=("team=a",)), limit=100)
        assert [job.id for job in page.items[1:]] == ids[::-1]
        ours = json.loads(await StatusCache(database).read(ids[7]))
        transport = httpx.ASGITransport(plain.create_app(tmp_path / "dray.db"))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            assert (await http.get(f"/v1/jobs/{ids[7]}")).json() == ours
            assert (await http.get("/v1/jobs/none")).status_code == 404
    finally:
        database.close()


def test_what_is_recorded_is_what_is_read(tmp_path: Path) -> None:
    service = metrics.Service(tmp_path)
    try:
        job_id = service.running_job()
        assert service.record(job_id, metrics.frames(1, 50)) > 0
        _, values = service.read(job_id)
        assert len(values) == 50
        _, values = service.read(job_id, 40)
        assert len(values) == 10
    finally:
        service.database.close()


def test_goals_are_judged_by_the_samples() -> None:
    samples = metrics.Samples([0.001] * 9, [0.1] * 9, [0.02] * 9, [0.002] * 9, [0.002] * 9)
    assert [each.met for each in metrics.conclude(samples).comparisons] == [True, True]
    slow = metrics.Samples([0.05] * 9, [0.1] * 9, [0.2] * 9, [0.002] * 9, [0.002] * 9)
    assert [each.met for each in metrics.conclude(slow).comparisons] == [False, False]
    turns = [onlookers.Turn(crowd, 100.0, 0.1) for crowd in [*onlookers.Crowd] * 4]
    assert onlookers.conclude(turns, onlookers.Seen([0.01] * 100)).comparisons[0].met
    assert not onlookers.conclude(turns, onlookers.Seen([0.2] * 100)).comparisons[0].met


class Server:
    port = 1

    def cpu_s(self) -> float:
        return 0.0


@pytest.mark.parametrize(("many_s", "met"), [(1.19, True), (1.21, False)])
def test_a_bound_is_held_by_the_ratio_itself_however_wide_its_interval(
    many_s: float, met: bool
) -> None:
    def site(middle_s: float) -> scale.Site:
        wall_s = [0.1 * middle_s] * 4 + [middle_s] + [10 * middle_s] * 4
        return scale.Site(Server(), {}, {"get": wall_s}, {"get": wall_s})  # type: ignore[arg-type]

    sites = {
        (database, number): site(many_s if number == scale.MANY else 1.0)
        for database in scale.DATABASES
        for number in (scale.FEW, scale.MANY)
    }
    for found in scale.conclude(sites).comparisons:
        assert found.ratio.low < scale.GOAL < found.ratio.high
        assert found.met is met


def test_a_slowdown_that_could_be_none_counts_as_it_was_measured() -> None:
    turns = [
        onlookers.Turn(crowd, 100.0 if crowd is onlookers.Crowd.NOBODY else slowed, 0.1)
        for slowed in (100.0, 90.0, 80.0)
        for crowd in onlookers.Crowd
    ]
    found = onlookers.conclude(turns, onlookers.Seen([0.01] * 9)).comparisons[0]
    assert found.ratio.low == 1.0
    assert not found.met


def test_a_command_is_judged_by_its_median_beside_what_python_itself_takes() -> None:
    took_s = dict.fromkeys([*start_up.OURS, *start_up.FLOORS], [0.1] * 9)
    took_s["dray ls"] = [0.31] * 5 + [0.1] * 4
    judged = {each.label: each.met for each in start_up.conclude(took_s).comparisons}
    assert judged["dray --help / 0.3 s"]
    assert not judged["dray ls / 0.3 s"]
    assert judged["dray ls / python -c 'pass'"] is None


def test_ratios_of_status_are_ours_over_theirs() -> None:
    def contender(label: str, seconds: float) -> status_get.Contender:
        made = status_get.Contender(label, Server(), lambda: b"")  # type: ignore[arg-type]
        made.wall_s, made.cpu_s = [seconds] * 6, [seconds] * 6
        return made

    found = status_get.conclude(
        {
            "dray": contender("dray", 1.0),
            "plain": contender("plain", 2.0),
            "mlflow": contender("mlflow", 10.0),
        }
    )
    assert [(each.ratio.value, each.met) for each in found.comparisons] == [
        (0.5, False),
        (0.5, False),
        (0.1, True),
        (0.1, True),
    ]
