"""Searching, comparing and annotating jobs over HTTP."""

from __future__ import annotations

from itertools import count
from typing import Any

import httpx
import pytest

from ray_workers.shared.contracts import Frame
from tests.unit.api.matrix import check, get_raw
from tests.unit.api.serving import LiveServer
from tests.unit.service.helpers import metrics, spent

NAMES = count()


@pytest.fixture
def experiment() -> str:
    """A name that no other test uses."""
    return f"exp/{next(NAMES)} ä"


def trained(server: LiveServer, accuracy: float, *more: Frame, **fields: Any) -> str:
    job_id = server.submit(**fields)
    server.train(job_id, metrics(1, {"val/accuracy": 0.25, "train/loss": 1.0}))
    server.succeed(job_id, metrics(2, {"val/accuracy": accuracy}), *more)
    return job_id


def test_jobs_are_listed_by_a_search(server: LiveServer, http: httpx.Client) -> None:
    good = trained(server, 0.875, name="searched")
    trained(server, 0.5, name="searched")
    where = "val/accuracy > 0.8 and name = 'searched'"
    assert [job["id"] for job in http.get("/v1/jobs", params={"where": where}).json()["items"]] == [
        good
    ]


@pytest.mark.parametrize(
    ("where", "detail"),
    [
        ("val/accuracy >", "column 15: expected a number, found the end"),
        ("", "column 1: expected a field"),
        ("(" * 4000, "column 33: more than 32"),
        ("x" * 20_000, "the expression has 20,000 characters"),
        ("val/accuracy > 1e999", "column 16: the number is too large"),
        ("name = '\N{SNOWMAN}", "column 8: the string that begins here has no closing '"),
    ],
)
def test_a_search_at_fault_is_answered_with_its_column(
    site: LiveServer, ann: httpx.Client, where: str, detail: str
) -> None:
    response = ann.get("/v1/jobs", params={"where": where})
    problem = check(site, response, 422, "invalid_search")
    assert problem["detail"].startswith(detail)
    assert problem["pointer"] == "/where"


def test_a_search_with_a_nul_or_of_100_kb_is_refused(site: LiveServer, ann: httpx.Client) -> None:
    check(site, ann.get("/v1/jobs", params={"where": "name = '\0'"}), 400, "malformed_request")
    long = get_raw(ann, f"/v1/jobs?where={'x' * 100_000}")
    assert (long.status_code, long.json()["code"]) == (431, "headers_too_large")


def test_jobs_are_compared(server: LiveServer, http: httpx.Client) -> None:
    first = trained(server, 0.5, train={"epochs": 3, "ema": {"decay": 0.9}})
    second = trained(server, 0.75, spent(useful=3.0, idle=1.0), train={"epochs": 4})
    third = server.submit(name="waits")
    answer = http.get("/v1/compare", params={"jobs": f"{first}, {second},{third},{first}"}).json()
    assert [job["id"] for job in answer["jobs"]] == [first, second, third]
    assert [job["state"] for job in answer["jobs"]] == ["SUCCEEDED", "SUCCEEDED", "QUEUED"]
    assert answer["jobs"][1]["goodput"]["useful_share"] == 0.75
    assert [job["ran_s"] is None for job in answer["jobs"]] == [False, False, True]
    assert answer["baseline"] is None
    differences = {each["pointer"]: each["values"] for each in answer["differences"]}
    assert differences == {"/train/epochs": [3, 4, 1], "/train/ema/decay": [0.9, None, None]}
    accuracy = answer["metrics"][1]
    assert accuracy["key"] == "val/accuracy"
    assert accuracy["values"][1] == {
        "last": 0.75,
        "last_step": 2,
        "min": 0.25,
        "min_step": 1,
        "max": 0.75,
        "max_step": 2,
    }
    assert accuracy["values"][2] is None
    assert accuracy["changes"] == [None, None, None]


