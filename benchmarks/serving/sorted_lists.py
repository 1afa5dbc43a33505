"""Sorted lists of 100,000 jobs, compared with the list in the order of submission."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import httpx
from sqlalchemy import text
from sqlalchemy.orm import Session

from benchmarks.figures import ratio_of_medians
from benchmarks.machine import wait_until_quiet
from benchmarks.report import Comparison, Result, Row, Table, seconds
from benchmarks.serving import jobs, load
from benchmarks.serving.scale import DATABASES, make_database
from benchmarks.serving.servers import Running, dray, postgres
from service.config.settings import Settings
from service.db.repositories.catalog import document_values
from service.db.session import Database
from service.domain.tracking.document_values import defaults

NUM_JOBS = 100_000
BLOCK_REQUESTS = 50
GOAL_S, FILTERED_GOAL_S = 0.05, 0.3
COLUMNS = "name,lr,val/accuracy,best:val/accuracy,cost,duration"
SEARCH = "val/loss < 0.5 and train.optimizer.lr < 0.5"
PLAIN = "newest first"
LISTS: Mapping[str, tuple[str, float]] = {
    PLAIN: ("", GOAL_S),
    "newest first, with columns": (f"columns={COLUMNS}", GOAL_S),
    **{
        f"by {sort}": (f"sort={sort}&columns={COLUMNS}", GOAL_S)
        for sort in (
            *("val/accuracy", "-val/accuracy", "-best:val/accuracy", "rare/metric", "lr", "-lr"),
            *("weight_decay", "train.precision", "cost", "-duration", "started_at", "name"),
            *("-labels.experiment", "state"),
        )
    },
    **{
        f"by -best:val/accuracy, {what}": (
            f"sort=-best:val/accuracy&columns={COLUMNS}&{query}",
            goal,
        )
        for what, query, goal in (
            ("of one experiment in 100", "label=experiment%3De7", GOAL_S),
            ("of one owner in 5", "owner=user-3", GOAL_S),
            ("of one state in 10", "state=FAILED", GOAL_S),
            ("of a state that most have", "state=SUCCEEDED", GOAL_S),
            ("with a name that contains a text", "text=its", FILTERED_GOAL_S),
            ("with a name that no job has", "text=nothing", FILTERED_GOAL_S),
            ("of a search", f"where={quote(SEARCH)}", FILTERED_GOAL_S),
        )
    },
    "by lr, of one experiment in 100": (
        f"sort=lr&columns={COLUMNS}&label=experiment%3De7",
        GOAL_S,
    ),
    "by lr, of one state in 10": (f"sort=lr&columns={COLUMNS}&state=FAILED", GOAL_S),
}

METHOD = (
    f"Two servers (`python -m api --no-loops`), on SQLite and on PostgreSQL with default settings, "
    f"each with {NUM_JOBS:,} finished jobs: 100 experiments, 5 owners, one state in ten FAILED, a "
    "random `val/accuracy` for each job, a `rare/metric` for one job in 100, a random learning "
    "rate in every second document, and a random cost and duration.",
    "Each request is for 50 jobs without their documents (`brief=true`): the first page, and a "
    "page behind the first 5,000 jobs, alternately. Blocks of "
    f"{BLOCK_REQUESTS} sequential requests over one connection alternate between all lists. The "
    "first round is not counted.",
    "The table shows the latencies of single requests, and the ratio of the medians to that of the "
    "list in the order of submission.",
)


@dataclass
class Site:
    """One server and the requests to it."""

    server: Running
    requests: dict[str, Iterator[bytes]]
    samples: dict[str, list[float]] = field(default_factory=dict)

    def block(self, what: str, *, counts: bool) -> None:
        requests = self.requests[what]
        done = asyncio.run(
            load.ask(self.server.port, lambda: next(requests), num_requests=BLOCK_REQUESTS)
        )
        if counts:
            self.samples.setdefault(what, []).extend(done.latencies_s)


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    with ExitStack() as stack:
        sites = stack.enter_context(_sites(progress))
        for number in range(num_rounds + 1):
            wait_until_quiet(at_most_s=10)
            for what in LISTS:
                for site in sites.values():
                    site.block(what, counts=number > 0)
            progress(f"round {number} of {num_rounds}")
    return conclude({database: site.samples for database, site in sites.items()})


@contextmanager
def _sites(progress: Callable[[str], None]) -> Iterator[dict[str, Site]]:
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dray-bench-")))
        url, processes = stack.enter_context(postgres())
        sites = {}
        for database in DATABASES:
            home = root / database
            is_sqlite = database == "SQLite"
            database_url = "" if is_sqlite else make_database(url, "sorted_lists")
            progress(f"writing {NUM_JOBS:,} jobs into {database}")
            jobs.finished(home, NUM_JOBS, database_url)
            write_values(home, database_url)
            beside = [] if is_sqlite else processes
            server = stack.enter_context(dray(home, database_url=database_url, beside=beside))
            sites[database] = Site(server, _requests(server.port))
        yield sites


def write_values(home: Path, database_url: str) -> None:
    """Write the values by which the jobs are sorted."""
    database = Database(Settings(home=home, database_url=database_url).database_url)
    try:
        database.write_sync(lambda session: document_values.insert_shared(session, defaults()))
        database.write_sync(lambda session: _write(session, is_sqlite=database.is_sqlite))
        if not database.is_sqlite:
            with database.engine.connect() as connection:
                outside = connection.execution_options(isolation_level="AUTOCOMMIT")
                outside.execute(text("VACUUM ANALYZE"))
    finally:
        database.close()


def _write(session: Session, *, is_sqlite: bool) -> None:
    chance = "(abs(random()) / 9223372036854775807.0)" if is_sqlite else "random()"
    copies = "FROM jobs WHERE id LIKE 'job-0000000000%'"
    plus = "datetime(created_at, '+' || number || ' seconds') || '.000000'"
    if not is_sqlite:
        plus = "created_at + number * interval '1 second'"
    summary = (
        "INSERT INTO metric_summaries (job_id, key, last_step, last_value, min_step, min_value, "
        "max_step, max_value, minimised, best_value) SELECT id, '{key}', 9, v, 9, v, 9, v, false, "
        f"v FROM (SELECT id, {chance} AS v {copies} {{and_}}) AS drawn"
    )
    for statement in (
        f"UPDATE jobs SET ran_s = {chance} * 1000, started_at = {plus}, "
        "owner = 'user-' || (number % 5), "
        "state = CASE WHEN number % 10 = 0 THEN 'FAILED' ELSE state END, "
        "name = 'digits-' || (number % 1000) WHERE id LIKE 'job-0000000000%'",
        "INSERT INTO job_labels (job_id, key, value) "
        f"SELECT id, 'experiment', 'e' || (number % 100) {copies}",
        f"INSERT INTO job_costs (job_id, total) SELECT id, {chance} {copies}",
        summary.format(key="val/accuracy", and_=""),
        summary.format(key="val/loss", and_=""),
        summary.format(key="rare/metric", and_="AND number % 100 = 0"),
        "INSERT INTO document_values (holder, pointer, text) "
        f"SELECT id, '', '{defaults().holder}' {copies}",
        "INSERT INTO document_values (holder, pointer, number) "
        f"SELECT id, '/train/optimizer/lr', {chance} {copies} AND number % 2 = 0",
    ):
        session.execute(text(statement))


def _requests(port: int) -> dict[str, Iterator[bytes]]:
    found = {}
    for what, (query, _) in LISTS.items():
        path = f"/v1/jobs?brief=true&limit=50&{query}"
        cursor = _from_the_middle(port, path)
        paths = [path, path if cursor is None else f"{path}&cursor={cursor}"]
        found[what] = _cycle([load.get(path, port) for path in paths])
    return found


def _from_the_middle(port: int, path: str) -> str | None:
    """Return the cursor of a page behind 5,000 jobs of the list; None if it is shorter."""
    cursor: str | None = None
    for _ in range(10):
        more = "" if cursor is None else f"&cursor={cursor}"
        url = f"http://127.0.0.1:{port}{path.replace('limit=50', 'limit=500')}{more}"
        response = httpx.get(url, trust_env=False, timeout=60)
        cursor = response.raise_for_status().json()["next_cursor"]
        if cursor is None:
            return None
    return cursor


def _cycle(requests: list[bytes]) -> Iterator[bytes]:
    while True:
        yield from requests


def conclude(samples: Mapping[str, Mapping[str, list[float]]]) -> Result:
    rows, comparisons, latencies = [], [], []
    for database, of_lists in samples.items():
        plain = of_lists[PLAIN]
        for what, times in of_lists.items():
            goal_s = LISTS[what][1]
            p99 = _p99(times)
            latencies.append([database, what, seconds(_p50(times)), seconds(p99), seconds(goal_s)])
            rows.append(Row(f"{database}: {what}", times))
            comparisons.append(
                Comparison(
                    label=f"{what} / {PLAIN}, {database}",
                    n=len(times),
                    ratio=ratio_of_medians(times, plain),
                    same=ratio_of_medians(plain[::2], plain[1::2]),
                    goal=f"p99 at most {seconds(goal_s)}",
                    met=p99 <= goal_s,
                )
            )
    columns = ["", "list", "p50", "p99", "goal of p99"]
    return Result(
        name="sorted_lists",
        title="Sorted lists of jobs",
        method=METHOD,
        rows=rows,
        comparisons=comparisons,
        tables=[Table("Latency of a request", columns, latencies)],
    )


def _p50(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def _p99(times: list[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(0.99 * len(times)))]
