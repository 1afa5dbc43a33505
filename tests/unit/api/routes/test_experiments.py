"""Experiments over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.unit.api.matrix import check
from tests.unit.api.serving import LiveServer

PATH = "/v1/experiments/kept"


@pytest.fixture(scope="module")
def job(site: LiveServer) -> str:
    return site.submit(labels={"experiment": "kept"})


def test_a_change_needs_the_revision_that_was_read(
    site: LiveServer, ann: httpx.Client, job: str
) -> None:
    read = ann.get(PATH)
    assert read.headers["etag"].startswith(f'"{read.json()["revision"]}-')
    by_etag = {"If-Match": read.headers["etag"]}
    changed = ann.patch(PATH, json={"notes": "one", "pinned": [job]}, headers=by_etag)
    assert (changed.status_code, changed.json()["updated_by"]) == (200, "ann")
    assert changed.json()["pinned"] == [job]
    check(site, ann.patch(PATH, json={"notes": "two"}, headers=by_etag), 412, "experiment_changed")
    by_revision = {"If-Match": f'"{changed.json()["revision"]}"'}
    assert ann.patch(PATH, json={"notes": "two"}, headers=by_revision).json()["notes"] == "two"
    bad = ann.patch(PATH, json={"notes": "x"}, headers={"If-Match": '"1-x"'})
    check(site, bad, 400, "malformed_request")


def test_a_cached_experiment_is_read_again_after_a_new_job(
    site: LiveServer, ann: httpx.Client, job: str
) -> None:
    etag = ann.get(PATH).headers["etag"]
    assert ann.get(PATH, headers={"If-None-Match": etag}).status_code == 304
    site.submit(labels={"experiment": "kept"})
    again = ann.get(PATH, headers={"If-None-Match": etag})
    assert again.status_code == 200
    assert job != again.json()["newest_job"]


@pytest.mark.parametrize(
    ("bad", "pointer"),
    [
        ({}, None),
        ({"layout": 1}, "/layout"),
        ({"layout": {"a": "x" * 65_536}}, "/layout"),
        ({"notes": None}, "/notes"),
        ({"pinned": ["job-a", 1]}, "/pinned/1"),
        ({"versions": 1}, "/versions"),
    ],
)
def test_bad_changes_are_refused(
    site: LiveServer, ann: httpx.Client, job: str, bad: dict[str, Any], pointer: str | None
) -> None:
    before = ann.get(PATH).json()
    problem = check(site, ann.patch(PATH, json=bad), 422, "invalid_document")
    assert problem.get("pointer") == pointer
    assert ann.get(PATH).json() == before
    assert job
