"""A database that an older dray wrote is brought up to date and reads as it did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic import command
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Table, insert, make_url
from sqlalchemy.orm import DeclarativeBase

from dray.views import JobState
from ray_workers.contracts import Cause, attempt_prefix
from service.db import models
from service.db.migrate import alembic_config, migrate
from service.db.session import Database
from service.domain.series import CHUNK_POINTS, pack, summarise
from service.storage import Storage
from tests.unit.service.helpers import SHA, START, Service, metrics, resumed

pytestmark = pytest.mark.anyio

JOB = "job-00000000000000000000000001"
WAITING = "job-00000000000000000000000002"
OLDER = ("0001", "0002", "0003")


@pytest.fixture
def empty_postgres(_postgres: str) -> Iterator[str]:
    name = "upgrade_me"
    with psycopg.connect(_postgres, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    yield make_url(_postgres).set(database=name).render_as_string(hide_password=False)
    with psycopg.connect(_postgres, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A database without tables."""
    url = f"sqlite:///{tmp_path / 'old.db'}"
    if request.param == "postgresql":
        url = request.getfixturevalue("empty_postgres")
    database = Database(url)
    yield database
    database.close()


def build(database: Database, revision: str, storage: Storage) -> None:
    """The schema of that revision, with a finished job and one that waits."""
    with database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), revision)
        for row, values in rows(storage):
            table = row.__table__
            assert isinstance(table, Table)
            connection.execute(insert(table).values(**values))


def rows(storage: Storage) -> Iterator[tuple[type[DeclarativeBase], dict[str, Any]]]:
    """What the dray of before would have written."""
    yield models.DeploymentRow, {"id": "old-deployment", "created_at": START}
    yield models.JobRow, job(JOB, JobState.SUCCEEDED, attempt=1, finished_at=START)
    yield models.JobRow, job(WAITING, JobState.QUEUED, attempt=0)
    yield models.JobLabelRow, {"job_id": JOB, "key": "team", "value": "a"}
    yield (
        models.IdempotencyRow,
        {"owner": "ann", "key": "k", "fingerprint": "f", "job_id": JOB, "created_at": START},
    )
    yield (
        models.AttemptRow,
        {
            "job_id": JOB,
            "attempt": 1,
            "phase": "ended",
            "slices": [],
            "bundle": {"CPU": 1.0},
            "world_size": 1,
            "cluster_session": "s",
            "cursor": {"rank-0": 5},
            "resume_step": 0,
            "num_errors": 0,
            "reason_code": "succeeded",
            "reason_message": "it ended",
            "created_at": START,
            "finished_at": START,
        },
    )
    for seq, state in enumerate(("QUEUED", "STARTING", "RUNNING", "SUCCEEDED"), 1):
        yield (
            models.EventRow,
            {
                "job_id": JOB,
                "seq": seq,
                "time": START,
                "type": "state",
                "attempt": 1,
                "to_state": JobState(state),
                "code": "x",
                "message": f"m{seq}",
                "data": {},
            },
        )
    for number in range(2):
        first = 1 + number * CHUNK_POINTS
        yield models.MetricChunkRow, chunk(range(first, first + CHUNK_POINTS), is_open=number == 1)
    line = json.dumps([START.timestamp(), "hello"]) + "\n"
    yield (
        models.LogChunkRow,
        {
            "job_id": JOB,
            "attempt": 1,
            "rank": 0,
            "first_line": 0,
            "num_lines": 1,
            "size_bytes": len(line),
            "incarnation": 0,
            "next_number": 1,
            "text": line,
        },
    )
    url = storage.url_of(f"{attempt_prefix(JOB, 1)}/checkpoints/step-5")
    yield (
        models.CheckpointRow,
        {
            "job_id": JOB,
            "attempt": 1,
            "step": 5,
            "url": url,
            "size_bytes": 10,
            "manifest_sha256": SHA,
            "metrics": {},
            "created_at": START,
        },
    )
    yield (
        models.ArtifactRow,
        {
            "job_id": JOB,
            "id": "a",
            "attempt": 1,
            "path": "model",
            "url": f"{url}/m",
            "size_bytes": 3,
            "sha256": SHA,
            "created_at": START,
        },
    )


