"""Preemption, drills, hangs and goodput over HTTP."""

from __future__ import annotations

import threading
from typing import Any

import httpx

from ray_workers.shared.contracts import Cause
from tests.unit.api.serving import LiveServer, wait_until
from tests.unit.service.helpers import drilled, hang, metrics, regrouped, regrouping, spent


def drill(http: httpx.Client, job_id: str, key: str | None = None, **body: Any) -> httpx.Response:
    headers = {"Idempotency-Key": key} if key else {}
    body = {"kind": "kill", **body}
    return http.post(f"/v1/jobs/{job_id}/drill", json=body, headers=headers)


def test_a_preemption_is_taken_with_and_without_a_body_and_again(
    http: httpx.Client, server: LiveServer
) -> None:
    for sent in ({}, {"json": {}}, {"json": {"grace_s": 5}}, {"json": {"grace_s": None}}):
        job_id = server.trains()
        for _ in range(2):
            response = http.post(f"/v1/jobs/{job_id}/preempt", **sent)  # type: ignore[arg-type]
            assert (response.status_code, response.json()["state"]) == (202, "RUNNING")
            assert response.headers["cache-control"] == "no-store"
        asked = [
            event
            for event in http.get(f"/v1/jobs/{job_id}/events").json()["items"]
            if event["type"] == "preempting"
        ]
        grace_s = sent.get("json", {}).get("grace_s") or 30.0
        assert [event["data"]["grace_s"] for event in asked] == [grace_s]


def test_a_job_without_slots_is_409(http: httpx.Client, server: LiveServer) -> None:
    job_id = server.submit()
    for call in ("preempt", "drill"):
        response = http.post(
            f"/v1/jobs/{job_id}/{call}", json={"kind": "kill"} if call == "drill" else {}
        )
        assert (response.status_code, response.json()["code"]) == (409, "job_not_running")
        assert "QUEUED" in response.json()["detail"]
        assert "dray wait" in response.json()["hint"]


def test_a_drill_is_where_its_location_says(http: httpx.Client, server: LiveServer) -> None:
    job_id = server.trains()
    response = drill(http, job_id, rank=1, at_step=50)
    assert response.status_code == 202
    made = response.json()
    assert response.headers["location"] == f"/v1/jobs/{job_id}/drills/{made['id']}"
    assert http.get(response.headers["location"]).json() == made
    assert http.get(f"/v1/jobs/{job_id}/drills").json() == {"items": [made]}
    assert (made["kind"], made["rank"], made["at_step"], made["state"]) == (
        "kill",
        1,
        50,
        "waiting",
    )
    assert made["finished_at"] is None


def test_one_key_makes_one_drill_of_one_job(http: httpx.Client, server: LiveServer) -> None:
    job_id, other = server.trains(), server.trains()
    first, again = (drill(http, job_id, key="once", at_step=50) for _ in range(2))
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json() == again.json()
    for changed in (drill(http, job_id, key="once"), drill(http, other, key="once", at_step=50)):
        assert (changed.status_code, changed.json()["code"]) == (422, "idempotency_key_reused")
    assert len(http.get(f"/v1/jobs/{job_id}/drills").json()["items"]) == 1


def test_waiting_for_a_drill_ends_when_it_is_over(http: httpx.Client, server: LiveServer) -> None:
    job_id = server.trains()
    made = drill(http, job_id).json()
    path = f"/v1/jobs/{job_id}/drills/{made['id']}"
    assert http.get(path, params={"wait_s": 0.05}).json()["state"] == "waiting"

    def pass_it() -> None:
        wait_until(lambda: server.num_waiting(job_id), "the call to wait")
        server.hands.report(job_id, 1, [drilled(made["id"], "struck", step=12)])
        over = drilled(made["id"], "passed", step=12, recovery_s=0.25, steps_lost=0)
        server.hands.report(job_id, 1, [over])

    thread = threading.Thread(target=pass_it)
    thread.start()
    done = http.get(path, params={"wait_s": 30}, timeout=40).json()
    thread.join()
    assert (done["state"], done["recovery_s"], done["steps_lost"]) == ("passed", 0.25, 0)
    assert done["message"] == "recovered in 0.25 s, 0 steps lost"


def test_a_job_that_is_mended_shows_it(http: httpx.Client, server: LiveServer) -> None:
    job_id = server.trains()
    server.hands.report(job_id, 1, [regrouping(1)])
    assert http.get(f"/v1/jobs/{job_id}").json()["state"] == "RECOVERING"
    server.hands.report(job_id, 1, [regrouped(1), metrics(11, {"train/loss": 0.1})])
    job = http.get(f"/v1/jobs/{job_id}").json()
    assert (job["state"], job["recoveries"], job["goodput"]) == ("RUNNING", 1, None)


def test_goodput_is_the_same_wherever_the_job_is_answered(
    http: httpx.Client, server: LiveServer
) -> None:
    job_id = server.trains(labels={"test": "goodput"})
    server.hands.report(job_id, 1, [spent(useful=9.0, data_wait=0.5, idle=0.5)])
    alone = http.get(f"/v1/jobs/{job_id}").json()
    listed = http.get("/v1/jobs", params={"label": "test=goodput"}).json()["items"]
    waited = http.get(f"/v1/jobs/{job_id}", params={"wait_s": 0}).json()
    assert alone == waited == listed[0]
    goodput = alone["goodput"]
    assert goodput["total"] == sum(goodput["slot_seconds"].values()) == 10.0
    assert goodput["useful_share"] == 0.9


def test_hangs_are_listed_with_everything(http: httpx.Client, server: LiveServer) -> None:
    job_id = server.trains()
    assert http.get(f"/v1/jobs/{job_id}/hangs").json() == {"items": []}
    server.hands.report(job_id, 1, [hang(1)])
    server.hands.end(job_id, 1, Cause.USER_ERROR)
    response = http.get(f"/v1/jobs/{job_id}/hangs")
    (found,) = response.json()["items"]
    assert found["culprits"] == [1]
    assert [rank["stack"] for rank in found["ranks"]] == ["File x, line 1"] * 2
    headers = {"If-None-Match": response.headers["etag"]}
    assert http.get(f"/v1/jobs/{job_id}/hangs", headers=headers).status_code == 304


def test_slot_seconds_are_counted_for_prometheus(http: httpx.Client, server: LiveServer) -> None:
    def seconds(slot_class: str) -> float:
        wanted = f'dray_slot_seconds_total{{class="{slot_class}"}} '
        (line,) = [x for x in http.get("/metrics").text.splitlines() if x.startswith(wanted)]
        return float(line.removeprefix(wanted))

    before = seconds("useful"), seconds("recovering")
    job_id = server.trains()
    server.hands.report(job_id, 1, [spent(useful=4.0)])
    server.hands.report(job_id, 1, [spent(useful=6.0, recovering=1.5)])
    assert (seconds("useful"), seconds("recovering")) == (before[0] + 6.0, before[1] + 1.5)
