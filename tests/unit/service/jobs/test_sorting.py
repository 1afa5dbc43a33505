"""Sorted lists of jobs and groups of jobs, compared with a plain sort in Python."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, insert, update
from sqlalchemy.orm import Session

from dray.filters import JobFilter, JobGroups, JobTable
from dray.views import JobState
from service.db.models import JobCostRow, JobRow
from service.db.repositories.catalog import document_values, sorted_documents, sorting
from service.db.repositories.telemetry import metric_summaries
from service.db.repositories.telemetry.metric_summaries import MetricSummary, SummaryOf
from service.db.session import Database
from service.domain.errors import BadCursor, InvalidSearch
from service.domain.tracking.columns import parse_columns, parse_sort
from service.domain.tracking.document_values import defaults
from service.domain.tracking.metric_directions import is_minimised
from service.jobs import listing
from service.tracking.groups import JobGrouping
from tests.unit.service.helpers import START, Service, metrics

ODD = 'odd/é "x", y'
"""The name of a metric with characters that have a meaning in columns."""
LOSS, REWARD = "val/loss", f"{'r' * 190}/reward"
KEYS = (LOSS, REWARD, ODD)
QUOTED = 'metrics["odd/é \\"x\\", y"]'
NUMBERS = (0.1, -2.0, 0.001, 3.0, math.inf, -math.inf, 1e300)


@dataclass
class Known:
    """What the test knows about a job."""

    id: str
    name: str
    owner: str
    state: str
    labels: Mapping[str, str]
    document: Mapping[str, Any]
    array: str | None
    is_trial: bool
    last: dict[str, float] = field(default_factory=dict)
    low: dict[str, float] = field(default_factory=dict)
    high: dict[str, float] = field(default_factory=dict)
    cost: float | None = None
    started: float | None = None
    duration: float | None = None


MISSING, NAN, TEXT, NUMBER = 3, 2, 1, 0


def classed(value: Any) -> tuple[int, Any]:
    """Return the kind of a value and the value, in the documented order."""
    if value is None or value in ([], {}):
        return MISSING, 0
    if isinstance(value, bool):
        return TEXT, "true" if value else "false"
    if isinstance(value, str):
        return TEXT, value
    return (NAN, 0) if math.isnan(value) else (NUMBER, value)


def lr(job: Known) -> Any:
    script = job.document.get("script")
    if not script:
        return job.document["train"]["optimizer"]["lr"]
    args = script["args"]
    if "--lr" not in args:
        return None
    text = args[args.index("--lr") + 1]
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        return text


def decay(job: Known) -> Any:
    return job.document["train"]["optimizer"]["weight_decay"]


def best(key: str) -> Callable[[Known], Any]:
    minimised = key == LOSS

    def value(job: Known) -> Any:
        extremes = job.low if minimised else job.high
        return extremes.get(key, math.nan if key in job.last else None)

    return value


COLUMNS: dict[str, Callable[[Known], Any]] = {
    "id": lambda job: job.id,
    "created_at": lambda job: job.id,
    "name": lambda job: job.name,
    "owner": lambda job: job.owner,
    "state": lambda job: job.state,
    "started_at": lambda job: job.started,
    "duration": lambda job: job.duration,
    "cost": lambda job: job.cost,
    "labels.team": lambda job: job.labels.get("team"),
    "experiment": lambda job: job.labels.get("experiment"),
    LOSS: lambda job: job.last.get(LOSS),
    f"last:{REWARD}": lambda job: job.last.get(REWARD),
    f"best:{LOSS}": best(LOSS),
    f"best:{QUOTED}": best(ODD),
    f"max:{LOSS}": lambda job: job.high.get(LOSS, math.nan if LOSS in job.last else None),
    "lr": lr,
    "parameters.lr": lambda job: lr(job) if job.document.get("script") else None,
    "train.optimizer.weight_decay": decay,
    "train.precision": lambda job: job.document["train"]["precision"],
    "nothing_like_it": lambda _: None,
}


async def made(service: Service, chance: random.Random, number: int) -> list[Known]:
    """Submit jobs, arrays and sweeps, and write random results for them."""
    ids: list[str] = []
    while len(ids) < number:
        service.advance(chance.choice([0.0, 0.5]))
        first = await service.submit(**_document(chance))
        job = await service.jobs.get(first)
        ids += (
            [first]
            if job.array_id is None
            else [j.id for j in (await service.jobs.list(JobFilter(array=job.array_id))).items]
        )
    found = []
    for job_id in sorted(ids):
        job = await service.jobs.get(job_id)
        about = (job.name, job.owner, job.state, job.labels, job.spec, job.array_id)
        found.append(Known(job_id, *about, is_trial=job.name == "sweep"))
    service.database.write_sync(lambda session: _results(session, chance, found))
    gone = chance.sample(found, 2)
    service.database.write_sync(
        lambda session: session.execute(
            update(JobRow).where(JobRow.id.in_([job.id for job in gone])).values(deleted_at=START)
        )
    )
    return [job for job in found if job not in gone]


def _document(chance: random.Random) -> dict[str, Any]:
    labels = {}
    if chance.random() < 0.7:
        labels["team"] = chance.choice("abc")
    if chance.random() < 0.5:
        labels["experiment"] = chance.choice(["x", "y/z"])
    document: dict[str, Any] = {"name": chance.choice(["a", "b", "ab"]), "labels": labels}
    optimizer = {}
    if chance.random() < 0.6:
        optimizer["lr"] = chance.choice([0.001, 0.01, 0.5, 2.0])
    if chance.random() < 0.4:
        optimizer["weight_decay"] = chance.choice([0.0, 0.01, 0.1])
    kind = chance.choice(["job", "job", "job", "script", "script", "array", "sweep"])
    if kind == "script":
        args = []
        if chance.random() < 0.8:
            args = ["--lr", chance.choice(["0.01", "0.001", "7", "high", "auto", "true"])]
        return {**document, "recipe": None, "script": {"entrypoint": "a.py", "args": args}}
    document["train"] = {"optimizer": optimizer, "precision": chance.choice(["fp32", "bf16"])}
    if kind == "array":
        document["array"] = {"size": chance.randint(1, 4)}
    if kind == "sweep":
        values = chance.sample([0.001, 0.01, 0.02, 0.03, 0.5], 3)
        document |= {
            "name": "sweep",
            "sweep": {
                "metric": LOSS,
                "sampler": "grid",
                "parameters": {"train.optimizer.lr": values},
            },
        }
    return document


def _results(session: Session, chance: random.Random, jobs: list[Known]) -> None:
    for job in jobs:
        _measure(session, chance, job)
        columns: dict[str, Any] = {"owner": chance.choice(["ann", "bob"])}
        job.owner = columns["owner"]
        if chance.random() < 0.6:
            job.started = chance.choice([1.0, 2.0, 3.5])
            columns["started_at"] = START + timedelta(seconds=job.started)
            job.state = columns["state"] = chance.choice(
                [JobState.RUNNING, JobState.SUCCEEDED, JobState.FAILED]
            )
            if job.state != JobState.RUNNING:
                job.duration = columns["ran_s"] = chance.choice([0.0, 1.5, 60.0])
        if chance.random() < 0.5:
            job.cost = chance.choice([0.0, 0.25, 1.5, 1000.0])
            parts = {"useful": job.cost, "wasted": 0.0, "unreported": 0.0}
            columns["cost"] = {"currency": "EUR", "total": job.cost, **parts}
            session.execute(insert(JobCostRow).values(job_id=job.id, total=job.cost))
        session.execute(update(JobRow).where(JobRow.id == job.id).values(**columns))


def _measure(session: Session, chance: random.Random, job: Known) -> None:
    for key in KEYS:
        if chance.random() < 0.4:
            continue
        values = [chance.choice((*NUMBERS, math.nan)) for _ in range(chance.randint(1, 3))]
        job.last[key] = values[-1]
        numbers = [value for value in values if not math.isnan(value)]
        if numbers:
            job.low[key], job.high[key] = min(numbers), max(numbers)
        last = None if math.isnan(values[-1]) else values[-1]
        summary = MetricSummary(1, last, 1, job.low.get(key), 1, job.high.get(key))
        metric_summaries.merge(session, SummaryOf(job.id, is_minimised, START), {key: summary})


async def listed(service: Service, limit: int, wanted: JobTable) -> list[str]:
    """Return the ids of all pages."""
    ids: list[str] = []
    cursor = None
    while True:
        page = await service.jobs.list(wanted, limit=limit, cursor=cursor)
        assert len(page.items) <= limit
        ids += [job.id for job in page.items]
        cursor = page.next_cursor
        if cursor is None:
            return ids


def plainly_sorted(
    jobs: list[Known], value: Callable[[Known], Any], *, descending: bool
) -> list[str]:
    """Sort each kind of value on its own; the kinds have the same order in both directions."""
    ids = []
    for kind in (NUMBER, TEXT, NAN, MISSING):
        keyed = [(classed(value(job))[1], job.id) for job in jobs if classed(value(job))[0] == kind]
        ids += [job_id for _, job_id in sorted(keyed, reverse=descending)]
    return ids


FILTERS: dict[str, tuple[dict[str, Any], Callable[[Known], bool]]] = {
    "none": ({}, lambda _: True),
    "state": ({"state": ("QUEUED", "FAILED")}, lambda job: job.state in ("QUEUED", "FAILED")),
    "label": ({"label": ("team=a",)}, lambda job: job.labels.get("team") == "a"),
    "owner": ({"owner": "ann"}, lambda job: job.owner == "ann"),
    "text": ({"text": "A"}, lambda job: "a" in job.name),
    "search": (
        {"where": "train.optimizer.lr < 0.1 and labels.team in ('a', 'b')"},
        lambda job: (
            job.document["train"]["optimizer"]["lr"] < 0.1 and job.labels.get("team") in ("a", "b")
        ),
    ),
}


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_order_is_that_of_a_plain_sort(
    service: Service, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    jobs = await made(service, chance, 24)
    for column, value in COLUMNS.items():
        for descending in (False, True):
            name = chance.choice(list(FILTERS))
            arguments, matches = FILTERS[name]
            monkeypatch.setattr(sorting, "FEW", chance.choice([-1, 2_000]))
            monkeypatch.setattr(sorted_documents, "MAX_HOLDERS", chance.choice([0, 1, 20]))
            sort = f"-{column}" if descending else column
            wanted = JobTable(sort=sort, **arguments)
            chosen = [job for job in jobs if matches(job)]
            expected = plainly_sorted(chosen, value, descending=descending)
            limit = chance.choice([4, 9, 100])
            assert await listed(service, limit, wanted) == expected, (sort, name, limit)


async def test_columns_are_the_values_by_which_jobs_are_sorted(service: Service) -> None:
    jobs = {job.id: job for job in await made(service, random.Random(3), 25)}
    columns = [name for name in COLUMNS if name != "created_at"]
    page = await service.jobs.list(JobTable(columns=" , ".join(columns)), limit=500)
    assert {job.id for job in page.items} == jobs.keys()
    for item in page.items:
        known = jobs[item.id]
        assert list(item.values) == columns
        for name in set(columns) - {"started_at"}:
            value = item.values[name]
            number = float(value) if value in ("NaN", "Infinity", "-Infinity") else value
            assert classed(number) == classed(COLUMNS[name](known)), name
        since = None if known.started is None else START + timedelta(seconds=known.started)
        assert item.values["started_at"] == since


async def test_groups_have_the_figures_of_the_statistics_module(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = await made(service, random.Random(4), 40)
    grouping = JobGrouping(service.database)
    keys: dict[str, Callable[[Known], str | None]] = {
        "user": lambda job: job.owner,
        "sweep": lambda job: job.array if job.is_trial else None,
        "experiment": lambda job: job.labels.get("experiment"),
        "label:team": lambda job: job.labels.get("team"),
    }
    for by, key in keys.items():
        for sort in ("cost", "-lr", f"-best:{LOSS}"):
            monkeypatch.setattr(sorting, "FEW", 2_000 if sort == "cost" else -1)
            wanted = JobGroups(by=by, sort=sort)
            first = await grouping.groups(wanted, limit=1, cursor=None)
            groups = first.items
            if first.next_cursor is not None:
                rest = await grouping.groups(wanted, limit=100, cursor=first.next_cursor)
                groups = [*groups, *rest.items]
            assert {one.key for one in groups} == {key(job) for job in jobs}
            bests = []
            for one in groups:
                inside = [job for job in jobs if key(job) == one.key]
                values = [classed(COLUMNS[sort.removeprefix("-")](job)) for job in inside]
                numbers = [float(value) for kind, value in values if kind == NUMBER]
                assert (one.num_jobs, one.num_values) == (len(inside), len(numbers))
                if not numbers:
                    assert one.best is one.mean is one.std is None
                    continue
                choose = max if sort.startswith("-") else min
                assert float(one.best) == choose(numbers)
                bests.append(float(one.best))
                if all(map(math.isfinite, numbers)) and max(map(abs, numbers)) < 1e100:
                    assert float(one.mean) == pytest.approx(statistics.fmean(numbers))
                    std = statistics.stdev(numbers) if len(numbers) > 1 else None
                    assert (one.std and float(one.std)) == (std and pytest.approx(std))
            assert bests == sorted(bests, reverse=sort.startswith("-"))


async def test_a_sweep_that_maximises_its_loss_has_the_highest_as_its_best(
    service: Service,
) -> None:
    sweep = {
        "metric": LOSS,
        "mode": "max",
        "sampler": "grid",
        "parameters": {"train.optimizer.lr": [0.1, 0.2]},
    }
    first = await service.submit(sweep=sweep)
    lone = await service.submit()
    for job_id in (first, lone):
        assert service.claim(job_id) is not None
        service.report(job_id, 1, [metrics(step, {LOSS: float(step)}) for step in (1, 2, 3)])
    page = await service.jobs.list(JobTable(columns=f"best:{LOSS}", sort=f"-best:{LOSS}"))
    assert [(job.id, *job.values.values()) for job in page.items][:2] == [(first, 3.0), (lone, 1.0)]


async def test_values_of_a_running_job_state_how_old_they_are(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [metrics(1, {"x/y": 5.0})])
    written = service.now
    service.advance(5)
    service.report(job_id, 1, [metrics(2, {"x/y": 7.0})])
    wanted = JobTable(columns="x/y", sort="x/y")
    (job,) = (await service.jobs.list(wanted)).items
    assert (job.values, job.values_as_of) == ({"x/y": 5.0}, written)
    service.end(job_id, 1)
    (job,) = (await service.jobs.list(wanted)).items
    assert (job.values, job.values_as_of) == ({"x/y": 7.0}, None)
    (job,) = (await service.jobs.list(JobTable(columns="duration,cost"))).items
    assert job.values == {"duration": 5.0, "cost": None}


async def test_a_value_that_changes_between_two_pages_repeats_no_job_within_a_page(
    service: Service,
) -> None:
    ids = [await service.running() for _ in range(4)]
    for number, job_id in enumerate(ids):
        service.report(job_id, 1, [metrics(1, {"x/y": float(number)})])
    wanted = JobTable(sort="x/y")
    first = await service.jobs.list(wanted, limit=2)
    service.end(ids[0], 1, frames=[metrics(2, {"x/y": 9.0})])
    rest = await service.jobs.list(wanted, limit=10, cursor=first.next_cursor)
    assert [job.id for job in first.items] == ids[:2]
    assert [job.id for job in rest.items] == [*ids[2:], ids[0]]


async def test_a_cursor_belongs_to_one_order(service: Service) -> None:
    for _ in range(3):
        await service.submit()
    cursor = (await service.jobs.list(JobTable(sort="name"), limit=1)).next_cursor
    assert cursor is not None
    same = JobTable(sort="name", columns="lr")
    assert len((await service.jobs.list(same, limit=5, cursor=cursor)).items) == 2
    for other in (JobTable(sort="-name"), JobTable(), JobTable(sort="name", owner="ann")):
        with pytest.raises(BadCursor):
            await service.jobs.list(other, cursor=cursor)
    for sort, forged in (
        ("started_at", [0, 5, "job-1"]),
        ("started_at", [0, None, "x"]),
        ("started_at", ["0", "a", "job-1"]),
        ("started_at", {}),
        ("started_at", [0, "a\0", "job-1"]),
        ("started_at", [0, "2026-01-01T00:00:00", "job-1"]),
        ("started_at", [0, "9999-12-31T23:59:59-10:00", "job-1"]),
        ("-finished_at", [0, "0001-01-01T00:00:00+10:00", "job-1"]),
        ("val/loss", [0, 10**400, "job-1"]),
        ("lr", [0, 10**30, "job-1"]),
        ("lr", [1, True, "job-1"]),
    ):
        wrong = listing.encode_cursor(listing.scope(JobTable(sort=sort)), forged)
        with pytest.raises(BadCursor):
            await service.jobs.list(JobTable(sort=sort), cursor=wrong)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "expected a field"),
        ("name,,lr", "expected a field"),
        ("best:lr", "no field lr"),
        ("best:state", "only be used with metrics"),
        ('metrics["a', "no closing"),
        ("val/a b", "expected the end"),
        ("seed_of.x", "no field seed_of.x"),
        ("schedule", "write one of"),
        (",".join(f"a{n}" for n in range(101)), "at most 100"),
    ],
)
async def test_a_column_that_is_wrong_is_named(service: Service, text: str, why: str) -> None:
    with pytest.raises(InvalidSearch) as caught:
        await service.jobs.list(JobTable(columns=text))
    assert why in f"{caught.value} {caught.value.hint}"
    assert caught.value.pointer == "/columns"


NOT_SORTED = ["tags", "array", "priority", "world_size", "variant", "progress", "goodput"]


@pytest.mark.parametrize("sort", NOT_SORTED)
def test_jobs_are_not_sorted_by_what_has_no_index(sort: str) -> None:
    with pytest.raises(InvalidSearch, match=f"can't be sorted by {sort}"):
        parse_sort(f"-{sort}")


async def test_arrays_are_not_collapsed_in_another_order(service: Service) -> None:
    with pytest.raises(InvalidSearch, match="collapsed"):
        await service.jobs.list(JobTable(sort="name", collapse_arrays=True))
    with pytest.raises(InvalidSearch, match="not a number"):
        await JobGrouping(service.database).groups(
            JobGroups(by="user", sort="name"), limit=1, cursor=None
        )


def test_columns_are_split_at_commas_outside_quotes() -> None:
    found = parse_columns(f"name, {QUOTED} ,best:{QUOTED},name")
    assert [column.text for column in found] == ["name", QUOTED, f"best:{QUOTED}"]


@pytest.mark.parametrize(
    "sort", ["val/loss", "best:val/loss", "cost", "duration", "started_at", "name", "state", "id"]
)
def test_the_first_stage_walks_one_index_and_never_sorts_everything(
    sqlite_url: str, sort: str
) -> None:
    database = Database(sqlite_url)
    plans = _plans(database)
    with Session(database.engine) as session:
        chosen = sorting.choose(session, JobFilter(), None)
        sorting.page(session, chosen, parse_sort(f"-{sort}"), None, 10)
    database.close()
    assert "USING" in plans[0]
    assert "INDEX" in plans[0]
    assert "TEMP B-TREE FOR ORDER BY" not in plans[0], plans[0]


def _plans(database: Database) -> list[str]:
    """Return a list to which the plans of later statements with an order are added."""
    plans: list[str] = []

    @event.listens_for(database.engine, "before_cursor_execute")
    def _explain(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if "ORDER BY" in statement and not statement.startswith("EXPLAIN"):
            raw = cursor.connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
            plans.append(" | ".join(row[3] for row in raw))

    return plans


@pytest.mark.parametrize("sort", ["lr", "-train.optimizer.weight_decay", "train.precision"])
def test_jobs_that_share_a_value_are_read_from_an_index(sqlite_url: str, sort: str) -> None:
    database = Database(sqlite_url)
    shared = defaults()
    ids = [f"job-{number:026d}" for number in range(4)]

    def write(session: Session) -> None:
        document_values.insert_shared(session, shared)
        document_values.insert(session, shared.holder, {job_id: {} for job_id in ids})

    database.write_sync(write)
    plans = _plans(database)
    with Session(database.engine) as session:
        by = parse_sort(sort)
        found = sorting.page(session, sorting.choose(session, JobFilter(), None), by, None, 3)
    database.close()
    assert [each.job_id for each in found] == (ids[:0:-1] if by.descending else ids[:3])
    assert len(plans) >= 2
    assert not [plan for plan in plans if "TEMP B-TREE FOR ORDER BY" in plan or "SCAN" in plan]
