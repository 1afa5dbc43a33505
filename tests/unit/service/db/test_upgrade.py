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
from sqlalchemy import Table, insert, inspect, make_url, select, update

from dray.spec import JobSpec
from dray.views import JobState
from ray_workers.shared.contracts import Cause, RoleSlots
from service.db import models
from service.db.migrate import MIGRATIONS, alembic_config, migrate
from service.db.repositories.bulk import table_of
from service.db.repositories.scheduling import leases
from service.db.session import Database
from service.domain.documents import CheckedDocument, read
from service.domain.series import CHUNK_POINTS
from service.jobs.listing import JobQuery
from service.lifecycle import resizing
from service.storage.storage import Storage
from tests.marks import soak_but
from tests.unit.service.db.old_rows import JOB, RECEIPT, WAITING, rows
from tests.unit.service.helpers import START, Service, log, metrics, resumed


def older_revisions() -> list[str]:
    """All that a database may be at but the newest, oldest first."""
    scripts = ScriptDirectory(str(MIGRATIONS))
    head = scripts.get_current_head()
    revisions = [script.revision for script in scripts.walk_revisions()]
    return [revision for revision in reversed(revisions) if revision != head]


OLDER = older_revisions()
RECENT_METRICS = "0028"
"""From here on there are points that no chunk has taken yet."""
OVER_HTTP: dict[str, Any] = {
    "recipe": "tabular_classification",
    "data": {"source": "sklearn://wine"},
    "federated": {"clients": 2, "clients_per_round": 2, "rounds": 3, "http": {}},
}
"""A job document with clients outside of the cluster."""


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
    """The schema of that revision, with a finished job and one that waits: what was written."""
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


def test_rows_of_every_table_are_tried(tmp_path: Path) -> None:
    tables = {row.__tablename__ for row, _ in rows(Storage(tmp_path.as_uri()))}
    assert tables == set(models.Base.metadata.tables)


@pytest.mark.parametrize("revision", soak_but(OLDER, short=OLDER[:1]))
def test_every_row_keeps_what_it_held(empty: Database, tmp_path: Path, revision: str) -> None:
    written = build(empty, revision, Storage((tmp_path / "storage").as_uri()))
    migrate(empty)
    for table, values in written:
        with empty.engine.connect() as connection:
            found = connection.execute(select(*(table.c[name] for name in values)))
            assert values in [dict(row) for row in found.mappings()]


@pytest.mark.parametrize("revision", soak_but(OLDER, short=OLDER[:1]))
async def test_what_happened_to_a_job_reads_as_it_did(
    empty: Database, tmp_path: Path, revision: str
) -> None:
    storage = Storage((tmp_path / "storage").as_uri())
    written = build(empty, revision, storage)
    there = {f"{table.name}.{column}" for table, values in written for column in values}
    migrate(empty)
    service = Service(empty, storage, tmp_path)
    (attempt,) = (await service.reading.attempts(JOB)).items
    receipt = None if attempt.receipt is None else attempt.receipt.step
    assert receipt == (RECEIPT["step"] if "attempts.receipt" in there else None)
    goodput = (await service.jobs.get(JOB)).goodput
    assert (goodput is not None) == ("jobs.slot_seconds" in there)
    hangs = [found.culprits for found in (await service.faults.hangs(JOB)).items]
    assert hangs == ([[1]] if "hangs.seq" in there else [])
    drills = [found.state for found in (await service.faults.drills(JOB)).items]
    assert drills == (["passed"] if "drills.id" in there else [])
    spent = await service.faults.slot_seconds()
    assert spent.get("useful", 0.0) == (40.0 if "slot_seconds.seconds" in there else 0.0)
    (node,) = (await service.reading.cluster()).nodes
    kept = [slots.job_id for slots in node.quarantined]
    assert kept == ([JOB] if "nodes.quarantined" in there else [])
    lease = empty.read_sync(leases.get)
    assert (lease is not None and lease.term == 3) == ("leases.term" in there)


@pytest.mark.parametrize("revision", soak_but(OLDER, short=OLDER[:1]))
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
    last = 2 * CHUNK_POINTS + (revision >= RECENT_METRICS)
    assert series.steps == list(range(1, last + 1))
    assert series.values == [1.0 / step for step in series.steps]
    few = (await reading.metrics(JOB, max_points=10)).series["loss"]
    assert (few.values[0], few.steps[-1]) == (1.0, last)


