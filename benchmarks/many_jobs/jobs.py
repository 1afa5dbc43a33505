"""Running and waiting jobs, written directly to a database before a service uses it."""

from __future__ import annotations

import asyncio
import functools
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from benchmarks.many_jobs import workload
from dray.spec import JobSpec
from dray.views import JobState
from ray_workers.shared.contracts import Phase
from service.config.settings import Settings
from service.db.migrate import migrate
from service.db.models import AttemptRow, Base, JobRow, LogChunkRow, MetricChunkRow
from service.db.repositories.bulk import table_of
from service.db.session import Database
from service.domain.series import outline, pack, summarise
from service.jobs.service import Jobs
from service.storage.storage import Storage
from service.telemetry.log_lines import encode_line
from service.telemetry.log_writer import CHUNK_BYTES

SESSION = "many-jobs"
"""Session of the cluster on which the jobs run."""
BUNDLE = {"CPU": 1.0}
RUNNING, WAITING = "running-{:06d}", "waiting-{:06d}"
BATCH = 100


def node_of(number: int) -> str:
    """Return the node of a running job, which the job fills."""
    return f"node-{number:06d}"


def phase_of(number: int) -> int:
    return number % workload.NUM_PHASES


def write(settings: Settings, num_running: int, num_waiting: int) -> None:
    """Migrate an empty database and write the jobs to it."""
    database = Database(settings.database_url)
    try:
        migrate(database)
        asyncio.run(_write(database, settings, num_running, num_waiting))
    finally:
        database.close()


async def _write(
    database: Database, settings: Settings, num_running: int, num_waiting: int
) -> None:
    service = Jobs(database, Storage(settings.storage_url), database.signals, settings)
    document = {
        "name": "many",
        "recipe": "image_classification",
        "resources": {"num_workers": workload.NUM_RANKS},
    }
    template, _ = await service.submit(JobSpec.model_validate(document))
    waits = database.read_sync(lambda s: _row(s, template.id))
    runs, attempt = _running(waits, datetime.now(UTC))
    for start in range(0, num_running, BATCH):
        numbers = range(start, min(start + BATCH, num_running))
        database.write_sync(functools.partial(_run, job=runs, attempt=attempt, numbers=numbers))
    for start in range(0, num_waiting, BATCH):
        numbers = range(start, min(start + BATCH, num_waiting))
        rows = [{**waits, "id": WAITING.format(number)} for number in numbers]
        database.write_sync(functools.partial(_insert, kind=JobRow, rows=rows))
    database.write_sync(lambda s: _drop(s, template.id))


def _row(session: Session, job_id: str) -> dict[str, Any]:
    """Return the columns of a job, without the number that is assigned automatically."""
    table = table_of(JobRow)
    found = session.execute(select(table).where(table.c.id == job_id)).one()
    return {name: value for name, value in found._mapping.items() if name != "number"}


def _running(job: dict[str, Any], now: datetime) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the columns of a running job like this one, and of its attempt."""
    runs = {
        "state": JobState.RUNNING,
        "reason_code": "running",
        "reason_message": f"trains on {workload.NUM_RANKS} workers",
        "attempt": 1,
        "world_size": workload.NUM_RANKS,
        "started_at": now,
        "first_step_at": now,
        "num_metric_keys": len(workload.RANK_0),
    }
    attempt = {
        "attempt": 1,
        "phase": Phase.RUNNING,
        "bundle": BUNDLE,
        "world_size": workload.NUM_RANKS,
        "cluster_session": SESSION,
        "num_errors": 0,
        "created_at": now,
        "started_at": now,
        "first_metric_step": 1,
        "first_metric_at": now,
    }
    return job | runs, attempt


def _insert(session: Session, kind: type[Base], rows: list[dict[str, Any]]) -> None:
    session.execute(insert(table_of(kind)), rows)


def _drop(session: Session, job_id: str) -> None:
    session.delete(session.scalars(select(JobRow).where(JobRow.id == job_id)).one())


def _run(session: Session, job: dict[str, Any], attempt: dict[str, Any], numbers: range) -> None:
    """Insert running jobs, with the metrics and logs of their previous steps."""
    jobs, attempts, metrics, logs = [], [], [], []
    for number in numbers:
        job_id, phase = RUNNING.format(number), phase_of(number)
        step = workload.first_step(phase)
        jobs.append({**job, "id": job_id})
        held = [{"node_id": node_of(number), "num_workers": workload.NUM_RANKS}]
        attempts.append(
            {
                **attempt,
                "job_id": job_id,
                "slices": held,
                "cursor": workload.cursor_at(step),
                "last_metric_step": step or None,
            }
        )
        if step:
            metrics += [{"job_id": job_id, **chunk} for chunk in _metrics(step)]
        logs += [{"job_id": job_id, **chunk} for chunk in _logs(phase, step)]
    for kind, rows in (
        (JobRow, jobs),
        (AttemptRow, attempts),
        (MetricChunkRow, metrics),
        (LogChunkRow, logs),
    ):
        if rows:
            _insert(session, kind, rows)


def _metrics(step: int) -> list[dict[str, Any]]:
    """Return the open chunk of each series, up to this step."""
    steps = list(range(1, step + 1))
    chunks = []
    for rank in range(workload.NUM_RANKS):
        for index, name in enumerate(workload.names_of(rank)):
            values = [workload.value_of(rank, index, step) for step in steps]
            about = summarise(steps, values)
            assert about.low is not None
            assert about.high is not None
            chunks.append(
                {
                    "attempt": 1,
                    "key": name,
                    "rank": rank,
                    "is_open": True,
                    "count": about.count,
                    "first_step": about.first[0],
                    "first_value": about.first[1],
                    "last_step": about.last[0],
                    "last_value": about.last[1],
                    "min_step": about.low[0],
                    "min_value": about.low[1],
                    "max_step": about.high[0],
                    "max_value": about.high[1],
                    "outline": outline(steps, values),
                    "points": pack(steps, values),
                }
            )
    return chunks


def _logs(phase: int, step: int) -> list[dict[str, Any]]:
    """Return the open chunk of each rank's log, filled depending on the phase."""
    line = encode_line(1e9, workload.LINE.format(step=step, rank=0, loss=0.5))
    num_lines = CHUNK_BYTES * phase // workload.NUM_PHASES // len(line)
    if num_lines == 0:
        return []
    text = line * num_lines
    return [
        {
            "attempt": 1,
            "rank": rank,
            "first_line": 0,
            "num_lines": num_lines,
            "size_bytes": len(text),
            "incarnation": 0,
            "next_number": workload.num_lines(rank, step),
            "text": text,
        }
        for rank in range(workload.NUM_RANKS)
    ]
