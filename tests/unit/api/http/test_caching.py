"""ETags: what a caller already has is not sent again, and what has changed always is."""

from __future__ import annotations

import httpx
import pytest

from tests.unit.api.serving import LiveServer
from tests.unit.service.helpers import metrics


def etag(http: httpx.Client, path: str) -> str:
    response = http.get(path)
    assert response.status_code == 200
    assert response.headers["cache-control"] == "private, no-cache"
    tag: str = response.headers["etag"]
    return tag


@pytest.mark.parametrize(
    "rest",
    ["", "/events", "/logs", "/metrics", "/attempts", "/checkpoints", "/artifacts", "/explain"],
)
def test_what_has_not_changed_is_a_304_without_a_body(
    http: httpx.Client, server: LiveServer, rest: str
) -> None:
    path = f"/v1/jobs/{server.submit()}{rest}"
    tag = etag(http, path)
    response = http.get(path, headers={"If-None-Match": tag})
    assert (response.status_code, response.content) == (304, b"")
    assert response.headers["etag"] == tag
    assert response.headers["cache-control"] == "private, no-cache"
    assert "content-type" not in response.headers


def test_lists_and_the_cluster_have_etags_too(http: httpx.Client) -> None:
    for path in ("/v1/jobs?label=test=nothing", "/v1/cluster"):
        assert http.get(path, headers={"If-None-Match": etag(http, path)}).status_code == 304


def test_every_change_of_a_job_changes_its_etag(http: httpx.Client, server: LiveServer) -> None:
    job_id = server.submit()
    path = f"/v1/jobs/{job_id}"
    seen = [etag(http, path)]
    server.hands.claim(job_id)
    seen.append(etag(http, path))
    server.hands.report(job_id, 1, [metrics(1, {"train/loss": 1.0})])
    seen.append(etag(http, path))
    server.hands.report(job_id, 1, [metrics(2, {"train/loss": 0.5})])
    seen.append(etag(http, path))
    server.succeed(job_id)
    seen.append(etag(http, path))
    assert len(set(seen)) == len(seen)
    assert http.get(path, headers={"If-None-Match": seen[0]}).status_code == 200


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ("{}", 304),
        ("W/{}", 304),
        ('"a", W/"b",{}', 304),
        ("*", 304),
        ('"other"', 200),
        ("", 200),
        ("not a tag", 200),
    ],
)
def test_if_none_match_is_read_as_the_rfc_says(
    http: httpx.Client, server: LiveServer, form: str, status: int
) -> None:
    path = f"/v1/jobs/{server.submit()}"
    header = form.format(etag(http, path))
    assert http.get(path, headers={"If-None-Match": header}).status_code == status


def test_what_was_done_and_what_went_wrong_is_kept_by_nobody(
    http: httpx.Client, server: LiveServer
) -> None:
    job_id = server.submit()
    for response in (
        http.post("/v1/jobs", json={"recipe": "image_classification"}),
        http.post(f"/v1/jobs/{job_id}/cancel"),
        http.get("/v1/jobs/job-none"),
    ):
        assert response.headers["cache-control"] == "no-store"
        assert "etag" not in response.headers


def test_an_answer_that_depends_on_accept_says_so(http: httpx.Client, server: LiveServer) -> None:
    path = f"/v1/jobs/{server.submit()}/events"
    assert http.get(path).headers["vary"] == "Accept"