def job(job_id: str, state: JobState, **more: Any) -> dict[str, Any]:
    document = {"version": 1, "recipe": "image_classification", "name": "old"}
    counts = dict.fromkeys(
        (
            *("event_seq", "user_failures", "infra_failures", "free_requeues", "preemptions"),
            *("max_user_retries", "max_infra_retries", "num_metric_keys", "log_bytes"),
            *("log_lines_dropped",),
        ),
        0,
    )
    return {
        **counts,
        "id": job_id,
        "name": "old",
        "owner": "ann",
        "project": "vision",
        "queue": "default",
        "priority": 50,
        "spec": document,
        "spec_version": 1,
        "num_workers": 1,
        "bundle": {"CPU": 1.0},
        "state": state,
        "reason_code": "x",
        "reason_message": "y",
        "blocked_by": [],
        "world_size": 1,
        "runtime_used_s": 0.0,
        "summary": {"loss": 0.5},
        "log_limit_bytes": 1000,
        "created_at": START,
        **more,
    }


def chunk(steps: range, *, is_open: bool) -> dict[str, Any]:
    values = [1.0 / step for step in steps]
    summary = summarise(steps, values)
    assert summary.low is not None
    assert summary.high is not None
    return {
        "job_id": JOB,
        "key": "loss",
        "attempt": 1,
        "rank": 0,
        "is_open": is_open,
        "count": len(steps),
        "first_step": steps[0],
        "first_value": values[0],
        "last_step": steps[-1],
        "last_value": values[-1],
        "min_step": summary.low[0],
        "min_value": summary.low[1],
        "max_step": summary.high[0],
        "max_value": summary.high[1],
        "points": pack(steps, values),
    }


@pytest.mark.parametrize("revision", OLDER)
async def test_everything_reads_as_it_did(empty: Database, tmp_path: Path, revision: str) -> None:
    storage = Storage((tmp_path / "storage").as_uri())
    build(empty, revision, storage)
    migrate(empty)
    service = Service(empty, storage, tmp_path)
    shown = await service.jobs.get(JOB)
    assert (shown.state, shown.labels, shown.summary) == (
        JobState.SUCCEEDED,
        {"team": "a"},
        {"loss": 0.5},
    )
    assert shown.finished_at == START
    reading = service.reading
    assert [e.message for e in (await reading.events(JOB)).items] == ["m1", "m2", "m3", "m4"]
    assert [line.text for line in (await reading.logs(JOB)).items] == ["hello"]
    assert [c.step for c in (await reading.checkpoints(JOB)).items] == [5]
    assert [a.path for a in (await reading.artifacts(JOB)).items] == ["model"]
    assert [a.state for a in (await reading.attempts(JOB)).items] == ["ended"]
    series = (await reading.metrics(JOB, max_points=10_000)).series["loss"]
    assert series.steps == list(range(1, 2 * CHUNK_POINTS + 1))
    assert series.values == [1.0 / step for step in series.steps]
    few = (await reading.metrics(JOB, max_points=10)).series["loss"]
    assert (few.values[0], few.steps[-1]) == (1.0, 2 * CHUNK_POINTS)


@pytest.mark.parametrize("revision", OLDER)
async def test_what_waited_goes_on(empty: Database, tmp_path: Path, revision: str) -> None:
    storage = Storage((tmp_path / "storage").as_uri())
    build(empty, revision, storage)
    migrate(empty)
    service = Service(empty, storage, tmp_path)
    assert service.claim(WAITING) is not None
    frames = [resumed(0), *(metrics(step, {"loss": 1.0}) for step in range(1, 51))]
    service.report(WAITING, 1, frames)
    service.end(WAITING, 1, Cause.SUCCEEDED)
    assert (await service.jobs.get(WAITING)).state is JobState.SUCCEEDED
    service.advance(timedelta(days=1).total_seconds())
    newer = await service.submit()
    assert [row.id for row in (await service.jobs.list()).items] == [newer, WAITING, JOB]
    await service.jobs.delete(JOB)


async def test_there_is_no_way_down(empty: Database) -> None:
    """A newer schema is not taken back: the backup of before is restored instead."""
    migrate(empty)
    with empty.engine.begin() as connection:
        config = alembic_config(connection)
        head = ScriptDirectory.from_config(config).get_current_head()
        with pytest.raises(AttributeError, match="downgrade"):
            command.downgrade(config, "-1")
    with empty.engine.connect() as connection:
        assert MigrationContext.configure(connection).get_current_revision() == head
