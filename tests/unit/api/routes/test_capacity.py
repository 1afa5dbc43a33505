"""Full storage over HTTP: it is reported everywhere, and deleting something ends it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.unit.api.serving import serving


def test_a_full_storage_refuses_submits_until_something_was_deleted(tmp_path: Path) -> None:
    with (
        serving(tmp_path, storage_quota_bytes=100) as server,
        server.client() as http,
    ):
        job_id = server.submit()
        server.train(job_id, server.artifact(job_id, "model.bin", b"x" * 100))
        server.succeed(job_id)
        watch = server.context.runtime.jobs.storage_watch
        asyncio.run(watch.look(server.hands.now))
        refused = http.post("/v1/jobs", json={"recipe": "image_classification"})
        assert (refused.status_code, refused.json()["code"]) == (507, "quota_exceeded")
        assert refused.json()["title"] == "Insufficient Storage"
        assert "dray delete" in refused.json()["hint"]
        ready = http.get("/readyz")
        assert ready.status_code == 200, "whoever makes room does it through this server"
        assert ready.json()["checks"]["storage"].startswith("full: the storage holds 100 bytes")
        shown = http.get("/v1/cluster").json()["storage"]
        assert (shown["used_bytes"], shown["quota_bytes"]) == (100, 100)
        assert http.delete(f"/v1/jobs/{job_id}").status_code == 204
        assert http.get("/readyz").json()["checks"]["storage"] == "ok"
        assert http.get("/v1/cluster").json()["storage"]["used_bytes"] == 0
        assert http.post("/v1/jobs", json={"recipe": "image_classification"}).status_code == 201


def test_what_a_job_starts_from_is_named_when_it_is_missing_or_needed(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as server,
        server.client() as http,
    ):
        source = server.submit()
        server.train(source, server.hands.checkpoint(source, 1, 10))
        server.succeed(source)
        body = {"recipe": "image_classification", "init_from": {"job": source, "step": 11}}
        missing = http.post("/v1/jobs", json=body)
        assert (missing.status_code, missing.json()["code"]) == (422, "init_from_not_found")
        assert missing.json()["pointer"] == "/init_from/step"
        whole = {"job": source, "take": "everything"}
        other = http.post("/v1/jobs", json={**body, "init_from": whole, "train": {"seed": 1}})
        assert (other.status_code, other.json()["code"]) == (422, "init_from_differs")
        wide = http.post("/v1/jobs", json={**body, "init_from": whole, "model": {"width": 64}})
        assert (wide.status_code, wide.json()["code"]) == (422, "init_from_differs")
        assert wide.json()["pointer"] == "/model/width"
        assert other.json()["pointer"] == "/train/seed"
        body["init_from"] = {"job": source, "step": 10}
        user = http.post("/v1/jobs", json=body).json()["id"]
        needed = http.delete(f"/v1/jobs/{source}")
        assert (needed.status_code, needed.json()["code"]) == (409, "checkpoint_in_use")
        assert user in needed.json()["detail"]
