"""Fill the SQLite databases of dray and MLflow with the same jobs and series."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import numpy as np
from sqlalchemy import text
from sqlalchemy.orm import Session

from benchmarks.figures import Floats
from benchmarks.serving import jobs, servers
from benchmarks.serving.metrics import Service
from benchmarks.serving.status_get import make_run
from ray_workers.shared.contracts import Cause, Frame, FrameKind, Outcome
from service.db.models import MetricChunkRow
from service.db.repositories.bulk import table_of
from service.db.repositories.telemetry import open_chunks
from service.domain.series import TIMES
from service.telemetry.metric_writer import appended

KEYS = tuple(f"train/metric_{number:02d}" for number in range(20))
NUM_JOBS, NUM_POINTS = 10_000, 1_000_000
STEP_S = 0.05
"""Seconds between two points of a series."""
MLFLOW_WORKERS = 4
"""The default number of workers of `mlflow server`."""
RUN_TABLES = ("runs", "params", "tags", "metrics", "latest_metrics")
"""MLflow's tables that have rows for a run."""


def fill_dray(home: Path, num_jobs: int, num_points: int) -> str:
    """Write finished jobs to a new home, the newest of them with the series. Return its id."""
    jobs.finished(home, num_jobs)
    service = Service(home)
    try:
        job_id = service.running_job()
        values = _values(num_points)
        for index, key in enumerate(KEYS):
            _write(service, job_id, key, (index + 1) * values[:-1])
        newest = {key: (index + 1) * values[-1] for index, key in enumerate(KEYS)}
        _end(service, job_id, num_points, newest)
    finally:
        service.database.close()
    return job_id


def fill_runs(home: Path, num_runs: int, num_points: int) -> list[str]:
    """Write finished jobs with all series to a new home, and return their ids. The series of a job
    have equal values; each job has its own values."""
    service = Service(home)
    try:
        job_ids = [service.running_job() for _ in range(num_runs)]
        for number, job_id in enumerate(job_ids):
            values = _values(num_points, seed=number)
            _write(service, job_id, KEYS[0], values[:-1])
            _copy_series(service, job_id)
            _end(service, job_id, num_points, dict.fromkeys(KEYS, values[-1]))
    finally:
        service.database.close()
    return job_ids


def _copy_series(service: Service, job_id: str) -> None:
    """Copy the first series of a job to the other keys."""
    table = table_of(MetricChunkRow)
    columns = [column.name for column in table.columns if column.name not in ("id", "key")]
    kept = ", ".join(columns)

    def store(session: Session) -> None:
        for key in KEYS[1:]:
            session.execute(
                text(
                    f"INSERT INTO {table.name} (key, {kept}) SELECT :key, {kept} "
                    f"FROM {table.name} WHERE job_id = :job_id AND key = :first"
                ),
                {"key": key, "job_id": job_id, "first": KEYS[0]},
            )

    service.database.write_sync(store)


def _end(service: Service, job_id: str, num_points: int, newest: Mapping[str, float]) -> None:
    """Write the times of the steps, the last step, and the end of the job. The service stores the
    end as if it had stored everything before it."""
    times: Floats = np.linspace(time.time() - num_points * STEP_S, time.time(), num_points - 1)
    _write(service, job_id, TIMES, times)
    body = {"step": num_points, "total_steps": num_points, "values": newest}
    end = Outcome.of(Cause.SUCCEEDED, "it trained to its end")
    service.record(job_id, [Frame(0, 0, FrameKind.METRICS, time.time(), body)], end)


def _write(service: Service, job_id: str, key: str, values: Floats) -> None:
    """Write a series that begins at step 1, in chunks like the service's chunks."""
    chunks = appended(key, 0, None, list(range(1, len(values) + 1)), values.tolist())

    def store(session: Session) -> None:
        open_chunks.store(session, job_id, 1, chunks)

    service.database.write_sync(store)


@contextmanager
def mlflow(folder: Path, num_jobs: int, num_points: int) -> Iterator[tuple[servers.Running, str]]:
    """Run MLflow's server on a store with finished runs. Yields it and the id of the run with the
    series.

    Two runs are created by MLflow itself. Their copies and points are inserted by SQL, with the
    store's indexes.
    """
    with servers.mlflow(folder, num_workers=1) as server:
        template, run_id = (_finished_run(server.port) for _ in range(2))
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        database.execute("PRAGMA synchronous = OFF")
        with _without_indexes(database):
            copy_run(database, template, num_jobs)
            _write_points(database, run_id, num_points)
        database.commit()
    with servers.mlflow(folder, num_workers=MLFLOW_WORKERS) as server:
        yield server, run_id


def _finished_run(port: int) -> str:
    run_id = make_run(port)
    url = f"http://127.0.0.1:{port}/api/2.0/mlflow/runs/update"
    body = {"run_id": run_id, "status": "FINISHED", "end_time": round(1000 * time.time())}
    httpx.post(url, json=body, trust_env=False, timeout=60).raise_for_status()
    return run_id


@contextmanager
def _without_indexes(database: sqlite3.Connection) -> Iterator[None]:
    """Drop the indexes, and recreate them at the end."""
    found = database.execute(
        "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL "
        "AND tbl_name = 'metrics'"
    ).fetchall()
    for name, _ in found:
        database.execute(f"DROP INDEX {name}")
    yield
    for _, sql in found:
        database.execute(sql)


def copy_run(database: sqlite3.Connection, run_id: str, number: int) -> None:
    """Add copies of this run with different ids and start times."""
    changed = {"run_uuid": "printf('%032x', i)", "start_time": "start_time + i"}
    for table in RUN_TABLES:
        columns = [name for _, name, *_ in database.execute(f"PRAGMA table_info({table})")]
        values = [changed.get(name, name) for name in columns]
        database.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :number) "
            f"INSERT INTO {table} ({', '.join(columns)}) "
            f"SELECT {', '.join(values)} FROM n, {table} WHERE run_uuid = :run_id",
            {"number": number, "run_id": run_id},
        )


def _write_points(database: sqlite3.Connection, run_id: str, num_points: int) -> None:
    began = round(1000 * time.time()) - round(1000 * num_points * STEP_S)
    database.execute("CREATE TEMP TABLE points (step INTEGER PRIMARY KEY, value REAL)")
    steps = range(1, num_points + 1)
    database.executemany(
        "INSERT INTO points VALUES (?, ?)", zip(steps, _values(num_points).tolist(), strict=True)
    )
    for index, key in enumerate(KEYS):
        row = {"key": key, "scale": index + 1, "run": run_id, "began": began}
        made = f":key, :scale * value, :began + {round(1000 * STEP_S)} * step, :run, step, 0"
        columns = "(key, value, timestamp, run_uuid, step, is_nan)"
        database.execute(f"INSERT INTO metrics {columns} SELECT {made} FROM points", row)
        last = f"SELECT {made} FROM points WHERE step = {num_points}"
        database.execute(f"INSERT INTO latest_metrics {columns} {last}", row)


def _values(num_points: int, seed: int = 0) -> Floats:
    """Return a noisy decreasing curve."""
    noise = np.random.default_rng(seed).normal(0, 0.06, num_points)
    fall: Floats = 0.4 + 2.4 * np.exp(-8 * np.arange(num_points) / num_points) + noise
    return fall
