"""After an upgrade, a database from an older version of dray has the same contents."""

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
from sqlalchemy import Table, insert, inspect, make_url, select, text, update

from dray.filters import JobTable
from dray.views import JobState
from ray_workers.shared.contracts import Cause
from service.db import models
from service.db.migrate import MIGRATIONS, alembic_config, migrate
from service.db.repositories.bulk import table_of
from service.db.repositories.scheduling import leases
from service.db.session import Database
from service.domain.series import CHUNK_POINTS
from service.storage.storage import Storage
from service.telemetry.series_filters import MetricsFilter
from tests.marks import soak_but
from tests.unit.service.db.old_rows import JOB, RECEIPT, WAITING, rows
from tests.unit.service.helpers import START, Service, log, metrics, resumed
from tests.unit.service.jobs.test_usage import LongJobs, Users

REVISIONS = [script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()][::-1]
"""All revisions that a database can have, from oldest to newest."""
EACH = pytest.mark.parametrize("revision", soak_but(REVISIONS, short=REVISIONS[:1]))


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


Written = tuple[Table, dict[str, Any]]


def build(database: Database, revision: str, storage: Storage) -> list[Written]:
    """Create the schema of this revision with a finished and a waiting job, and return the rows."""
    written = []
    with database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), revision)
        schema = inspect(connection)
        tables = schema.get_table_names()
        for row, values in rows(storage):
            table = row.__table__
            assert isinstance(table, Table)
            if table.name not in tables:
                continue
            columns = {column["name"] for column in schema.get_columns(table.name)}
            known = {name: value for name, value in values.items() if name in columns}
            connection.execute(insert(table).values(**known))
            written.append((table, known))
    return written


@EACH
def test_every_row_keeps_what_it_held(empty: Database, tmp_path: Path, revision: str) -> None:
    written = build(empty, revision, Storage((tmp_path / "storage").as_uri()))
    migrate(empty)
    for table, values in written:
        with empty.engine.connect() as connection:
            found = connection.execute(select(*(table.c[name] for name in values)))
            assert values in [dict(row) for row in found.mappings()]


@EACH
async def test_what_happened_to_a_job_reads_as_it_did(
    empty: Database, tmp_path: Path, revision: str
) -> None:
    storage = Storage((tmp_path / "storage").as_uri())
    build(empty, revision, storage)
    migrate(empty)
    service = Service(empty, storage, tmp_path)
    (attempt,) = (await service.queries.attempts(JOB)).items
    assert attempt.receipt is not None
    assert attempt.receipt.step == RECEIPT["step"]
    assert (await service.jobs.get(JOB)).goodput is not None
    assert [found.culprits for found in (await service.faults.hangs(JOB)).items] == [[1]]
    assert [found.state for found in (await service.faults.drills(JOB)).items] == ["passed"]
    assert (await service.faults.slot_seconds())["useful"] == 40.0
    (node,) = (await service.queries.cluster()).nodes
    assert [slots.job_id for slots in node.quarantined] == [JOB]
    lease = empty.read_sync(leases.get)
    assert lease is not None
    assert lease.term == 3


async def test_older_jobs_are_sorted_like_new_ones(empty: Database, tmp_path: Path) -> None:
    storage = Storage((tmp_path / "storage").as_uri())
    build(empty, REVISIONS[0], storage)
    summary = (
        "INSERT INTO metric_summaries "
        "(job_id, key, last_step, last_value, min_step, min_value, max_step, max_value) "
        f"VALUES ('{JOB}', :key, 3, 2.0, 1, 1.0, 2, 3.0)"
    )
    script = {"entrypoint": "a.py", "args": ["--lr", "0.5"]}
    with empty.engine.begin() as connection:
        connection.execute(text(summary), [{"key": "val/loss"}, {"key": "x/reward"}])
        jobs = table_of(models.JobRow)
        document = connection.execute(select(jobs.c.spec).where(jobs.c.id == JOB)).scalar_one()
        changed = {
            "spec": {**document, "recipe": None, "script": script},
            "started_at": START,
            "finished_at": START + timedelta(seconds=90.25),
        }
        connection.execute(update(jobs).where(jobs.c.id == JOB).values(**changed))
    migrate(empty)
    service = Service(empty, storage, tmp_path)
    columns = "best:val/loss,best:x/reward,cost,duration,lr"
    values = {}
    for column in columns.split(","):
        page = await service.jobs.list(JobTable(sort=f"-{column}", columns=columns))
        assert page.items[0].id == JOB, column
        values = page.items[0].values
    assert values["duration"] == pytest.approx(90.25, abs=1e-4)
    assert list(values.values())[:3] == [1.0, 3.0, 2.0]
    found = await service.jobs.list(JobTable(where="parameters.lr = 0.5"))
    assert [job.id for job in found.items] == [JOB]