@pytest.mark.parametrize("revision", soak_but(OLDER, short=OLDER[:1]))
async def test_what_waited_goes_on(empty: Database, tmp_path: Path, revision: str) -> None:
    storage = Storage((tmp_path / "storage").as_uri())
    written = build(empty, revision, storage)
    migrate(empty)
    service = Service(empty, storage, tmp_path)
    claimed = service.claim(WAITING)
    assert claimed is not None
    origin = None if claimed.init_from is None else claimed.init_from.step
    starts_from = any("init_from" in values for _, values in written)
    assert origin == (5 if starts_from else None)
    frames = [resumed(0), *(metrics(step, {"loss": 1.0}) for step in range(1, 51))]
    service.report(WAITING, 1, frames)
    service.end(WAITING, 1, Cause.SUCCEEDED)
    assert (await service.jobs.get(WAITING)).state is JobState.SUCCEEDED
    service.advance(timedelta(days=1).total_seconds())
    newer = await service.submit()
    assert [row.id for row in (await service.jobs.list()).items] == [newer, WAITING, JOB]
    await service.jobs.delete(JOB)


@pytest.mark.parametrize("revision", soak_but(OLDER, short=OLDER[-1:]))
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
        series = (await service.reading.metrics(JOB, max_points=10_000)).series["loss"]
        assert series.steps == list(range(1, last + 4))
        assert series.values == [1.0 / step for step in series.steps]
        assert [line.text for line in (await service.reading.logs(JOB)).items] == lines
        service.end(JOB, 1)


async def test_each_queue_that_jobs_name_gets_a_row(empty: Database, tmp_path: Path) -> None:
    storage = Storage((tmp_path / "storage").as_uri())
    build(empty, "0014", storage)
    with empty.engine.begin() as connection:
        table = models.JobRow.__table__
        assert isinstance(table, Table)
        connection.execute(table.update().where(table.c.id == WAITING).values(queue="fast"))
    migrate(empty)
    queues = (await Service(empty, storage, tmp_path).queues.list()).items
    assert [(queue.name, queue.num_waiting) for queue in queues] == [("default", 0), ("fast", 1)]
    assert {(queue.weight, queue.max_priority) for queue in queues} == {(1.0, 100)}


async def test_a_deadline_of_rounds_over_http_is_carried_over(
    empty: Database, tmp_path: Path
) -> None:
    storage = Storage((tmp_path / "storage").as_uri())
    build(empty, "0039", storage)
    old = CheckedDocument.of(JobSpec.model_validate(OVER_HTTP)).document
    http = {**old["federated"]["http"], "deadline_s": 30.0}
    old = {**old, "federated": {**old["federated"], "deadline_s": None, "http": http}}
    pointer = "/federated/http/deadline_s"
    value = {"holder": WAITING, "pointer": pointer, "number": 30.0, "text": None}
    with empty.engine.begin() as connection:
        jobs = table_of(models.JobRow)
        connection.execute(update(jobs).where(jobs.c.id == WAITING).values(spec=old))
        connection.execute(update(table_of(models.SweepRow)).values(base=old))
        connection.execute(insert(table_of(models.DocumentValueRow)).values(**value))
    migrate(empty)
    service = Service(empty, storage, tmp_path)
    where = JobQuery(where="federated.deadline_s = 30")
    (listed,) = (await service.jobs.list(where)).items
    assert (listed.id, listed.spec["federated"]["deadline_s"]) == (WAITING, 30.0)
    with empty.engine.connect() as connection:
        base = connection.scalar(select(table_of(models.SweepRow).c.base))
    for document in (listed.spec, base):
        read(document)
    claimed = service.claim(WAITING)
    assert claimed is not None
    assert claimed.spec.federated is not None
    assert claimed.spec.federated.deadline_s == 30.0


async def test_servers_with_resources_of_their_own_become_a_role(
    empty: Database, tmp_path: Path
) -> None:
    build(empty, "0039", Storage(tmp_path.as_uri()))
    servers = json.dumps({"number": 2, "bundle": {"CPU": 4.0}})
    slices = json.dumps([{"node_id": node, "num_workers": n} for node, n in (("a", 3), ("b", 2))])
    with empty.engine.begin() as connection:
        for of in (
            f"jobs SET servers = '{servers}', num_workers = 5 WHERE id = '{WAITING}'",
            f"attempts SET servers = '{servers}', slices = '{slices}'",
        ):
            connection.exec_driver_sql(f"UPDATE {of}")
    migrate(empty)
    found = (RoleSlots("server", 3, 2, {"CPU": 4.0}),)
    with empty.engine.connect() as connection:
        job = connection.execute(select(table_of(models.JobRow)).filter_by(id=WAITING)).one()
        assert resizing.request_of(job).roles == found
        (attempt,) = connection.execute(select(table_of(models.AttemptRow))).all()
        assert resizing.as_roles(attempt.roles) == found


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
