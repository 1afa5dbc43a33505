"""Searches in documents, metrics, labels, and tags, as SQL on both databases."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event, insert, text
from sqlalchemy.orm import Session

from dray.filters import JobFilter
from dray.requests import AnnotationRequest
from dray.views import JobState
from service.db.models import JobRow, MetricSummaryRow
from service.db.repositories import jobs as repository
from service.db.repositories.bulk import table_of
from service.db.repositories.catalog import document_values, listing, search, tracking
from service.db.session import Database
from service.domain.errors import BadCursor, InvalidSearch
from service.domain.tracking.document_values import defaults
from service.domain.tracking.search import parse_search
from service.domain.tracking.search_tree import (
    AllOf,
    AnyOf,
    Compared,
    DocumentField,
    Exists,
    HasTag,
    IsOneOf,
    JobColumn,
    LabelField,
    MetricField,
    Negated,
    Of,
    Order,
    SearchField,
    SearchNode,
)
from service.storage.storage import Storage
from service.tracking.service import Tracking
from tests.databases import migrated_sqlite
from tests.unit.service.helpers import Service, metrics


async def found(service: Service, where: str, **wanted: Any) -> list[str]:
    """Return the ids from all pages, with three jobs per page."""
    ids: list[str] = []
    cursor = None
    while True:
        query = JobFilter(where=where, **wanted)
        page = await service.jobs.list(query, limit=3, cursor=cursor)
        ids += [job.id for job in page.items]
        cursor = page.next_cursor
        if cursor is None:
            return ids


async def trained(service: Service, value: float, **fields: Any) -> str:
    job_id = await service.running(**fields)
    points = [metrics(1, {"val/accuracy": 0.1}), metrics(2, {"val/accuracy": value})]
    service.end(job_id, 1, frames=points)
    return job_id


async def test_jobs_are_found_by_metric_and_document(service: Service) -> None:
    def train(lr: float) -> dict[str, Any]:
        return {"optimizer": {"lr": lr}}

    good = await trained(service, 0.95, train=train(0.001), labels={"team": "a"})
    bad = await trained(service, 0.5, train=train(0.1), queue="default")
    waits = await service.submit(name="waits", train=train(0.05))
    assert await found(service, "val/accuracy > 0.9 and train.optimizer.lr < 0.01") == [good]
    assert await found(service, "val/accuracy > 0.4") == [bad, good]
    assert await found(service, "max(val/accuracy) = 0.5 or min(val/accuracy) = 0.1") == [bad, good]
    assert await found(service, "not exists(val/accuracy)") == [waits]
    assert await found(service, "train.optimizer.lr in (0.1, 0.05)") == [waits, bad]
    assert await found(service, "train.optimizer.lr != 0.001") == [waits, bad]
    assert await found(service, "train.optimizer.lr = 0.001") == [good]  # the default
    assert await found(service, "train.optimizer.name = 'adamw'") == [waits, bad, good]
    assert await found(service, "train.optimizer.nesterov = false") == [waits, bad, good]
    assert await found(service, "train.optimizer.nesterov = 'false'") == []
    assert await found(service, "train.optimizer.betas[1] > 0.99") == [waits, bad, good]
    assert await found(service, "exists(train.ema)") == []
    assert await found(service, "state = 'queued' or labels.team = 'a'") == [waits, good]
    assert await found(service, "name = 'waits' and not exists(started_at)") == [waits]
    assert await found(service, "created_at > '2027-01-01' or finished_at < '2027-01-01'") == [
        *(bad, good)
    ]
    assert await found(service, "priority = 50", state=(JobState.SUCCEEDED,)) == [bad, good]


async def test_what_a_search_finds_is_a_listing_of_its_own(service: Service) -> None:
    for _ in range(3):
        await service.submit()
    page = await service.jobs.list(JobFilter(where="priority = 50"), limit=2)
    with pytest.raises(BadCursor):
        await service.jobs.list(JobFilter(where="priority < 51"), cursor=page.next_cursor)
    with pytest.raises(InvalidSearch):
        await service.jobs.list(JobFilter(where="priority <"))


async def test_text_in_a_search_is_never_a_part_of_the_statement(service: Service) -> None:
    name = "x' OR 1=1; --%_\"ü"
    script = {"entrypoint": "train.py", "args": [name]}
    job_id = await service.submit(name="a", recipe=None, script=script)
    await service.submit(name="b")
    quoted = name.replace('"', '\\"')
    assert await found(service, f'script.args[0] = "{quoted}"') == [job_id]
    assert await found(service, "script.args[0] = 'x'") == []
    assert await found(service, f'name = "{quoted}" or "{quoted}" in tags') == []


async def test_jobs_of_an_array_are_found_by_their_own_values(service: Service) -> None:
    lone = await service.submit(train={"epochs": 7})
    first = await service.submit(array={"size": 3}, train={"epochs": 7, "seed": 5})
    array = (await service.jobs.get(first)).array_id
    assert array is not None
    third, second, _ = await found(service, "train.epochs = 7 and train.seed >= 5")
    assert await found(service, "train.seed > 5") == [third, second]
    assert await found(service, "train.epochs = 7") == [third, second, first, lone]
    assert await found(service, "train.epochs != 7") == []
    for job_id in (first, second, third):
        await service.jobs.cancel(job_id)

    def holders(session: Session) -> set[str]:
        return set(session.scalars(text("SELECT DISTINCT holder FROM document_values")))

    await service.jobs.delete(first)
    assert await found(service, "train.epochs = 7") == [third, second, lone]
    assert array in service.database.read_sync(holders)
    await service.jobs.arrays.delete(array)
    assert service.database.read_sync(holders) == {lone, defaults().holder}
    assert await found(service, "train.epochs = 7") == [lone]


async def test_trials_are_found_by_their_parameters(service: Service) -> None:
    values = {"train.optimizer.lr": {"choices": [0.1, 0.2, 0.4]}}
    sweep = {"metric": "val/accuracy", "sampler": "grid", "parameters": values}
    await service.submit(sweep=sweep, train={"epochs": 3})
    (one,) = await found(service, "train.optimizer.lr > 0.3 and train.epochs = 3")
    assert (await service.jobs.get(one)).spec["train"]["optimizer"]["lr"] == 0.4
    assert len(await found(service, "train.optimizer.lr < 0.3")) == 2


async def test_a_sweep_that_differs_very_much_is_not_searched_in_lists(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.domain.tracking.document_values.MAX_OF_ARRAY", 4)
    parameters = {"model.args.sizes": [[1, 2], [1, 3], [4, 5]], "train.optimizer.lr": [0.1, 0.2]}
    sweep = {"metric": "val/accuracy", "sampler": "grid", "parameters": parameters}
    await service.submit(model={"import": "net:Net"}, sweep=sweep)
    assert len(await found(service, "train.optimizer.lr = 0.2")) == 3
    assert len(await found(service, "exists(model.args.sizes)")) == 6
    assert await found(service, "model.args.sizes[0] = 1") == []


async def test_tags_are_found(service: Service) -> None:
    use_cases = Tracking(service.database)
    job_id = await service.submit()
    other = await service.submit()
    await use_cases.annotate(job_id, AnnotationRequest(add_tags=("good",)))
    assert await found(service, "'good' in tags") == [job_id]
    assert await found(service, "'good' not in tags") == [other]


@pytest.mark.parametrize(
    "where",
    [
        "val/accuracy > 0.9",
        "min(val/loss) < 1 and train.optimizer.lr > 7",
        "model.name in ('a', 'b') and experiment = 'x'",
        "exists(train.ema) and not 'good' in tags",
        "created_at > '2026-01-01' and labels.team = 'a'",
        "state = 'FAILED'",
        "val/accuracy > 0.9 and train.precision = 'fp32'",  # a default
    ],
)
def test_what_few_jobs_match_is_found_by_indexes_and_not_sorted(
    sqlite_service: Service, where: str
) -> None:
    statements: list[tuple[str, Any]] = []
    engine = sqlite_service.database.engine

    @event.listens_for(engine, "before_cursor_execute")
    def _keep(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        if "ORDER BY" in statement:
            statements.append((statement, parameters))

    def work(session: Session) -> list[str]:
        _all(session, parse_search(where), limit=10, id_prefix=None)
        ((statement, parameters),) = statements
        raw = session.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        return [row[3] for row in raw]

    plan = sqlite_service.database.write_sync(work)
    assert plan[0].startswith("SEARCH jobs USING INDEX "), plan
    assert not [step for step in plan if "SCAN" in step or "TEMP B-TREE" in step], plan


async def test_a_search_that_takes_too_long_is_given_up(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "LIMIT_S", 0.02)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT * FROM n"

    def work(session: Session) -> None:
        with search.limited(session):
            session.execute(text(f"SELECT count(*) FROM ({endless}) x")).all()

    with pytest.raises(InvalidSearch, match="took longer"):
        service.database.read_sync(work)
    monkeypatch.undo()  # the next search takes longer on a busy machine
    assert await found(service, "priority = 50") == []  # the connection is still usable


async def test_what_follows_a_search_is_not_limited(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "LIMIT_S", 0.001)
    some = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 50000)"

    def work(session: Session) -> int | None:
        with search.limited(session):
            pass
        return session.scalar(text(f"{some} SELECT count(*) FROM n"))

    assert service.database.read_sync(work) == 50_000


# A simple evaluator for the same trees, on random jobs.

KEYS = ("val/a", "loss")
PATHS = {
    "/train/optimizer/lr": st.sampled_from([1e-3, 0.1, 5.0]),
    "/train/epochs": st.sampled_from([1, 2, 5]),
    "/train/ema": st.sampled_from([None, {"decay": 0.1}, {"decay": 5.0}]),
    "/train/compile": st.booleans(),
    "/train/precision": st.sampled_from(["fp32", "bf16"]),
    "/script": st.sampled_from([None, {"args": ["a", "0.1"]}, {"args": []}]),
}
NUMBERS = st.sampled_from([0.1, 1.0, 2.0, 5.0, 1e-3])


@dataclass(frozen=True)
class Facts:
    """A job as simple values."""

    document: Mapping[str, Any]
    metrics: Mapping[str, tuple[float, float, float]]
    """The latest, minimum, and maximum value; NaN if all values are NaN."""
    labels: Mapping[str, str]
    tags: frozenset[str]
    priority: int


@st.composite
def facts(draw: st.DrawFn) -> Facts:
    document: dict[str, Any] = {**defaults().document, "train": dict(defaults().document["train"])}
    for path, values in PATHS.items():
        *parents, last = path.split("/")[1:]
        if draw(st.booleans()):
            place = document
            for parent in parents:
                place[parent] = dict(place[parent])
                place = place[parent]
            place[last] = draw(values)
    of_key = st.tuples(st.one_of(NUMBERS, st.just(math.nan)), NUMBERS, NUMBERS)
    return Facts(
        document,
        draw(st.dictionaries(st.sampled_from(KEYS), of_key)),
        draw(st.dictionaries(st.sampled_from(["team", "x"]), st.sampled_from(["a", "b"]))),
        draw(st.frozensets(st.sampled_from(["good", "bad"]))),
        draw(st.sampled_from([1, 2])),
    )


DOCUMENT_FIELDS = st.sampled_from(
    [*PATHS, "/train/ema/decay", "/script/args/1", "/script/args", "/train/nothing"]
).map(DocumentField)
METRIC_FIELDS = st.builds(MetricField, st.sampled_from(KEYS), st.sampled_from(Of))
NUMERIC = st.one_of(DOCUMENT_FIELDS, METRIC_FIELDS, st.just(JobColumn("priority")))
LABEL_FIELDS = st.builds(LabelField, st.sampled_from(["team", "x"]))
LITERALS = st.one_of(NUMBERS, st.booleans(), st.sampled_from(["a", "fp32", "true", "0.1"]))
CONDITIONS: st.SearchStrategy[SearchNode] = st.one_of(
    st.builds(Exists, st.one_of(NUMERIC, LABEL_FIELDS)),
    st.builds(Compared, NUMERIC, st.sampled_from(Order), NUMBERS),
    st.builds(IsOneOf, DOCUMENT_FIELDS, st.lists(LITERALS, min_size=1, max_size=3)),
    st.builds(IsOneOf, METRIC_FIELDS, st.lists(NUMBERS, min_size=1, max_size=3)),
    st.builds(IsOneOf, LABEL_FIELDS, st.lists(st.sampled_from(["a", "b"]), min_size=1)),
    st.builds(HasTag, st.sampled_from(["good", "bad"])),
)
TREES = st.recursive(
    CONDITIONS,
    lambda inner: st.one_of(
        st.builds(Negated, inner),
        st.builds(AllOf, st.lists(inner, min_size=1, max_size=3)),
        st.builds(AnyOf, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)
MISSING = object()


def value_of(job: Facts, field: SearchField) -> Any:
    match field:
        case JobColumn():
            return job.priority
        case LabelField(key):
            return job.labels.get(key, MISSING)
        case MetricField(key, of):
            return job.metrics[key][list(Of).index(of)] if key in job.metrics else MISSING
        case DocumentField(pointer):
            found: Any = job.document
            for part in pointer.split("/")[1:]:
                try:
                    found = found[int(part) if isinstance(found, list) else part]
                except (KeyError, IndexError, TypeError):
                    return MISSING
            return MISSING if found is None or found in ([], {}) else found


def same(value: Any, literal: Any) -> bool:
    is_flag = isinstance(value, bool) or isinstance(literal, bool)
    return value == literal and (not is_flag or type(value) is type(literal))


def holds(job: Facts, node: SearchNode) -> bool:
    match node:
        case AllOf(items):
            return all(holds(job, item) for item in items)
        case AnyOf(items):
            return any(holds(job, item) for item in items)
        case Negated(inner):
            return not holds(job, inner)
        case HasTag(tag):
            return tag in job.tags
        case Exists(field):
            return value_of(job, field) is not MISSING
        case IsOneOf(field, literals):
            return any(same(value_of(job, field), literal) for literal in literals)
        case Compared(field, order, literal):
            value = value_of(job, field)
            if isinstance(value, bool) or not isinstance(value, int | float):
                return False
            assert not isinstance(literal, datetime)
            return {
                Order.LESS: value < literal,
                Order.AT_MOST: value <= literal,
                Order.MORE: value > literal,
                Order.AT_LEAST: value >= literal,
            }[order]


@pytest.fixture(scope="module")
def random_jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Database, JobRow]:
    """A database shared by all examples, and a job to copy."""
    folder = tmp_path_factory.mktemp("search")
    (folder / "dray.db").write_bytes(migrated_sqlite())
    database = Database(f"sqlite:///{folder / 'dray.db'}")
    service = Service(database, Storage((folder / "storage").as_uri()), folder)
    job_id = asyncio.run(service.submit())
    row = database.read_sync(lambda s: repository.get(s, job_id))
    assert row is not None
    return database, row


NUMBER = count()


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(facts(), min_size=1, max_size=4), st.lists(TREES, min_size=1, max_size=5))
def test_sql_finds_the_jobs_that_a_plain_evaluator_finds(
    random_jobs: tuple[Database, JobRow], jobs: list[Facts], trees: list[SearchNode]
) -> None:
    database, template = random_jobs

    def work(session: Session) -> None:
        ids = {}
        for job in jobs:
            job_id = f"job-{next(NUMBER):026d}"
            ids[job_id] = job
            _write(session, template, job_id, job)
        for tree in trees:
            rows = _all(session, tree, limit=len(jobs))
            matching = {job_id for job_id, job in ids.items() if holds(job, tree)}
            assert {row.id for row in rows} == matching, tree
        session.rollback()

    with Session(database.engine) as session:
        work(session)


def _write(session: Session, template: JobRow, job_id: str, job: Facts) -> None:
    columns = {
        column.key: getattr(template, column.key)
        for column in table_of(JobRow).columns
        if column.key != "number"
    }
    changed = {"id": job_id, "spec": dict(job.document), "priority": job.priority}
    repository.insert(session, JobRow(**{**columns, **changed}), job.labels)
    shared = defaults()
    document_values.insert(session, shared.holder, {job_id: shared.but_for(job.document)})
    for key, (last, least, greatest) in job.metrics.items():
        values = {"last_value": None if math.isnan(last) else last}
        values |= {"min_value": least, "max_value": greatest}
        steps = dict.fromkeys(("last_step", "min_step", "max_step"), 1)
        row = {"job_id": job_id, "key": key, **steps, **values}
        session.execute(insert(table_of(MetricSummaryRow)), [row])
    tracking.set_tags(session, job_id, job.tags)


def _all(
    session: Session, tree: SearchNode, limit: int, id_prefix: str | None = "job-0000"
) -> list[JobRow]:
    wanted = JobFilter(id_prefix=id_prefix)
    return listing.page(session, wanted, where=tree, before_id=None, limit=limit)
