"""Submit, list and get with few jobs in the table and with a million."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from benchmarks.figures import ratio_of_medians
from benchmarks.machine import wait_until_quiet
from benchmarks.report import Comparison, Result, Row, Table, seconds
from benchmarks.serving import jobs, load
from benchmarks.serving.servers import Running, dray, postgres

FEW, MANY = 1_000, 1_000_000
GOAL = 1.2
BLOCK_REQUESTS = 200
WHAT = ("submit", "get", "get from the table", "list", "list filtered", "list deep")
DATABASES = ("SQLite", "PostgreSQL")
BODY = json.dumps(jobs.SPEC.model_dump(mode="json")).encode()

METHOD = (
    f"Four servers (`python -m api --no-loops`): SQLite and PostgreSQL, each with {FEW:,} and "
    f"with {MANY:,} finished jobs in the table, each job with a label. All servers run during "
    "all turns. PostgreSQL is one server with default settings and a separate database for each.",
    f"submit: POST of a new job. get: GET of a different job each time, cycling through {FEW:,} "
    "jobs spread over the whole table; on SQLite, repeated requests are answered from memory. "
    "get from the table: the same with `wait_s=0`, which always reads from the database. list: "
    "the first page of 50. filtered: the same with a state and a label. deep: a page of 50 from "
    "further down in the table.",
    f"Blocks of {BLOCK_REQUESTS} sequential requests over one connection alternate. The first "
    "round is not counted, and each block of gets from the table is requested once beforehand, "
    "so that the disk is not compared. A sample is the mean of a block. CPU time is that of the "
    "server and, if applicable, all PostgreSQL processes, over all blocks, because the system "
    "counts it in hundredths of a second, which is too coarse for one block.",
    "Ratio of medians, many / few, with an interval from a bootstrap of both sides. A/A: odd "
    "blocks with few jobs against even blocks.",
)


@dataclass
class Site:
    """One server, and the requests for it."""

    server: Running
    requests: dict[str, Iterator[bytes]]
    wall_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)

    def block(self, what: str, *, counts: bool) -> None:
        requests = [next(self.requests[what]) for _ in range(BLOCK_REQUESTS)]
        if what == "get from the table":
            self._ask(requests)  # or it would be the disk that is compared
        before = self.server.cpu_s()
        done = self._ask(requests)
        if counts:
            used = (self.server.cpu_s() - before) / BLOCK_REQUESTS
            self.wall_s.setdefault(what, []).append(done.per_request_s)
            self.cpu_s.setdefault(what, []).append(used)

    def _ask(self, requests: list[bytes]) -> load.Load:
        each = iter(requests)
        return asyncio.run(
            load.ask(self.server.port, lambda: next(each), num_requests=len(requests))
        )


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    with ExitStack() as stack:
        sites = stack.enter_context(_sites(progress))
        for number in range(num_rounds + 1):
            wait_until_quiet(at_most_s=10)
            for what in WHAT:
                for site in sites.values():
                    site.block(what, counts=number > 0)
            progress(f"round {number} of {num_rounds}")
    return conclude(sites)


@contextmanager
def _sites(progress: Callable[[str], None]) -> Iterator[dict[tuple[str, int], Site]]:
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dray-bench-")))
        url, processes = stack.enter_context(postgres())
        sites = {}
        for database in DATABASES:
            for number in (FEW, MANY):
                home = root / f"{database}-{number}"
                database_url, beside = "", list[psutil.Process]()
                if database == "PostgreSQL":
                    database_url, beside = make_database(url, f"jobs_{number}"), processes
                progress(f"writing {number:,} jobs into {database}")
                ids = jobs.finished(home, number, database_url)
                server = stack.enter_context(dray(home, database_url=database_url, beside=beside))
                sites[database, number] = Site(server, _requests(server.port, ids))
        yield sites


def make_database(url: str, name: str) -> str:
    import psycopg
    from sqlalchemy import make_url

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return make_url(url).set(database=name).render_as_string(hide_password=False)


def _requests(port: int, ids: list[str]) -> dict[str, Iterator[bytes]]:
    spread = [ids[number * (len(ids) // FEW)] for number in range(FEW)]
    return {
        "submit": _cycle([load.post("/v1/jobs", port, BODY)]),
        "get": _cycle([load.get(f"/v1/jobs/{job_id}", port) for job_id in spread]),
        "get from the table": _cycle(
            [load.get(f"/v1/jobs/{job_id}?wait_s=0", port) for job_id in spread]
        ),
        "list": _cycle([load.get("/v1/jobs?limit=50", port)]),
        "list filtered": _cycle(
            [load.get("/v1/jobs?limit=50&state=SUCCEEDED&label=team%3Da", port)]
        ),
        "list deep": _cycle([load.get(f"/v1/jobs?limit=50&cursor={_middle(port)}", port)]),
    }


def _middle(port: int) -> str:
    """A cursor that pages through the first half of the smaller table would come to."""
    url = f"http://127.0.0.1:{port}/v1/jobs?limit={FEW // 2}"
    cursor: str = httpx.get(url, trust_env=False, timeout=60).json()["next_cursor"]
    return cursor


def _cycle(requests: list[bytes]) -> Iterator[bytes]:
    while True:
        yield from requests


def conclude(sites: dict[tuple[str, int], Site]) -> Result:
    rows, comparisons, cpu = [], [], []
    for database in DATABASES:
        few, many = sites[database, FEW], sites[database, MANY]
        for what in few.wall_s:
            rows.append(Row(f"{database}, {FEW:,} jobs: {what}", few.wall_s[what]))
            rows.append(Row(f"{database}, {MANY:,} jobs: {what}", many.wall_s[what]))
            ratio = ratio_of_medians(many.wall_s[what], few.wall_s[what])
            comparisons.append(
                Comparison(
                    label=f"{what} on {database}, {MANY:,} / {FEW:,} jobs",
                    n=len(few.wall_s[what]),
                    ratio=ratio,
                    same=ratio_of_medians(few.wall_s[what][::2], few.wall_s[what][1::2]),
                    goal=f"at most {GOAL}",
                    met=ratio.value <= GOAL,
                )
            )
            used = [sum(site.cpu_s[what]) / len(site.cpu_s[what]) for site in (few, many)]
            cpu.append([database, what, *map(seconds, used), f"{used[1] / used[0]:.2f}"])
    columns = ["", "", f"{FEW:,} jobs", f"{MANY:,} jobs", "ratio"]
    return Result(
        name="service_scale",
        title="Many jobs in the table",
        method=METHOD,
        rows=rows,
        comparisons=comparisons,
        tables=[Table("Processor time per request (mean)", columns, cpu)],
    )