@EACH
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
    queries = service.queries
    assert [e.message for e in (await queries.events(JOB)).items] == ["m1", "m2", "m3", "m4"]
    assert [line.text for line in (await queries.logs(JOB)).items] == ["hello"]
    assert [c.step for c in (await queries.checkpoints(JOB)).items] == [5]
    assert [a.path for a in (await queries.artifacts(JOB)).items] == ["model"]
    assert [a.state for a in (await queries.attempts(JOB)).items] == ["ended"]
    series = (await queries.metrics(JOB, MetricsFilter(max_points=10_000))).series["loss"]
    last = 2 * CHUNK_POINTS + 1
    assert series.steps == list(range(1, last + 1))
    assert series.values == [1.0 / step for step in series.steps]
    few = (await queries.metrics(JOB, MetricsFilter(max_points=10))).series["loss"]
    assert (few.values[0], few.steps[-1]) == (1.0, last)


@EACH
async def test_what_waited_goes_on(empty: Database, tmp_path: Path, revision: str) -> None:
    storage = Storage((tmp_path / "storage").as_uri())
    build(empty, revision, storage)
    migrate(empty)
    service = Service(empty, storage, tmp_path)
    claimed = service.claim(WAITING)
    assert claimed is not None
    assert claimed.init_from is not None
    assert claimed.init_from.step == 5
    frames = [resumed(0), *(metrics(step, {"loss": 1.0}) for step in range(1, 51))]
    service.report(WAITING, 1, frames)
    service.end(WAITING, 1, Cause.SUCCEEDED)
    assert (await service.jobs.get(WAITING)).state is JobState.SUCCEEDED
    service.advance(timedelta(days=1).total_seconds())
    newer = await service.submit()
    assert [row.id for row in (await service.jobs.list()).items] == [newer, WAITING, JOB]
    await service.jobs.delete(JOB)


@EACH
async def test_what_ran_goes_on(empty: Database, tmp_path: Path, revision: str) -> None:
    storage = Storage((tmp_path / "storage").as_uri())
    build(empty, revision, storage)
    with empty.engine.begin() as connection:
        running = {"state": JobState.RUNNING, "finished_at": None, "event_seq": 4}
        jobs, attempts = table_of(models.JobRow), table_of(models.AttemptRow)
        connection.execute(update(jobs).values(running).where(jobs.c.id == JOB))
        live = {"phase": "running", "finished_at": None}
        connection.execute(update(attempts).values(live))
    migrate(empty)
    service = Service(empty, storage, tmp_path)
    last = 2 * CHUNK_POINTS
    for number in range(1, 4):
        step = last + number
        service.report(JOB, 1, [metrics(step, {"loss": 1.0 / step}), log(number, f"line {number}")])
    lines = ["hello", "line 1", "line 2", "line 3"]
    for _ in range(2):
        found = await service.queries.metrics(JOB, MetricsFilter(max_points=10_000))
        series = found.series["loss"]
        assert series.steps == list(range(1, last + 4))
        assert series.values == [1.0 / step for step in series.steps]
        assert [line.text for line in (await service.queries.logs(JOB)).items] == lines
        service.end(JOB, 1)


async def test_there_is_no_way_down(empty: Database) -> None:
    """A newer schema is not downgraded; an earlier backup must be restored instead."""
    migrate(empty)
    with empty.engine.begin() as connection:
        config = alembic_config(connection)
        head = ScriptDirectory.from_config(config).get_current_head()
        with pytest.raises(AttributeError, match="downgrade"):
            command.downgrade(config, "base")
    with empty.engine.connect() as connection:
        assert MigrationContext.configure(connection).get_current_revision() == head


async def test_the_usage_of_older_attempts_is_that_of_newer_ones(
    empty: Database, tmp_path: Path
) -> None:
    migrate(empty)
    path = tmp_path / "prices.json"
    rules = [{"resource": "CPU", "per_hour": 6.0}]
    path.write_text(json.dumps({"currency": "EUR", "prices": rules}))
    users = Users(empty, Storage((tmp_path / "storage").as_uri()), tmp_path, prices_file=path)
    await users.queue("night")
    jobs = LongJobs(users, seed=5)
    await jobs.run()
    usage = select(table_of(models.UsageRow)).order_by(
        "length", "quarter", "owner", "queue", "currency"
    )
    with empty.engine.connect() as connection:
        before = connection.execute(usage).all()
    earlier = ScriptDirectory(str(MIGRATIONS)).get_revision("0065").down_revision
    with empty.engine.begin() as connection:
        for name in ("usage", "capacity", "waits"):
            connection.execute(text(f"DROP TABLE {name}"))
        connection.execute(text(f"UPDATE alembic_version SET version_num = '{earlier}'"))
    with empty.engine.begin() as connection:
        command.upgrade(alembic_config(connection), "0065")
    with empty.engine.connect() as connection:
        after = connection.execute(usage).all()
    # The starts and ends of deleted jobs are not known any more.
    counts = 4
    lost = {users.of[job_id] for job_id in jobs.deleted}
    seen = {tuple(row[:5]): row for row in after}
    assert lost
    for row in before:
        if any(row[5:-counts]):
            assert seen[tuple(row[:5])][5:-counts] == pytest.approx(row[5:-counts])
        elif (row.owner, row.queue) not in lost:
            assert seen[tuple(row[:5])] == row
    assert sum(row.slot_seconds for row in after) == pytest.approx(
        sum(row.slot_seconds for row in before)
    )
    started = [sum(row.num_started for row in rows if row.length == 1) for rows in (before, after)]
    assert started[1] == started[0] - len(jobs.deleted)
