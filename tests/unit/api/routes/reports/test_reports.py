from __future__ import annotations

import hashlib
import math
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from ray_workers.shared.names import attempt_prefix
from tests.unit.api.serving import LiveServer, wait_until
from tests.unit.service.helpers import START, log, metrics, used

CONTENT = bytes(range(256)) * 16


def test_metrics_come_by_key_and_what_json_can_not_hold_by_name(
    http: httpx.Client, server: LiveServer
) -> None:
    job_id = server.submit()
    values = [1.0, math.nan, -math.inf, 0.25]
    frames = [metrics(n, {"train/loss": v, "lr": 0.1}) for n, v in enumerate(values, start=1)]
    server.train(job_id, *frames)
    answer = http.get(f"/v1/jobs/{job_id}/metrics?keys=train/loss").json()
    loss = {"steps": [1, 2, 3, 4], "values": [1.0, "NaN", "-Infinity", 0.25], "times": None}
    assert answer["series"] == {"train/loss": loss}
    query = "keys=train/loss&times=true&in_order=true&max_points=2&after_step=1"
    answer = http.get(f"/v1/jobs/{job_id}/metrics?{query}").json()
    at = START.timestamp()
    assert answer["series"]["train/loss"]["times"] == [at, at]
    assert (answer["series"]["train/loss"]["steps"], answer["next_step"]) == ([2, 3], 3)
    both = http.get(f"/v1/jobs/{job_id}/metrics?keys=train/loss,lr&max_points=2").json()["series"]
    assert set(both) == {"train/loss", "lr"}
    repeated = http.get(f"/v1/jobs/{job_id}/metrics?keys=lr&keys=none").json()["series"]
    assert set(repeated) == {"lr"}


def test_metrics_that_are_asked_for_again_and_again_miss_no_step(
    http: httpx.Client, server: LiveServer
) -> None:
    job_id = server.submit()
    server.train(job_id)
    seen: dict[int, float] = {}
    after = 0
    for step in range(1, 6):
        server.hands.report(job_id, 1, [metrics(step, {"a": step / 2})])
        answer = http.get(f"/v1/jobs/{job_id}/metrics?after_step={after}").json()
        series = answer["series"]["a"]
        assert all(step > after for step in series["steps"])
        seen |= dict(zip(series["steps"], series["values"], strict=True))
        after = answer["next_step"]
    server.succeed(job_id)
    assert seen == {step: step / 2 for step in range(1, 6)}
    last = http.get(f"/v1/jobs/{job_id}/metrics?after_step={after}").json()["next_step"]
    assert http.get(f"/v1/jobs/{job_id}/metrics?after_step={last}").json()["series"] == {}


def test_system_metrics_are_served_by_rank_over_time(
    http: httpx.Client, server: LiveServer
) -> None:
    job_id = server.submit(resources={"num_workers": 2})
    server.train(job_id)
    now = int(server.hands.now.timestamp())
    values = {"system/cpu": 1.5, "system/memory_rss": 2.0**30}
    server.hands.report(job_id, 1, [used(server.hands.now, values, ranks=(0, 1))])
    url = f"/v1/jobs/{job_id}/metrics/system"
    one = {"times": [now], "values": [1.5]}
    answer = http.get(f"{url}?rank=1&keys=system/cpu,none&max_points=2").json()
    assert answer == {"series": {"system/cpu": one}, "next_time": now}
    assert http.get(f"{url}?after_time={now}").json() == {"series": {}, "next_time": now}
    shown = {"system/cpu": 1.5, "system/memory_rss": float(f"{2**30:.6g}")}
    ranks = [{"rank": rank, "values": shown} for rank in (0, 1)]
    assert http.get(f"{url}/newest").json() == {"time": now, "ranks": ranks}


def test_log_pages_follow_each_other_to_the_end(http: httpx.Client, server: LiveServer) -> None:
    job_id = server.submit(resources={"num_workers": 2})
    server.train(job_id, *(log(n, f"line {n}", rank=rank) for n in range(3) for rank in (0, 1)))
    server.succeed(job_id)
    texts, cursor = [], ""
    for _ in range(10):
        page = http.get(f"/v1/jobs/{job_id}/logs?rank=1&limit=2{cursor}").json()
        texts += [line["text"] for line in page["items"]]
        cursor = f"&cursor={page['next_cursor']}"
        if page["complete"]:
            break
    assert texts == ["line 0", "line 1", "line 2"]
    assert page["complete"]


def test_a_long_poll_of_logs_answers_when_lines_come(
    http: httpx.Client, server: LiveServer
) -> None:
    job_id = server.submit()
    server.train(job_id)
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        waiting = pool.submit(http.get, f"/v1/jobs/{job_id}/logs?wait_s=60", timeout=70)
        wait_until(lambda: server.num_waiting(job_id), "the long poll")
        server.hands.report(job_id, 1, [log(0, "hello")])
        assert [line["text"] for line in waiting.result().json()["items"]] == ["hello"]
    assert time.monotonic() - began < 30, "half of what it would wait"


