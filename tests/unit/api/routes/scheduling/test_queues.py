"""Queues and the queue positions of jobs over HTTP: bad input, tokens, and what only admins can
do."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.unit.api.matrix import check, held
from tests.unit.api.serving import LiveServer

JOB = {"recipe": "image_classification"}


def make(client: httpx.Client, name: str, **rules: Any) -> None:
    assert client.put(f"/v1/queues/{name}", json=rules).status_code == 200


def submit(client: httpx.Client, **fields: Any) -> str:
    response = client.post("/v1/jobs", json={**JOB, **fields})
    assert response.status_code == 201, response.text
    job_id: str = response.json()["id"]
    return job_id


def test_a_queue_is_made_shown_changed_and_deleted(http: httpx.Client) -> None:
    rules = {"quota": {"GPU": 1}, "limit": {"memory": "8GiB"}, "max_queued": 3}
    made = http.put("/v1/queues/life", json=rules).json()
    assert (made["quota"], made["limit"]) == ({"GPU": 1.0}, {"memory": 8.0 * 2**30})
    assert http.get("/v1/queues/life").json() == made
    assert made in http.get("/v1/queues").json()["items"]
    changed = http.patch("/v1/queues/life", json={"max_queued": None, "weight": 2}).json()
    assert changed == {**made, "max_queued": None, "weight": 2.0}
    assert http.delete("/v1/queues/life").status_code == 204
    for method in ("GET", "DELETE"):
        response = http.request(method, "/v1/queues/life")
        assert (response.status_code, response.json()["code"]) == (404, "queue_not_found")
    assert http.patch("/v1/queues/life", json={}).status_code == 404


def test_a_change_makes_the_queue_if_it_is_asked_to(http: httpx.Client) -> None:
    rules = {"user_weights": {"ann": 2, "bob": None}, "limit": {"GPU": None}, "weight": 3}
    for _ in range(2):
        made = http.patch("/v1/queues/made?create=true", json=rules)
        assert made.status_code == 200
        assert made.json()["user_weights"] == {"ann": 2.0}
        assert (made.json()["weight"], made.json()["limit"]) == (3.0, {})
    refused = http.patch("/v1/queues/other?make=true", json=rules)
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_parameter")
    assert http.delete("/v1/queues/made").status_code == 204


def test_an_answer_that_has_not_changed_is_not_sent_again(http: httpx.Client) -> None:
    etag = http.get("/v1/queues/default").headers["etag"]
    assert http.get("/v1/queues/default", headers={"If-None-Match": etag}).status_code == 304


BAD_RULES: list[tuple[Any, str, str]] = [
    ({"weight": 0}, "/weight", "greater than 0"),
    ({"weight": "1"}, "/weight", "must be a number"),
    ({"user_weights": {"ann": 0}}, "/user_weights/ann", "greater than 0"),
    ({"user_weights": {"ann": -0.5}}, "/user_weights/ann", "greater than 0"),
    ({"user_weights": {"ann": 1e7}}, "/user_weights/ann", "less than or equal to 1000000"),
    ({"user_weights": {"ann": "2"}}, "/user_weights/ann", "must be a number"),
    ({"user_weights": {"a/b": 1}}, "/user_weights/a~1b", "pattern"),
    ({"user_weights": 2}, "/user_weights", "object"),
    ({"limit": {"gpu": 1}}, "/limit/gpu", "'gpu' is not a resource"),
    ({"limit": {"a/b": 1}}, "/limit/a~1b", "'a/b' is not a resource"),
    ({"quota": {"GPU": -1}}, "/quota/GPU", "number from 0"),
    ({"quota": {"memory": "8G"}}, "/quota/memory", "ambiguous"),
    ({"limit": {"memory": "9999999999GiB"}}, "/limit/memory", "number from 0 to 2**60"),
    ({"quota": 3}, "/quota", "object"),
    ({"max_running": -1}, "/max_running", "greater than or equal to 0"),
    ({"max_priority": 101}, "/max_priority", "less than or equal to 100"),
    ({"wieght": 1}, "/wieght", "no field"),
    ({"budget": -1}, "/budget", "greater than or equal to 0"),
    ({"monthly_budget": 1e300}, "/monthly_budget", "less than or equal to 10"),
    ({"budget": 10**400}, "/budget", "must be a finite number"),
    ({"budget": "100"}, "/budget", "must be a number"),
    ({"budget": True}, "/budget", "must be a number"),
]


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
@pytest.mark.parametrize(("rules", "pointer", "said"), BAD_RULES)
def test_bad_rules_are_reported_with_their_pointer(
    guarded: LiveServer, root: httpx.Client, method: str, rules: Any, pointer: str, said: str
) -> None:
    before = held(guarded)
    response = root.request(method, "/v1/queues/default", json=rules)
    problem = check(guarded, response, 422, "invalid_document")
    assert problem["pointer"] == pointer
    assert said in problem["detail"]
    assert held(guarded) == before


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"weight": NaN}',
        b'{"weight": 1e999}',
        b'{"budget": NaN}',
        b'{"user_weights": {"ann": NaN}}',
    ],
)
def test_a_body_that_is_no_document_is_refused(
    guarded: LiveServer, root: httpx.Client, body: bytes
) -> None:
    headers = {"Content-Type": "application/json"}
    for method in ("PUT", "PATCH"):
        response = root.request(method, "/v1/queues/bad", content=body, headers=headers)
        assert response.status_code in (400, 422)
    assert root.get("/v1/queues/bad").status_code == 404


@pytest.mark.parametrize("name", ["Bad", "a b", "-a", "x" * 64, "ä"])
def test_a_name_that_no_queue_has_is_refused(
    guarded: LiveServer, root: httpx.Client, name: str
) -> None:
    check(guarded, root.put(f"/v1/queues/{name}", json={}), 422, "invalid_parameter")


def test_a_limit_below_the_quota_is_told(guarded: LiveServer, root: httpx.Client) -> None:
    rules = {"quota": {"GPU": 8}, "limit": {"GPU": 4}}
    problem = check(guarded, root.put("/v1/queues/x", json=rules), 422, "invalid_queue")
    assert problem["pointer"] == "/limit/GPU"


def test_more_names_than_a_rule_may_have_are_refused(
    guarded: LiveServer, root: httpx.Client
) -> None:
    before = held(guarded)
    names = {f"accelerator_type:A{n}": 1 for n in range(20_000)}
    for method in ("PUT", "PATCH"):
        response = root.request(method, "/v1/queues/default", json={"limit": names})
        problem = check(guarded, response, 422, "invalid_queue")
        assert (problem["pointer"], problem["detail"]) == (
            "/limit",
            "would have 20,000 names, but at most 64 are allowed",
        )
        assert "setting them to null" in problem["hint"]
    assert held(guarded) == before


def test_only_an_admin_changes_queues(
    guarded: LiveServer, root: httpx.Client, user: httpx.Client
) -> None:
    for method in ("PUT", "PATCH", "DELETE"):
        body = {} if method == "DELETE" else {"json": {}}
        problem = check(guarded, user.request(method, "/v1/queues/day", **body), 403, "forbidden")
        assert ":admin" in problem["hint"]
    own = user.patch("/v1/queues/day?create=true", json={"user_weights": {"ann": 9}})
    check(guarded, own, 403, "forbidden")
    assert guarded.ask("PUT", "/v1/queues/day", json={}).status_code == 401
    make(root, "day")
    assert user.get("/v1/queues/day").status_code == 200
    assert {queue["name"] for queue in user.get("/v1/queues").json()["items"]} >= {"day"}


def test_a_job_in_no_queue_is_refused_and_nothing_is_stored(
    guarded: LiveServer, root: httpx.Client, user: httpx.Client
) -> None:
    make(root, "evening", max_priority=60, max_queued_per_user=1)
    before = held(guarded)
    unknown = user.post("/v1/jobs", json={**JOB, "queue": "evning"})
    problem = check(guarded, unknown, 422, "unknown_queue")
    assert (problem["pointer"], problem["hint"]) == ("/queue", "did you mean 'evening'?")
    high = user.post("/v1/jobs", json={**JOB, "queue": "evening", "priority": 61})
    assert check(guarded, high, 422, "priority_too_high")["pointer"] == "/priority"
    assert held(guarded) == before
    submit(user, queue="evening")
    before = held(guarded)
    headers = {"Idempotency-Key": "full"}
    full = user.post("/v1/jobs", json={**JOB, "queue": "evening"}, headers=headers)
    assert check(guarded, full, 409, "queue_full")["pointer"] == "/queue"
    assert held(guarded) == before
    root.patch("/v1/queues/evening", json={"max_queued_per_user": None})
    again = user.post("/v1/jobs", json={**JOB, "queue": "evening"}, headers=headers)
    assert again.status_code == 201
    problem = check(guarded, root.delete("/v1/queues/evening"), 409, "queue_in_use")
    assert problem["detail"].startswith("2 jobs in the queue 'evening'")


def test_a_user_may_do_with_a_job_what_the_rules_allow_and_an_admin_more(
    guarded: LiveServer, root: httpx.Client, user: httpx.Client
) -> None:
    make(root, "morning", max_priority=60)
    job_id = submit(user, queue="morning")
    path = f"/v1/jobs/{job_id}"
    held_ = user.patch(path, json={"held": True}).json()
    assert (held_["held_by"], held_["reason"]["code"]) == ("ann", "held")
    assert root.patch(path, json={"held": False, "priority": 60}).json()["priority"] == 60
    check(guarded, user.patch(path, json={"priority": 61}), 422, "priority_too_high")
    check(guarded, user.patch(path, json={"first": True}), 403, "forbidden")
    assert root.patch(path, json={"priority": 61, "first": True}).json()["priority"] == 61
    check(guarded, user.patch(path, json={"queue": "mornin"}), 422, "unknown_queue")
    events = user.get(f"{path}/events").json()["items"][1:]
    assert [(e["code"], e["actor"]) for e in events] == [
        *(("held", "ann"), ("priority", "root"), ("released", "root"), ("priority", "root")),
    ]


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({}, ""),
        ({"held": None}, ""),
        ({"held": "yes"}, "/held"),
        ({"first": False}, "/first"),
        ({"priority": 101}, "/priority"),
        ({"priority": 1.5}, "/priority"),
        ({"queue": "No Such"}, "/queue"),
        ({"state": "RUNNING"}, "/state"),
    ],
)
def test_a_bad_change_of_a_job_is_told(
    guarded: LiveServer, user: httpx.Client, change: Any, pointer: str
) -> None:
    job_id = submit(user)
    before = held(guarded)
    response = user.patch(f"/v1/jobs/{job_id}", json=change)
    assert check(guarded, response, 422, "invalid_document")["pointer"] == pointer
    assert held(guarded) == before


def test_a_job_that_does_not_wait_is_not_moved(http: httpx.Client, server: LiveServer) -> None:
    job_id = server.trains()
    response = http.patch(f"/v1/jobs/{job_id}", json={"held": True})
    assert (response.status_code, response.json()["code"]) == (409, "job_not_waiting")
    assert f"dray preempt {job_id}" in response.json()["hint"]
    assert http.patch(f"/v1/jobs/{job_id}", json={"priority": 90}).json()["priority"] == 90
    server.succeed(job_id)
    response = http.patch(f"/v1/jobs/{job_id}", json={"priority": 90})
    assert (response.status_code, response.json()["code"]) == (409, "job_finished")
    assert http.patch("/v1/jobs/job-none", json={"held": True}).status_code == 404


def test_without_tokens_everybody_is_an_admin(http: httpx.Client, server: LiveServer) -> None:
    server.queue("open", max_priority=60)
    server.submit(queue="open")
    job_id = server.submit(queue="open")
    moved = http.patch(f"/v1/jobs/{job_id}", json={"first": True, "priority": 90})
    assert moved.json()["priority"] == 90