def test_the_cost_of_keeping_in_step_is_beside_each_other(
    server: LiveServer, http: httpx.Client
) -> None:
    told = {"sync/sent_bytes": 800.0, "sync/staleness_mean": 2.5, "val/loss": 0.5}
    pairs = {"kind": "gossip", "mode": "ad_psgd"}
    two = {"num_workers": 2}
    jobs = []
    for sync, values in ((None, {"val/loss": 0.25}), (pairs, told)):
        job_id = server.submit(resources=two, sync=sync)
        server.train(job_id, metrics(1, values))
        server.succeed(job_id)
        jobs.append(job_id)
    jobs.append(server.submit())
    answer = http.get("/v1/compare", params={"jobs": ",".join(jobs)}).json()
    figures = dict.fromkeys(("samples_per_s", "consensus_distance", "staleness_max"))
    assert answer["sync"] == [
        {
            **figures,
            **dict.fromkeys(("staleness_mean", "staleness_max", "consensus_distance"), 0.0),
            "topology": "all-reduce",
            "steps": 1,
            "sent_bytes": None,
            "loss": 0.25,
        },
        {
            **figures,
            "topology": "gossip, ad_psgd, ring",
            "steps": 1,
            "sent_bytes": 800.0,
            "staleness_mean": 2.5,
            "loss": 0.5,
        },
        None,
    ]


def test_a_pinned_baseline_comes_first(
    server: LiveServer, http: httpx.Client, experiment: str
) -> None:
    labels = {"experiment": experiment}
    jobs = [trained(server, value, labels=labels) for value in (0.5, 0.75, 0.25)]
    path = f"/v1/experiments/{experiment.replace('/', '%2F')}"
    pinned = http.patch(path, json={"baseline": jobs[1]}).json()
    assert pinned["baseline"] == jobs[1]
    assert pinned["states"] == {"SUCCEEDED": 3}
    accuracy = pinned["metrics"][1]
    assert accuracy == {
        "key": "val/accuracy",
        "num_jobs": 3,
        "least": 0.25,
        "least_job": jobs[2],
        "greatest": 0.75,
        "greatest_job": jobs[1],
    }
    answer = http.get("/v1/compare", params={"jobs": jobs[0]}).json()
    assert answer["baseline"] == jobs[1]
    assert [job["id"] for job in answer["jobs"]] == [jobs[1], jobs[0]]
    assert answer["metrics"][1]["changes"] == [0.0, -0.25]
    other = trained(server, 1.0)
    answer = http.get("/v1/compare", params={"jobs": f"{other},{jobs[0]}"}).json()
    assert [job["id"] for job in answer["jobs"]] == [jobs[1], other, jobs[0]]
    http.delete(f"/v1/jobs/{jobs[1]}")
    assert http.get(path).json()["baseline"] is None
    assert http.patch(path, json={"baseline": None}).json()["num_jobs"] == 2


def test_what_can_not_be_compared_is_refused(site: LiveServer, ann: httpx.Client) -> None:
    job_id = ann.post("/v1/jobs", json={"recipe": "image_classification"}).json()["id"]

    def compare(jobs: str) -> httpx.Response:
        return ann.get("/v1/compare", params={"jobs": jobs})

    check(site, compare(job_id), 422, "not_comparable")
    check(site, compare(f"{job_id},job-none"), 404, "job_not_found")
    check(site, compare(f"{job_id},"), 404, "job_not_found")
    check(site, compare(",".join([job_id] * 51)), 422, "invalid_parameter")
    check(site, ann.get("/v1/compare"), 422, "invalid_parameter")
    check(site, ann.get("/v1/experiments/none"), 404, "experiment_not_found")
    nobody = ann.patch("/v1/experiments/none", json={"baseline": job_id})
    check(site, nobody, 404, "experiment_not_found")
    labels = {"experiment": "mine"}
    mine = ann.post("/v1/jobs", json={"recipe": "image_classification", "labels": labels})
    assert mine.status_code == 201
    other = ann.patch("/v1/experiments/mine", json={"baseline": job_id})
    assert check(site, other, 422, "not_comparable")["pointer"] == "/baseline"
    for bad in ({}, {"baseline": 1}, {"baseline": "x"}, {"base": None}):
        check(site, ann.patch("/v1/experiments/mine", json=bad), 422, "invalid_document")
    assert site.ask("GET", "/v1/compare?jobs=a,b").status_code == 401
    assert site.ask("GET", "/v1/experiments").status_code == 401


