"""Checkpoints that exist in the storage although their reports were lost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ray_workers.shared.contracts import Cause, Outcome, Phase
from ray_workers.shared.names import attempt_prefix
from service.checkpoints import catalog
from service.storage.storage import Storage
from tests.unit.service.helpers import Service, events_of, resumed


def commit(
    storage: Storage, job_id: str, attempt: int, step: int, changes: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint as a rank would, with `changes` to its manifest."""
    key = f"{attempt_prefix(job_id, attempt)}/checkpoints/step-{step:012d}"
    storage.write_bytes(f"{key}/state.json", b"state")
    file = {"path": "state.json", "size_bytes": 5, "sha256": hashlib.sha256(b"state").hexdigest()}
    manifest = {"step": step, "metrics": {"val/loss": 0.5}, "files": [file]}
    storage.write_bytes(
        f"{key}/manifest.json", json.dumps({**manifest, **(changes or {})}).encode()
    )


def end(service: Service, job_id: str, attempt: int, cause: Cause = Cause.NODE_LOST) -> None:
    """End an attempt as the reconciler would."""
    outcome = Outcome.unseen(cause, "a node that carried it is gone")
    reply = service.reply(job_id, attempt, phase=Phase.ENDED, outcome=outcome)
    found = list(catalog.committed(service.storage, job_id, attempt))
    service.store(job_id, attempt, reply, in_storage=found)


async def test_the_next_attempt_resumes_from_checkpoints_that_nobody_reported(
    service: Service,
) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [service.checkpoint(job_id, 1, 10)])
    for step in (10, 20, 30):
        commit(service.storage, job_id, 1, step)
    end(service, job_id, 1)
    claimed = service.claim(job_id, 1)
    assert claimed is not None
    assert [ref.step for ref in claimed.resume_from] == [30, 20, 10]
    key = f"{attempt_prefix(job_id, 1)}/checkpoints/step-{30:012d}"
    manifest = service.storage.read_bytes(f"{key}/manifest.json")
    newest = claimed.resume_from[0]
    assert newest.url == service.storage.url_of(key)
    assert newest.manifest_sha256 == hashlib.sha256(manifest).hexdigest()
    (event,) = await events_of(service, job_id, "checkpoints_found")
    assert event.data == {"steps": [20, 30]}
    shown = (await service.queries.checkpoints(job_id)).items[0]
    assert (shown.step, shown.size_bytes) == (30, 5 + len(manifest))


async def test_checkpoints_behind_which_a_later_attempt_went_back_stay_void(
    service: Service,
) -> None:
    job_id = await service.running()
    for step in (10, 20, 30):
        commit(service.storage, job_id, 1, step)
    end(service, job_id, 1)
    service.claim(job_id, 1)
    service.report(job_id, 2, [resumed(20)])
    commit(service.storage, job_id, 2, 25)
    end(service, job_id, 2)
    claimed = service.claim(job_id, 2)
    assert claimed is not None
    assert [ref.step for ref in claimed.resume_from] == [25, 20, 10]


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 11},
        {"files": [{"path": "state.json", "size_bytes": 6, "sha256": "0" * 64}]},
        {"files": [{"path": "../../x", "size_bytes": 5, "sha256": "0" * 64}]},
        {"files": [{"path": "gone.json", "size_bytes": 5, "sha256": "0" * 64}]},
        {"files": None},
        {"metrics": 1},
    ],
)
def test_a_broken_checkpoint_does_not_count_and_hides_no_other(
    storage: Storage, changes: dict[str, Any]
) -> None:
    commit(storage, "job-1", 1, 5)
    commit(storage, "job-1", 1, 10, changes)
    uncommitted = f"{attempt_prefix('job-1', 1)}/checkpoints"
    storage.write_bytes(f"{uncommitted}/step-{15:012d}/state.json", b"state")
    storage.write_bytes(f"{uncommitted}/step-x/manifest.json", b"{}")
    storage.write_bytes(f"{uncommitted}/step-{16:012d}", b"a file")
    assert [frame.body["step"] for frame in catalog.committed(storage, "job-1", 1)] == [5]


@pytest.mark.parametrize("kind", ["folder", "fsspec"])
def test_a_storage_lists_the_names_below_a_key(tmp_path: Path, kind: str) -> None:
    url = tmp_path.as_uri() if kind == "folder" else f"memory://{tmp_path.name}-{kind}"
    storage = Storage(url)
    assert storage.names("jobs") == []
    for key in ("jobs/b/manifest.json", "jobs/a", "other"):
        storage.write_bytes(key, b"x")
    assert storage.names("jobs") == ["a", "b"]
