"""Prometheus gets few series, whatever users do."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import event

from ray_workers.shared.contracts import Cause
from service.domain.meter import METRICS
from tests.unit.api.serving import LiveServer

LABELS = {
    "dray_http_requests": {"method", "route", "status"},
    "dray_http_request_seconds": {"method", "route"},
    "dray_jobs": {"state"},
    "dray_queue_depth": set(),
    "dray_cluster_connected": set(),
    "dray_nodes": {"accepted"},
    "dray_resources": {"kind", "what"},
    "dray_slot_seconds": {"class"},
    "dray_queue_jobs": {"queue", "state"},
    "dray_queue_oldest_seconds": {"queue"},
    "dray_cluster_seen_seconds": set(),
    "dray_quarantined_slots": set(),
    "dray_storage_full": set(),
    "dray_webhooks": {"state"},
    "dray_webhook_waiting": set(),
    "dray_webhook_oldest_seconds": set(),
    **{each.name: {each.label} - {None} for each in METRICS},
}


def scrape(http: httpx.Client) -> dict[str, dict[tuple[str, frozenset[tuple[str, str]]], float]]:
    """Return the samples of each family, by name and labels."""
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        family.name: {(s.name, frozenset(s.labels.items())): s.value for s in family.samples}
        for family in text_string_to_metric_families(response.text)
    }


def test_every_family_has_the_labels_it_should_have_and_no_others(
    http: httpx.Client, server: LiveServer
) -> None:
    server.submit()
    seen = scrape(http)
    assert {name.removesuffix("_created") for name in seen} == LABELS.keys()
    for name, samples in seen.items():
        for _, labels in samples:
            wanted = LABELS[name.removesuffix("_created")]
            assert {label for label, _ in labels} - {"le"} == wanted, name


def test_routes_are_templates_and_nothing_that_people_make_up_becomes_a_series(
    http: httpx.Client, server: LiveServer
) -> None:
    server.queue("made-up-queue")
    job_id = server.submit(name="made-up-name", queue="made-up-queue", labels={"made-up": "x"})
    paths = set(http.get("/openapi.json").json()["paths"])

    def visit() -> None:
        for path in ("", "/events", "/logs", "/explain", "/artifacts/made-up"):
            http.get(f"/v1/jobs/{job_id}{path}")
        http.get("/v1/jobs/made-up?queue=made-up-queue")
        http.get("/v1/queues/made-up-queue")
        http.get("/made/up")
        http.request("MKCOL", "/v1/jobs")
        http.put("/v1/jobs")

    visit()
    seen = scrape(http)
    assert {"queue": "made-up-queue", "state": "QUEUED"} in [
        dict(labels) for _, labels in seen["dray_queue_jobs"]
    ], "queues are made by admins, and few"
    text = str(seen).replace("made-up-queue", "")
    assert job_id not in text
    assert "made" not in text
    routes = {dict(key[1])["route"].replace(":path}", "}") for key in seen["dray_http_requests"]}
    described = {route for route in routes if "/mlflow" not in route}
    assert described <= paths | {
        "unknown",
        "/openapi.json",
        "/",
        "/docs",
        "/page/{version}/{path}",
    }
    before = sum(map(len, seen.values()))
    for _ in range(3):
        server.submit()
        visit()
    assert sum(map(len, scrape(http).values())) <= before + 20  # for /metrics itself, and POST


def test_jobs_are_counted_by_state_and_the_queue_by_its_depth(
    http: httpx.Client, server: LiveServer
) -> None:
    def depth() -> tuple[float, float]:
        seen = scrape(http)
        queued = seen["dray_jobs"]["dray_jobs", frozenset({("state", "QUEUED")})]
        return seen["dray_queue_depth"]["dray_queue_depth", frozenset()], queued

    before = depth()
    assert before[0] == before[1]
    job_id = server.submit()
    assert depth() == (before[0] + 1, before[1] + 1)
    server.hands.claim(job_id)
    assert depth() == before


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_time_of_each_request_is_in_a_histogram(http: httpx.Client, method: str) -> None:
    def count() -> float:
        samples = scrape(http)["dray_http_request_seconds"]
        labels = frozenset({("method", method), ("route", "/v1/jobs")})
        return samples.get(("dray_http_request_seconds_count", labels), 0.0)

    before = count()
    http.request(method, "/v1/jobs", json={"recipe": "image_classification"})
    assert count() == before + 1


def test_a_queue_tells_how_long_its_oldest_job_waits_that_nobody_holds(
    http: httpx.Client, server: LiveServer
) -> None:
    def oldest() -> float:
        samples = scrape(http)["dray_queue_oldest_seconds"]
        return samples["dray_queue_oldest_seconds", frozenset({("queue", "aged")})]

    server.queue("aged")
    held = server.submit(queue="aged")
    server.age(held, 7200)
    http.patch(f"/v1/jobs/{held}", json={"held": True})
    assert oldest() == 0, "it is held"
    server.age(server.submit(queue="aged"), 3600)
    assert 3600 <= oldest() < 7000
    server.submit(queue="aged")
    assert oldest() >= 3600


def test_a_scrape_asks_the_same_of_the_database_however_many_jobs_there_are(
    http: httpx.Client, server: LiveServer
) -> None:
    statements = 0

    def count(*_: object) -> None:
        nonlocal statements
        statements += 1

    engine = server.context.runtime.database._read_engine
    scrape(http)
    event.listen(engine, "before_cursor_execute", count)
    scrape(http)
    once, statements = statements, 0
    server.submit(array={"size": 300})
    statements = 0
    scrape(http)
    event.remove(engine, "before_cursor_execute", count)
    assert statements == once < 20


def test_starts_waits_recoveries_and_ends_are_counted(
    http: httpx.Client, server: LiveServer
) -> None:
    def counted() -> dict[str, float]:
        seen = scrape(http)
        names = {
            "dray_job_wait_seconds": {},
            "dray_job_start_seconds": {},
            "dray_recovery_seconds": {"how": "restart"},
        }
        found = {
            name: seen[name][f"{name}_count", frozenset(labels.items())]
            for name, labels in names.items()
        }
        ends = seen["dray_job_ends"]
        return found | {
            state: ends["dray_job_ends_total", frozenset({("state", state)})]
            for state in ("SUCCEEDED", "CANCELLED")
        }

    before = counted()
    job_id = server.submit()
    server.train(job_id)
    server.hands.end(job_id, 1, Cause.NODE_LOST)
    server.hands.claim(job_id, 1)
    server.hands.report(job_id, 2)
    server.hands.end(job_id, 2)
    http.post(f"/v1/jobs/{server.submit()}/cancel")
    array = http.get(f"/v1/jobs/{server.submit(array={'size': 3})}").json()["array_id"]
    http.post(f"/v1/arrays/{array}/cancel")
    after = counted()
    assert {name: after[name] - before[name] for name in before} == {
        "dray_job_wait_seconds": 1,
        "dray_job_start_seconds": 2,
        "dray_recovery_seconds": 1,
        "SUCCEEDED": 1,
        "CANCELLED": 4,
    }
