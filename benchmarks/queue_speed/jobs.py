"""One turn of a round, run as a separate process: `python -m benchmarks.queue_speed.jobs ...`.

It prints its figures as JSON. dray runs in one process with the API, loops and cluster. The peers
also run their workers and submissions in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.orm import Session

from benchmarks.queue_speed.instant_cluster import STAYS, InstantCluster
from dray.spec import JobSpec
from dray.views import JobState
from service.config.settings import Settings
from service.runtime import Runtime, tune_interpreter

NUM_NODES, CPUS_PER_NODE = 128, 8
JOB = {"name": "noop", "recipe": "image_classification"}
LOOK_S = 0.01
WARM_UP = 20
Figures = Mapping[str, float]


def one() -> JobSpec:
    return JobSpec.model_validate(JOB)


def array(size: int) -> JobSpec:
    return JobSpec.model_validate(JOB | {"array": {"size": size}})


def waiting(size: int) -> JobSpec:
    """Return a job that never ends, and others that wait for it."""
    return JobSpec.model_validate(
        JOB | {"name": STAYS, "array": {"size": size + 1, "max_running": 1}}
    )


@asynccontextmanager
async def service(home: Path, database_url: str) -> AsyncIterator[Runtime]:
    """Run dray on the instant cluster. Yields it after it has run some jobs."""
    settings = Settings(
        home=home / "home",
        database_url=database_url,
        storage_url=(home / "storage").as_uri(),
        ray_address="instant:6379",
        max_array_size=1_000_000,
    )
    cluster = InstantCluster(NUM_NODES, CPUS_PER_NODE)
    runtime = await Runtime.open(settings, cluster=cluster)
    try:
        for _ in range(WARM_UP):
            await runtime.jobs.submit(one())
        await until_done(runtime)
        tune_interpreter()
        yield runtime
    finally:
        await runtime.stop()


async def until_done(runtime: Runtime) -> None:
    """Wait until all jobs have ended."""
    while await runtime.database.read(_is_one_unfinished):
        await asyncio.sleep(LOOK_S)


def _is_one_unfinished(session: Session) -> bool:
    query = text("SELECT EXISTS (SELECT 1 FROM jobs WHERE finished_at IS NULL)")
    return bool(session.scalar(query))


class Watch:
    """Measures elapsed seconds, and CPU seconds of this process."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._processor_s = time.process_time()
        self._submit_s = 0.0

    def submitted(self) -> None:
        self._submit_s = time.perf_counter() - self._began

    def figures(self) -> Figures:
        """Return the figures. Call after all jobs have ended."""
        all_s = time.perf_counter() - self._began
        processor_s = time.process_time() - self._processor_s
        return {"submit_s": self._submit_s, "all_s": all_s, "processor_s": processor_s}


async def through(runtime: Runtime, submit: Callable[[], Awaitable[object]]) -> Figures:
    """Return the seconds until all jobs are submitted, and until all have ended."""
    watch = Watch()
    await submit()
    watch.submitted()
    await until_done(runtime)
    return watch.figures()


async def dray(home: Path, database_url: str, num_jobs: int, how: str) -> Figures:
    """Run dray's turn. how: `single` for one submission at a time, `concurrent` for sixteen at a
    time, or `array`."""
    left = iter(range(num_jobs))

    async def submit_rest() -> None:
        for _ in left:
            await runtime.jobs.submit(one())

    async def submit() -> None:
        if how == "array":
            await runtime.jobs.submit(array(num_jobs))
        else:
            await asyncio.gather(*(submit_rest() for _ in range(1 if how == "single" else 16)))

    async with service(home, database_url) as runtime:
        return await through(runtime, submit)


async def claimed_s(runtime: Runtime) -> float:
    """Return the seconds from a submission until its job is claimed."""
    began = time.perf_counter()
    job, _ = await runtime.jobs.submit(one())
    await runtime.jobs.wait(job.id, wait_s=60.0, known_state=JobState.QUEUED)
    return time.perf_counter() - began


def _same(number: int) -> int:
    return number


async def _nothing(number: int) -> None:
    """Do nothing: the work of a job."""


def huey(home: Path, num_jobs: int, workers: int) -> Figures:
    """Run huey's turn on SQLite, synced at each commit like dray's. Its results are kept and
    read."""
    from huey import SqliteHuey

    queue = SqliteHuey(filename=str(home / "huey.db"), fsync=True)

    noop = queue.task()(_same)
    consumer = queue.create_consumer(
        workers=workers, worker_type="thread", initial_delay=0.01, max_delay=0.05, periodic=False
    )
    consumer.start()
    for result in [noop(number) for number in range(WARM_UP)]:
        result.get(blocking=True)
    watch = Watch()
    results = [noop(number) for number in range(num_jobs)]
    watch.submitted()
    for result in results:
        result.get(blocking=True)
    figures = watch.figures()
    consumer.stop(graceful=True)
    return figures


async def procrastinate(database_url: str, num_jobs: int, workers: int, how: str) -> Figures:
    """Run procrastinate's turn on PostgreSQL. how: `array` defers all jobs in one call."""
    from procrastinate import App, PsycopgConnector

    app = App(connector=PsycopgConnector(conninfo=database_url))

    noop = app.task(name="noop")(_nothing)
    unfinished = "SELECT 1 FROM procrastinate_jobs WHERE status <> 'succeeded'"
    query = f"SELECT EXISTS ({unfinished}) AS is_one"

    async def until_none_is_left() -> None:
        while (await app.connector.execute_query_one_async(query))["is_one"]:
            await asyncio.sleep(LOOK_S)

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        working = asyncio.ensure_future(
            app.run_worker_async(
                concurrency=workers, install_signal_handlers=False, delete_jobs="never"
            )
        )
        for number in range(WARM_UP):
            await noop.defer_async(number=number)
        await until_none_is_left()
        watch = Watch()
        if how == "array":
            await noop.batch_defer_async(*({"number": number} for number in range(num_jobs)))
        else:
            for number in range(num_jobs):
                await noop.defer_async(number=number)
        watch.submitted()
        await until_none_is_left()
        figures = watch.figures()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queue_speed.jobs")
    parser.add_argument("contender", choices=("dray", "huey", "procrastinate"))
    parser.add_argument("how", choices=("single", "concurrent", "array"))
    parser.add_argument("num_jobs", type=int)
    parser.add_argument("home", type=Path)
    parser.add_argument(
        "--database", default="", help=("URL of an empty database (default: SQLite in the home)")
    )
    parser.add_argument("--workers", type=int, default=2, help="of a peer")
    options = parser.parse_args()
    home, num_jobs, how = options.home, options.num_jobs, options.how
    url = options.database or f"sqlite:///{home}/dray.db"
    if options.contender == "dray":
        figures = asyncio.run(dray(home, url, num_jobs, how))
    elif options.contender == "huey":
        figures = huey(home, num_jobs, options.workers)
    else:
        figures = asyncio.run(procrastinate(url, num_jobs, options.workers, how))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
