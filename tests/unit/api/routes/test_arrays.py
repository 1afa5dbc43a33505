"""/v1/arrays, and jobs that depend on others, over HTTP."""

from __future__ import annotations

import threading

import httpx
import pytest

from ray_workers.shared.contracts import Cause
from tests.unit.api.matrix import GOOD, check, post
from tests.unit.api.serving import LiveServer, wait_until


def submitted(http: httpx.Client, size: int) -> str:
    response = http.post("/v1/jobs", json={**GOOD, "array": {"size": size}})
    assert response.status_code == 201, response.text
    assert response.headers["location"] == f"/v1/jobs/{response.json()['id']}"
    assert response.json()["array_index"] == 0
    array_id: str = response.json()["array_id"]
    return array_id


def test_an_array_is_shown_listed_cancelled_and_deleted(http: httpx.Client) -> None:
    array_id = submitted(http, 3)
    path = f"/v1/arrays/{array_id}"
    array = http.get(path).json()
    assert (array["id"], array["size"], array["counts"]) == (array_id, 3, {"QUEUED": 3})
    jobs = http.get("/v1/jobs", params={"array": array_id}).json()["items"]
    assert [job["array_index"] for job in jobs] == [2, 1, 0]
    only = f"/v1/jobs?array={array_id}&array_index=1"
    assert http.get(only).json()["items"] == [jobs[1]]
    once = {"array": array_id, "collapse_arrays": "true"}
    assert http.get("/v1/jobs", params=once).json()["items"] == [jobs[2]]
    assert http.delete(path).json()["code"] == "job_live"
    for _ in range(2):
        response = http.post(f"{path}/cancel")
        assert (response.status_code, response.json()["counts"]) == (202, {"CANCELLED": 3})
    assert http.delete(path).status_code == 204
    for response in (http.get(path), http.delete(path), http.post(f"{path}/cancel")):
        assert (response.status_code, response.json()["code"]) == (404, "array_not_found")


def test_a_long_poll_of_an_array_answers_when_the_last_job_is_over(
    server: LiveServer, http: httpx.Client
) -> None:
    array_id = submitted(http, 2)
    path = f"/v1/arrays/{array_id}"
    at_once = http.get(path, params={"wait_s": 30, "state": "QUEUED"})
    assert at_once.json()["counts"] == {"QUEUED": 2}
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(server.ask("GET", f"{path}?wait_s=60"))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: server.num_waiting(array_id), "the long poll")
    last, first = (job["id"] for job in jobs_of(http, array_id))
    http.post(f"/v1/jobs/{first}/cancel")
    server.train(last)
    server.succeed(last)
    asking.join()
    assert answers[0].json()["counts"] == {"SUCCEEDED": 1, "CANCELLED": 1}


def jobs_of(http: httpx.Client, array_id: str) -> list[dict[str, str]]:
    jobs: list[dict[str, str]] = http.get("/v1/jobs", params={"array": array_id}).json()["items"]
    return jobs


@pytest.mark.parametrize(
    "query",
    ["array=job-1", "array_index=-1", "array_index=x", "collapse_arrays=2", "array_index=1e3"],
)
def test_a_wrong_filter_is_refused(http: httpx.Client, query: str) -> None:
    response = http.get(f"/v1/jobs?{query}")
    assert (response.status_code, response.json()["code"]) == (422, "invalid_parameter")


@pytest.mark.usefixtures("unchanged")
def test_an_array_of_ten_million_is_422_and_names_the_limit(
    site: LiveServer, ann: httpx.Client
) -> None:
    response = post(ann, {**GOOD, "array": {"size": 10**7}})
    problem = check(site, response, 422, "array_too_large")
    assert problem["pointer"] == "/array/size"
    assert (
        problem["detail"] == "the array has 10,000,000 jobs, but this server allows at most 10,000"
    )
    assert "DRAY_MAX_ARRAY_SIZE" in problem["hint"]


@pytest.mark.usefixtures("unchanged")
def test_ten_thousand_copies_of_a_long_document_are_422(
    site: LiveServer, ann: httpx.Client
) -> None:
    long = {"script": {"entrypoint": "a.py", "args": ["x" * 14_000]}, "array": {"size": 10_000}}
    problem = check(site, post(ann, long), 422, "array_too_large")
    assert problem["pointer"] == "/array"
    assert "move long strings to a file" in problem["hint"]


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("name", ["job-none", "array-none"])
def test_a_job_after_one_that_is_not_there_is_422(
    site: LiveServer, ann: httpx.Client, name: str
) -> None:
    problem = check(site, post(ann, {**GOOD, "after": [name]}), 422, "dependency_not_found")
    assert problem["pointer"] == "/after/0/job"


def test_a_job_after_one_that_failed_is_422_with_the_reason(
    server: LiveServer, http: httpx.Client
) -> None:
    first = server.submit()
    server.train(first)
    server.hands.end(first, 1, Cause.BAD_DATA)
    response = http.post("/v1/jobs", json={**GOOD, "after": [{"job": first}]})
    problem = response.json()
    assert (response.status_code, problem["code"]) == (422, "dependency_never_satisfied")
    assert problem["pointer"] == "/after/0"
    assert problem["detail"].endswith(f"on the success of {first}, which failed")


def test_both_forms_of_after_are_stored_alike(server: LiveServer, http: httpx.Client) -> None:
    first = server.submit()
    short = {"job": first, "on": "success"}
    long = {**short, "each": False}
    for form in (first, {"job": first}, short, long):
        job = http.post("/v1/jobs", json={**GOOD, "after": [form]}).json()
        assert job["spec"]["after"] == [long]
