"""Many finished jobs, written directly to a database with SQL before a service uses it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.orm import Session

from dray.spec import JobSpec
from dray.views import JobState
from service.config.settings import Settings
from service.db.migrate import migrate
from service.db.models import JobLabelRow, JobRow
from service.db.session import Database
from service.jobs.service import Jobs
from service.storage.storage import Storage

SPEC = JobSpec.model_validate(
    {
        "name": "digits",
        "recipe": "image_classification",
        "labels": {"team": "a"},
        "resources": {"num_workers": 2},
    }
)
SUMMARY = {f"{part}/{name}": 0.5 for part in ("train", "val") for name in ("loss", "accuracy")} | {
    "perf/samples_per_s": 1000.0
}
COPIES = "job-0000000000{:016d}"
"""Ids that are older than any new id, in ascending order."""


def finished(home: Path, number: int, database_url: str = "") -> list[str]:
    """Write the given number of succeeded jobs, each with a label and an event, and return their
    ids."""
    settings = Settings(home=home, database_url=database_url)
    database = Database(settings.database_url)
    try:
        migrate(database)
        return asyncio.run(_finished(database, settings, number))
    finally:
        database.close()


async def _finished(database: Database, settings: Settings, number: int) -> list[str]:
    service = Jobs(database, Storage(settings.storage_url), database.signals, settings)
    job, _ = await service.submit(SPEC)
    await database.write(lambda session: _finish(session, job.id))
    await database.write(lambda session: _copy(session, job.id, number))
    if not database.is_sqlite:
        with database.engine.connect() as connection:
            outside = connection.execution_options(isolation_level="AUTOCOMMIT")
            outside.execute(text("VACUUM ANALYZE"))
            outside.execute(text("CHECKPOINT"))
    return [COPIES.format(copy) for copy in range(number)]


def _finish(session: Session, job_id: str) -> None:
    row = session.query(JobRow).filter_by(id=job_id).one()
    now = datetime.now(UTC)
    row.state, row.reason_code, row.reason_message = JobState.SUCCEEDED, "succeeded", "trained"
    row.attempt, row.summary = 1, SUMMARY
    row.started_at = row.first_step_at = row.finished_at = now
    row.progress = {
        "step": 1000,
        "total_steps": 1000,
        "epoch": 10,
        "samples_per_s": None,
        "earliest_end_at": None,
        "latest_end_at": None,
    }


def _copy(session: Session, job_id: str, number: int) -> None:
    """Copy the template for each number, inside the database."""
    if session.get_bind().dialect.name == "sqlite":
        series = (
            "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :number)"
        )
        source, name = "n", "printf('job-0000000000%016d', i)"
    else:
        series, source = "", "generate_series(0, :number - 1) AS n(i)"
        name = "'job-0000000000' || lpad(i::text, 16, '0')"
    columns = [c.name for c in JobRow.__table__.columns if c.name not in ("number", "id")]
    named = ", ".join(columns)
    values = {"number": number, "job_id": job_id}
    session.execute(
        text(
            f"{series} INSERT INTO jobs (id, {named}) "
            f"SELECT {name}, {', '.join(f't.{column}' for column in columns)} "
            f"FROM {source}, jobs AS t WHERE t.id = :job_id"
        ),
        values,
    )
    label = JobLabelRow.__tablename__
    session.execute(
        text(
            f"{series} INSERT INTO {label} (job_id, key, value) "
            f"SELECT {name}, t.key, t.value FROM {source}, {label} AS t WHERE t.job_id = :job_id"
        ),
        values,
    )
