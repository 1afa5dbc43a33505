"""Lists of jobs as files over HTTP."""

from __future__ import annotations

import csv
import io

import httpx
import pytest
from pyarrow import parquet

from service.tracking import job_tables
from tests.unit.api.matrix import TOKEN, check
from tests.unit.api.serving import LiveServer

PATH = "/v1/job-table"
QUERY = {"label": "test=files", "columns": "name,lr"}


@pytest.fixture(scope="module")
def job(site: LiveServer) -> str:
    document = {
        "recipe": "image_classification",
        "name": "filed",
        "labels": {"test": "files"},
        "train": {"optimizer": {"lr": 0.001}},
    }
    headers = {"Authorization": f"Bearer {TOKEN}"}
    response = site.ask("POST", "/v1/jobs", json=document, headers=headers)
    return str(response.json()["id"])


def test_the_formats_of_a_file(ann: httpx.Client, job: str) -> None:
    found = ann.get(PATH, params={**QUERY, "format": "csv"})
    assert found.headers["content-type"].startswith("text/csv")
    assert "jobs.csv" in found.headers["content-disposition"]
    assert int(found.headers["content-length"]) == len(found.content)
    head, row = csv.reader(io.StringIO(found.text))
    assert head == ["job", "name", "lr", "values_as_of"]
    assert row == [job, "filed", "0.001", ""]
    found = ann.get(PATH, params=QUERY)
    assert found.headers["content-type"] == "application/vnd.apache.parquet"
    (line,) = parquet.read_table(io.BytesIO(found.content)).to_pylist()
    assert line == {"job": job, "name": "filed", "lr": 0.001, "values_as_of": None}


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ({}, "invalid_parameter"),
        ({"columns": ""}, "invalid_search"),
        ({"columns": "best:"}, "invalid_search"),
        ({"columns": "name", "format": "xlsx"}, "invalid_parameter"),
        ({"columns": "name", "where": "name ="}, "invalid_search"),
        ({"columns": "name", "sort": "tags"}, "invalid_search"),
        ({"columns": "name", "collapse_arrays": "true"}, "invalid_search"),
        ({"columns": "name", "limit": "5"}, "invalid_parameter"),
    ],
)
def test_bad_queries_are_refused(
    site: LiveServer, ann: httpx.Client, query: dict[str, str], code: str
) -> None:
    check(site, ann.get(PATH, params=query), 422, code)


def test_a_list_that_is_too_long_is_refused(
    site: LiveServer, ann: httpx.Client, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_tables, "MAX_JOBS", 0)
    refused = ann.get(PATH, params=QUERY)
    check(site, refused, 422, "invalid_search")
    assert "narrow the list down" in refused.json()["hint"]
