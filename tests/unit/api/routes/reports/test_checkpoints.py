"""A checkpoint's files are listed according to its manifest, and can be downloaded completely or in
part."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import httpx
import pytest

from ray_workers.shared.contracts import Frame, FrameKind
from ray_workers.shared.names import attempt_prefix
from tests.unit.api.serving import LiveServer

STATE = bytes(range(256)) * 40


def saved(
    server: LiveServer, job_id: str, step: int, content: bytes = STATE, **changes: Any
) -> Frame:
    """Write a checkpoint as a rank would, and return the frame that reports it."""
    key = f"{attempt_prefix(job_id, 1)}/checkpoints/step-{step:012d}"
    storage = server.hands.storage
    entry = {
        "path": "state.pt",
        "size_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    manifest = json.dumps({"version": 1, "step": step, "files": [entry | changes]}).encode()
    storage.write_bytes(f"{key}/state.pt", content)
    storage.write_bytes(f"{key}/manifest.json", manifest)
    body = {
        "step": step,
        "url": storage.url_of(key),
        "size_bytes": len(content) + len(manifest),
        "manifest_sha256": hashlib.sha256(manifest).hexdigest(),
        "metrics": {},
    }
    return Frame(0, 0, FrameKind.CHECKPOINT, server.hands.now.timestamp(), body)


@pytest.fixture
def job_id(server: LiveServer) -> str:
    job_id = server.submit()
    server.train(job_id, saved(server, job_id, 10))
    return job_id


def test_files_are_listed_with_size_and_hash_and_the_manifest_last(
    http: httpx.Client, job_id: str
) -> None:
    listed = http.get(f"/v1/jobs/{job_id}/checkpoints").json()["items"]
    state, manifest = http.get(f"/v1/jobs/{job_id}/checkpoints/10/files").json()["items"]
    assert state == {
        "path": "state.pt",
        "size_bytes": len(STATE),
        "sha256": hashlib.sha256(STATE).hexdigest(),
    }
    assert manifest["path"] == "manifest.json"
    assert manifest["sha256"] == listed[0]["sha256"]
    assert state["size_bytes"] + manifest["size_bytes"] == listed[0]["size_bytes"]


def test_each_listed_file_is_downloaded_and_matches_its_hash(
    http: httpx.Client, job_id: str
) -> None:
    url = f"/v1/jobs/{job_id}/checkpoints/10/files"
    for file in http.get(url).json()["items"]:
        response = http.get(f"{url}/{file['path']}")
        assert response.status_code == 200
        assert hashlib.sha256(response.content).hexdigest() == file["sha256"]
        assert response.headers["etag"] == f'"{file["sha256"]}"'


def test_a_range_of_a_file_is_what_was_asked_for(http: httpx.Client, job_id: str) -> None:
    url = f"/v1/jobs/{job_id}/checkpoints/10/files/state.pt"
    part = http.get(url, headers={"Range": "bytes=1000-1099"})
    assert (part.status_code, part.content) == (206, STATE[1000:1100])
    beyond = http.get(url, headers={"Range": "bytes=999999-"})
    assert (beyond.status_code, beyond.json()["code"]) == (416, "range_not_satisfiable")


@pytest.mark.parametrize(
    "path",
    [
        *("none", "..%2fmanifest.json", "state.pt%00", "/state.pt"),
        *("state.pt/", "%2e%2e%2f%2e%2e%2fx", "state.pt%23", "%2fetc%2fpasswd"),
    ],
)
def test_a_path_that_the_manifest_does_not_name_is_a_problem(
    http: httpx.Client, job_id: str, path: str
) -> None:
    request = http.build_request("GET", f"/v1/jobs/{job_id}/checkpoints/10/files/x")
    request.url = request.url.copy_with(
        raw_path=f"/v1/jobs/{job_id}/checkpoints/10/files/{path}".encode()
    )
    response = http.send(request)
    assert response.status_code in (400, 404)
    assert response.json()["code"] in ("checkpoint_not_found", "malformed_request", "not_found")


def test_an_unknown_step_says_which_there_are(http: httpx.Client, job_id: str) -> None:
    response = http.get(f"/v1/jobs/{job_id}/checkpoints/11/files")
    assert (response.status_code, response.json()["code"]) == (404, "checkpoint_not_found")
    assert "10" in response.json()["hint"]
    assert http.get(f"/v1/jobs/{job_id}/checkpoints/x/files").status_code == 422
    assert http.get(f"/v1/jobs/{job_id}/checkpoints/-1/files").status_code == 422
    assert http.get("/v1/jobs/job-none/checkpoints/1/files").json()["code"] == "job_not_found"


def test_a_job_without_checkpoints_says_so(http: httpx.Client, server: LiveServer) -> None:
    answer = http.get(f"/v1/jobs/{server.submit()}/checkpoints/1/files").json()
    assert (answer["code"], answer["hint"]) == (
        "checkpoint_not_found",
        "the job has no checkpoints",
    )


def test_a_file_that_is_not_as_it_was_committed_is_not_served(
    http: httpx.Client, server: LiveServer, job_id: str
) -> None:
    url = f"/v1/jobs/{job_id}/checkpoints/10/files"
    key = f"{attempt_prefix(job_id, 1)}/checkpoints/step-{10:012d}"
    server.hands.storage.write_bytes(f"{key}/state.pt", b"short")
    assert (
        "deleted or changed after the checkpoint was committed"
        in http.get(f"{url}/state.pt").json()["detail"]
    )
    server.hands.storage.write_bytes(f"{key}/manifest.json", b"{}")
    assert "changed after the checkpoint was committed" in http.get(url).json()["detail"]
    server.hands.storage.delete_tree(key)
    gone = http.get(url)
    assert (gone.status_code, gone.json()["code"]) == (404, "checkpoint_not_found")


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "../../x"},
        {"path": "/etc/passwd"},
        {"path": "a\nb"},
        {"path": "a\u202eb"},
        {"size_bytes": "many"},
        {"path": 3},
    ],
    ids=ascii,
)
def test_a_manifest_that_names_what_is_no_file_of_it_is_refused(
    http: httpx.Client, server: LiveServer, changes: dict[str, Any]
) -> None:
    job_id = server.submit()
    server.train(job_id, saved(server, job_id, 1, **changes))
    response = http.get(f"/v1/jobs/{job_id}/checkpoints/1/files")
    assert response.status_code == 404
    assert "does not list any files" in response.json()["detail"]