def test_a_search_of_a_log_has_only_its_matches(http: httpx.Client, server: LiveServer) -> None:
    job_id = server.submit()
    server.train(job_id, *(log(n, f"Line {n}" if n % 2 else "other") for n in range(6)))
    server.succeed(job_id)
    page = http.get(f"/v1/jobs/{job_id}/logs", params={"contains": "lINE"}).json()
    found = [(line["number"], line["text"]) for line in page["items"]]
    assert found == [(1, "Line 1"), (3, "Line 3"), (5, "Line 5")]
    assert page["complete"]
    for bad in ("", "x" * 1001):
        answer = http.get(f"/v1/jobs/{job_id}/logs", params={"contains": bad})
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_parameter")
    nobody = http.get("/v1/jobs/job-none/logs", params={"contains": "x"})
    assert nobody.status_code == 404


def test_a_search_waits_for_lines_that_match(http: httpx.Client, server: LiveServer) -> None:
    job_id = server.submit()
    server.train(job_id, log(0, "first"))
    url = f"/v1/jobs/{job_id}/logs?contains=second"
    cursor = http.get(url).json()["next_cursor"]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(http.get, f"{url}&wait_s=60&cursor={cursor}", timeout=70)
        wait_until(lambda: server.num_waiting(job_id), "the long poll")
        server.hands.report(job_id, 1, [log(1, "the second")])
        assert [line["text"] for line in waiting.result().json()["items"]] == ["the second"]


def test_a_cursor_of_other_logs_is_refused(http: httpx.Client, server: LiveServer) -> None:
    cursor = http.get(f"/v1/jobs/{server.submit()}/logs").json()["next_cursor"]
    response = http.get(f"/v1/jobs/{server.submit()}/logs?cursor={cursor}")
    assert (response.status_code, response.json()["code"]) == (400, "bad_cursor")


def test_attempts_and_checkpoints_are_listed(http: httpx.Client, server: LiveServer) -> None:
    job_id = server.submit()
    server.train(job_id)
    server.hands.report(job_id, 1, [server.hands.checkpoint(job_id, 1, 5)])
    attempts = http.get(f"/v1/jobs/{job_id}/attempts").json()["items"]
    assert [attempt["attempt"] for attempt in attempts] == [1]
    checkpoints = http.get(f"/v1/jobs/{job_id}/checkpoints").json()["items"]
    assert [(c["step"], c["is_latest"]) for c in checkpoints] == [(5, True)]


@pytest.fixture
def artifact_url(server: LiveServer, http: httpx.Client) -> str:
    job_id = server.submit()
    server.train(job_id, server.artifact(job_id, "out/größe.bin", CONTENT))
    items = http.get(f"/v1/jobs/{job_id}/artifacts").json()["items"]
    assert [(item["path"], item["size_bytes"]) for item in items] == [
        ("out/größe.bin", len(CONTENT))
    ]
    return f"/v1/jobs/{job_id}/artifacts/{items[0]['id']}"


def test_an_artifact_is_downloaded_whole_as_a_file_to_keep(
    http: httpx.Client, artifact_url: str
) -> None:
    response = http.get(artifact_url)
    assert (response.status_code, response.content) == (200, CONTENT)
    assert response.headers["content-length"] == str(len(CONTENT))
    assert response.headers["etag"] == f'"{hashlib.sha256(CONTENT).hexdigest()}"'
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["content-disposition"].startswith("attachment; filename*=UTF-8''gr%C3")


def test_a_range_of_an_artifact_is_what_was_asked_for(
    http: httpx.Client, artifact_url: str
) -> None:
    response = http.get(artifact_url, headers={"Range": "bytes=100-299"})
    assert (response.status_code, response.content) == (206, CONTENT[100:300])
    assert response.headers["content-range"] == f"bytes 100-299/{len(CONTENT)}"


def test_a_range_of_another_version_is_the_whole(http: httpx.Client, artifact_url: str) -> None:
    response = http.get(artifact_url, headers={"Range": "bytes=0-1", "If-Range": '"other"'})
    assert (response.status_code, response.content) == (200, CONTENT)


def test_a_range_beyond_the_end_is_a_416_with_the_size(
    http: httpx.Client, artifact_url: str
) -> None:
    response = http.get(artifact_url, headers={"Range": "bytes=99999-"})
    assert (response.status_code, response.json()["code"]) == (416, "range_not_satisfiable")
    assert response.headers["content-range"] == f"bytes */{len(CONTENT)}"


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [
        ("bytes=-16", -16, None),
        ("bytes=-999999", 0, None),
        ("bytes=4000-", 4000, None),
        ("bytes=4000-999999", 4000, None),
        ("bytes=0-0", 0, 1),
    ],
)
def test_ranges_from_the_end_and_over_it_are_what_the_file_has_of_them(
    http: httpx.Client, artifact_url: str, asked: str, start: int, end: int | None
) -> None:
    response = http.get(artifact_url, headers={"Range": asked})
    assert (response.status_code, response.content) == (206, CONTENT[start:end])
    assert response.headers["content-length"] == str(len(response.content))


