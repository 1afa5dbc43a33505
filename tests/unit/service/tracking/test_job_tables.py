"""Lists of jobs as files, compared with the pages of the list."""

from __future__ import annotations

import csv
import io
import json
import math
import random
from datetime import UTC, datetime
from typing import Any

import pytest
from pyarrow import parquet

from dray.filters import JobTable, JobTableFile
from service.domain.errors import InvalidSearch
from service.jobs import listing
from service.tracking import job_tables
from service.tracking.job_tables import JobTables
from tests.unit.service.helpers import Service, metrics

METRICS = "val/accuracy,best:val/loss"
FACTS = "name,state,priority,world_size,created_at,started_at,duration,cost,attempt,variant,tags"
PARAMETERS = "same,number,mixed,large,flag,missing,half,script"
COLUMNS = f"{FACTS},{METRICS},labels.team,{PARAMETERS},progress,goodput"
LARGE = 2**70
DRAWN: dict[str, list[Any]] = {
    "same": ["a", "=1+1", 'quoted ", text', "é"],
    "number": [1, 2.5, -3, 1e300],
    "mixed": [1, "one", True, 2.5],
    "large": [7, LARGE, -LARGE],
    "flag": [True, False],
    "half": [4, 5],
}


async def made(service: Service, chance: random.Random, number: int) -> None:
    for _ in range(number):
        parameters = {
            name: chance.choice(values) for name, values in DRAWN.items() if chance.random() < 0.8
        }
        script = {"entrypoint": "a.py", "args": [], "parameters": parameters}
        labels = {} if chance.random() < 0.5 else {"team": chance.choice(["NaN", "7", "é"])}
        if chance.random() < 0.5:
            await service.submit(recipe=None, script=script, labels=labels)
            continue
        job_id = await service.running(recipe=None, script=script, labels=labels)
        accuracy = chance.choice([0.5, 1.0, math.nan, math.inf, -math.inf])
        frame = metrics(1, {"val/accuracy": accuracy, "val/loss": 0.25}, total_steps=4)
        service.report(job_id, 1, [frame])
        service.advance(1)
        if chance.random() < 0.5:
            service.end(job_id, 1)


async def listed(service: Service, wanted: JobTable) -> list[Any]:
    return list((await service.jobs.list(wanted, limit=500)).items)


async def file_of(service: Service, form: str, **query: Any) -> bytes:
    file = io.BytesIO()
    wanted = JobTableFile.model_construct(columns=COLUMNS, format=form, **query)
    size = await JobTables(service.database).write(wanted, file)
    assert size == len(file.getvalue())
    return file.getvalue()


def as_cell(value: Any) -> str:
    """Write a value of the list as the documented cell of CSV."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, bool | list | dict):
        return json.dumps(value, ensure_ascii=False)
    return f"'{value}" if isinstance(value, str) and value.startswith("=") else str(value)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_file_has_the_values_of_the_list(
    service: Service, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    await made(service, chance, 17)
    sort = chance.choice(["-val/accuracy", "number", "name", None])
    jobs = await listed(service, JobTable(columns=COLUMNS, sort=sort))
    names = list(jobs[0].values)
    monkeypatch.setattr(listing, "MAX_PAGE", chance.choice([1, 4, 100]))
    text = (await file_of(service, "csv", sort=sort)).decode()
    head, *rows = csv.reader(io.StringIO(text, newline=""))
    assert head == ["job", *names, "values_as_of"]
    assert rows == [
        [job.id, *(as_cell(job.values[name]) for name in names), as_cell(job.values_as_of)]
        for job in jobs
    ]
    table = parquet.read_table(io.BytesIO(await file_of(service, "parquet", sort=sort)))
    assert table.column_names == head
    assert table["job"].to_pylist() == [job.id for job in jobs]
    assert table["values_as_of"].to_pylist() == [job.values_as_of for job in jobs]
    for name in names:
        values = [job.values[name] for job in jobs]
        found = [_comparable(value) for value in table[name].to_pylist()]
        assert found == [_comparable(value) for value in _of_one_type(name, values)], name


def _comparable(value: Any) -> Any:
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def _of_one_type(name: str, values: list[Any]) -> list[Any]:
    """Return the values as the documented types of columns have them."""
    present = [value for value in values if value is not None]
    if name in METRICS.split(","):
        return [None if value is None else float(value) for value in values]
    kinds = {type(value) for value in present}
    is_large = any(isinstance(value, int) and abs(value) >= 2**63 for value in present)
    is_one = len(kinds) <= 1 or kinds == {int, float}
    if is_one and not is_large and not kinds & {list, dict}:
        return values
    text = [
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for value in present
    ]
    return [None if value is None else text.pop(0) for value in values]


async def test_an_empty_list_has_its_columns(service: Service) -> None:
    for query in ({"owner": "nobody"}, {"owner": "a\0b"}):
        text = (await file_of(service, "csv", **query)).decode()
        assert text == f"job,{COLUMNS},values_as_of\r\n"
        table = parquet.read_table(io.BytesIO(await file_of(service, "parquet", **query)))
        assert (table.num_rows, table.column_names) == (
            0,
            ["job", *COLUMNS.split(","), "values_as_of"],
        )


async def test_a_list_that_is_too_long_or_too_large_is_refused(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        await service.submit()
    monkeypatch.setattr(job_tables, "MAX_JOBS", 3)
    await file_of(service, "csv")
    monkeypatch.setattr(job_tables, "MAX_JOBS", 2)
    with pytest.raises(InvalidSearch, match="more than 2 jobs match"):
        await file_of(service, "csv")
    monkeypatch.setattr(job_tables, "MAX_JOBS", 3)
    monkeypatch.setattr(job_tables, "MAX_BYTES", 100)
    for form in ("csv", "parquet"):
        with pytest.raises(InvalidSearch) as caught:
            await file_of(service, form)
        assert caught.value.pointer == "/columns"


async def test_a_job_that_moves_between_pages_is_written_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [await service.running() for _ in range(4)]
    for number, job_id in enumerate(ids):
        service.report(job_id, 1, [metrics(1, {"val/accuracy": float(number)})])
    monkeypatch.setattr(listing, "MAX_PAGE", 2)
    original, pages = JobTables._page, []

    async def page(self: JobTables, table: JobTable, cursor: str | None) -> Any:
        if len(pages) == 1:
            service.end(ids[0], 1, frames=[metrics(2, {"val/accuracy": 9.0})])
        pages.append(cursor)
        return await original(self, table, cursor)

    monkeypatch.setattr(JobTables, "_page", page)
    text = (await file_of(service, "csv", sort="val/accuracy")).decode()
    assert [row[0] for row in csv.reader(io.StringIO(text))][1:] == ids
