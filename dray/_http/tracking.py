"""Comparisons, experiments, and tags and notes of jobs, as flows, without I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

from dray import views
from dray._http import following
from dray._http.calls import Calls, params
from dray._http.transport import Call, Flow, Item, Stream, segment

HEADERS = {"Content-Type": "application/json"}


def compare(calls: Calls, jobs: Iterable[views.Job | str]) -> Flow[views.Comparison]:
    ids = ",".join(job.id if isinstance(job, views.Job) else segment(job) for job in jobs)
    call = Call("GET", "/v1/compare", params(jobs=ids))
    return (yield from calls.read(views.Comparison, call))


def experiments(calls: Calls, page_size: int) -> Stream[views.Experiment]:
    cursor: str | None = None
    while True:
        call = Call("GET", "/v1/experiments", params(limit=page_size, cursor=cursor))
        page = yield from calls.read(views.ExperimentPage, call)
        for one in page.items:
            yield Item(one)
        cursor = page.next_cursor
        if cursor is None:
            return


def experiment(calls: Calls, name: str) -> Flow[views.ExperimentSummary]:
    return (yield from calls.read(views.ExperimentSummary, Call("GET", _path(name))))


def pin_baseline(calls: Calls, name: str, job_id: str | None) -> Flow[views.ExperimentSummary]:
    content = json.dumps({"baseline": job_id}).encode()
    call = Call("PATCH", _path(name), (), HEADERS, content)
    return (yield from calls.read(views.ExperimentSummary, call))


def get_annotations(calls: Calls, job_id: str) -> Flow[views.Annotations]:
    return (yield from calls.read(views.Annotations, Call("GET", _annotations(job_id))))


def annotate(
    calls: Calls, job_id: str, revision: int | None, **changes: Any
) -> Flow[views.Annotations]:
    """Change what is given; None leaves it as it is."""
    given = {name: value for name, value in changes.items() if value is not None}
    headers = HEADERS if revision is None else {**HEADERS, "If-Match": f'"{revision}"'}
    call = Call("PATCH", _annotations(job_id), (), headers, json.dumps(given).encode())
    return (yield from calls.read(views.Annotations, call))


def jobs_of(calls: Calls, jobs: Iterable[views.Job | str]) -> Flow[list[views.Job]]:
    """The jobs that are given, and those whose ids are."""
    found = []
    for job in jobs:
        found.append(
            (yield from following.get(calls, job, 0.0, None)) if isinstance(job, str) else job
        )
    return found


def series_of(
    calls: Calls,
    jobs: Iterable[views.Job | str],
    keys: Sequence[str] | None,
    max_points: int | None,
) -> Flow[list[tuple[str, views.Metrics]]]:
    """The series of rank 0 of each job, by its id."""
    found = []
    for job in jobs:
        job_id = job if isinstance(job, str) else job.id
        call = following.metrics_call(job_id, keys, None, None, max_points)
        found.append((job_id, (yield from calls.read(views.Metrics, call))))
    return found


def _path(name: str) -> str:
    return f"/v1/experiments/{quote(name, safe='')}"


def _annotations(job_id: str) -> str:
    return f"/v1/jobs/{segment(job_id)}/annotations"