@pytest.mark.parametrize("asked", ["bytes=0-1,5-6", "bytes=5-2", "lines=0-1", "bytes=a-b"])
def test_what_is_not_one_range_of_bytes_is_answered_with_the_whole(
    http: httpx.Client, artifact_url: str, asked: str
) -> None:
    response = http.get(artifact_url, headers={"Range": asked})
    assert (response.status_code, response.content) == (200, CONTENT)


def test_if_range_keeps_the_range_only_for_the_same_version(
    http: httpx.Client, artifact_url: str
) -> None:
    etag = http.head(artifact_url).headers["etag"]
    for condition, status in (
        (etag, 206),
        (f"W/{etag}", 200),
        ('"other"', 200),
        ("Sat, 21 Nov 2026 00:00:00 GMT", 200),
    ):
        headers = {"Range": "bytes=0-1", "If-Range": condition}
        assert http.get(artifact_url, headers=headers).status_code == status


def test_head_says_what_get_would_and_sends_nothing(http: httpx.Client, artifact_url: str) -> None:
    head, get = http.head(artifact_url), http.get(artifact_url)
    assert (head.status_code, head.content) == (200, b"")
    same = ("content-length", "etag", "content-type", "content-disposition", "accept-ranges")
    assert [head.headers[name] for name in same] == [get.headers[name] for name in same]
    assert http.head(artifact_url, headers={"Range": "bytes=0-1"}).status_code == 200


def test_a_download_that_the_caller_has_already_is_not_sent_again(
    http: httpx.Client, artifact_url: str
) -> None:
    etag = http.get(artifact_url).headers["etag"]
    for headers in ({"If-None-Match": etag}, {"If-None-Match": etag, "Range": "bytes=0-1"}):
        response = http.get(artifact_url, headers=headers)
        assert (response.status_code, response.content) == (304, b"")
        assert response.headers["etag"] == etag


def test_an_empty_artifact_is_downloaded(http: httpx.Client, server: LiveServer) -> None:
    job_id = server.submit()
    server.train(job_id, server.artifact(job_id, "empty", b""))
    artifact_id = http.get(f"/v1/jobs/{job_id}/artifacts").json()["items"][0]["id"]
    response = http.get(f"/v1/jobs/{job_id}/artifacts/{artifact_id}")
    assert (response.status_code, response.content) == (200, b"")


def test_an_artifact_whose_file_is_gone_is_a_404(http: httpx.Client, server: LiveServer) -> None:
    job_id = server.submit()
    server.train(job_id, server.artifact(job_id, "gone", b"x"))
    artifact_id = http.get(f"/v1/jobs/{job_id}/artifacts").json()["items"][0]["id"]
    path = server.hands.storage.local_path(f"{attempt_prefix(job_id, 1)}/artifacts/gone")
    assert path is not None
    path.unlink()
    url = f"/v1/jobs/{job_id}/artifacts/{artifact_id}"
    assert http.get(url).json()["code"] == "artifact_not_found"
    other = http.get(f"/v1/jobs/{job_id}/artifacts/none")
    assert (other.status_code, other.json()["code"]) == (404, "artifact_not_found")


def test_the_cluster_is_shown_before_it_was_ever_seen(http: httpx.Client) -> None:
    answer = http.get("/v1/cluster").json()
    assert (answer["connected"], answer["nodes"]) == (False, [])
    assert answer["reason"]


def test_the_process_is_alive_and_ready(http: httpx.Client) -> None:
    assert http.get("/healthz").json() == {"status": "ok"}
    ready = http.get("/readyz")
    assert (ready.status_code, ready.json()["checks"]["database"]) == (200, "ok")


def test_a_service_without_its_database_is_not_ready(
    http: httpx.Client,
    server: LiveServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log contains the reason. Callers without a token don't see names and addresses."""

    async def away(work: object) -> None:
        raise ConnectionError("no route to it")

    monkeypatch.setattr(server.context.runtime.database, "read", away)
    ready = http.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (503, "not ready")
    assert ready.json()["checks"]["database"] == "does not answer"
    assert "no route to it" in caplog.text


def test_prometheus_sees_jobs_and_requests_by_template_and_never_an_id(
    http: httpx.Client, server: LiveServer
) -> None:
    job_id = server.submit()
    http.get(f"/v1/jobs/{job_id}")
    http.get("/invented/by/anyone")
    text = http.get("/metrics").text
    assert 'dray_http_requests_total{method="GET",route="/v1/jobs/{job_id}",status="200"}' in text
    assert 'route="unknown",status="404"' in text
    queued = next(line for line in text.splitlines() if line.startswith('dray_jobs{state="QUEUED"'))
    assert float(queued.split()[-1]) >= 1
    assert "job-" not in text
    assert "invented" not in text