def test_experiments_are_listed_page_by_page(server: LiveServer, http: httpx.Client) -> None:
    for name in ("page-b", "page-a", "page-c", "page-a"):
        newest = server.submit(labels={"experiment": name})
    names: list[tuple[str, int]] = []
    query: dict[str, Any] = {"limit": 2}
    while query.get("cursor", "") is not None:
        page = http.get("/v1/experiments", params=query).json()
        names += [(one["name"], one["num_jobs"]) for one in page["items"]]
        query["cursor"] = page["next_cursor"]
    ours = [one for one in names if one[0].startswith("page-")]
    assert ours == [("page-a", 2), ("page-b", 1), ("page-c", 1)]
    assert names == sorted(names)
    assert http.get("/v1/experiments/page-a").json()["newest_job"] == newest


def test_a_job_is_tagged_and_annotated_in_any_state(server: LiveServer, http: httpx.Client) -> None:
    job_id = trained(server, 0.5)
    path = f"/v1/jobs/{job_id}/annotations"
    empty = http.get(path)
    nothing = {
        "tags": [],
        "notes": "",
        "colour": None,
        "revision": 0,
        "updated_at": None,
        "updated_by": None,
    }
    assert (empty.json(), empty.headers["etag"]) == (nothing, '"0"')
    assert http.get(path, headers={"If-None-Match": '"0"'}).status_code == 304
    assert http.get(f"/v1/jobs/{job_id}").json()["tags"] == []
    changed = http.patch(path, json={"add_tags": ["good", "a/b", "good"], "notes": "# *ok*\n☃"})
    assert changed.json()["tags"] == ["a/b", "good"]
    assert changed.headers["etag"] == '"1"'
    assert http.patch(path, json={"add_tags": ["good"]}).json()["revision"] == 1
    again = http.patch(path, json={"remove_tags": ["a/b", "none"]}).json()
    assert (again["tags"], again["notes"], again["revision"]) == (["good"], "# *ok*\n☃", 2)
    assert again["updated_by"] == "anonymous"
    assert http.get(f"/v1/jobs/{job_id}").json()["tags"] == ["good"]
    (listed,) = http.get("/v1/jobs", params={"where": f"id = '{job_id}'"}).json()["items"]
    assert listed["tags"] == ["good"]


def test_a_change_of_what_somebody_else_changed_is_refused(
    site: LiveServer, ann: httpx.Client
) -> None:
    job_id = ann.post("/v1/jobs", json={"recipe": "image_classification"}).json()["id"]
    path = f"/v1/jobs/{job_id}/annotations"

    def write(notes: str, tag: str) -> httpx.Response:
        return ann.patch(path, json={"notes": notes}, headers={"If-Match": tag})

    first = write("one", '"0"')
    assert (first.status_code, first.json()["updated_by"]) == (200, "ann")
    check(site, write("two", '"0"'), 412, "annotations_changed")
    check(site, write("two", "zero"), 400, "malformed_request")
    assert write("two", "*").json()["notes"] == "two"
    assert ann.get(path).json()["revision"] == 2


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"add_tags": []},
        {"add_tags": ["a b"]},
        {"add_tags": [""]},
        {"add_tags": ["x" * 64]},
        {"add_tags": "good"},
        {"add_tags": [f"t{n}" for n in range(33)]},
        {"notes": "x" * 32_769},
        {"notes": 1},
        {"tags": ["good"]},
    ],
)
def test_bad_annotations_are_refused(
    site: LiveServer, ann: httpx.Client, bad: dict[str, Any]
) -> None:
    job_id = ann.post("/v1/jobs", json={"recipe": "image_classification"}).json()["id"]
    path = f"/v1/jobs/{job_id}/annotations"
    check(site, ann.patch(path, json=bad), 422, "invalid_document")
    assert ann.get(path).json()["revision"] == 0


def test_a_job_has_32_tags_at_most(site: LiveServer, ann: httpx.Client) -> None:
    job_id = ann.post("/v1/jobs", json={"recipe": "image_classification"}).json()["id"]
    path = f"/v1/jobs/{job_id}/annotations"
    assert ann.patch(path, json={"add_tags": [f"t{n}" for n in range(32)]}).status_code == 200
    check(site, ann.patch(path, json={"add_tags": ["more"]}), 422, "too_many_tags")
    check(site, ann.patch("/v1/jobs/job-x/annotations", json={"notes": ""}), 404, "job_not_found")
