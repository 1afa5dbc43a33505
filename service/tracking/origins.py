"""The files of a version of a registered model, and where its weights come from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy.orm import Session

from dray import views
from service.checkpoints import catalog
from service.db.models import ArtifactRow, CheckpointRow, JobRow
from service.db.repositories import jobs as jobs_repository
from service.domain.tracking.sources import data_of
from service.storage.storage import BadKey, Storage

MAX_PARENTS: Final = 20


def checked_files(
    storage: Storage, rows: Sequence[ArtifactRow] | CheckpointRow
) -> list[views.ModelFile]:
    """Return the files, and whether the storage has them. Blocking."""
    files: list[tuple[str, str, int, str]]
    if isinstance(rows, CheckpointRow):
        listed = catalog.files(storage, rows)
        files = [(f"{rows.url}/{f.path}", f.path, f.size_bytes, f.sha256) for f in listed]
    else:
        files = [(row.url, row.path, row.size_bytes, row.sha256) for row in rows]
    found = []
    for url, path, size_bytes, sha256 in files:
        try:
            missing = storage.size_bytes(storage.key_of(url)) != size_bytes
        except (BadKey, FileNotFoundError):
            missing = True
        found.append(
            views.ModelFile(path=path, size_bytes=size_bytes, sha256=sha256, missing=missing)
        )
    return found


def lineage(session: Session, job: JobRow) -> views.ModelLineage:
    document: dict[str, Any] = job.spec
    sources, data_sha256 = data_of(document)
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return views.ModelLineage(
        job_name=job.name,
        owner=job.owner,
        recipe=document.get("recipe"),
        base=(document.get("model") or {}).get("base"),
        data=sources,
        data_sha256=data_sha256,
        document_sha256=hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
        parents=_parents(session, job),
    )


def _parents(session: Session, job: JobRow | None) -> list[views.ModelParent]:
    found: list[views.ModelParent] = []
    while job is not None and job.init_from_job is not None and len(found) < MAX_PARENTS:
        origin = job.init_from or {}
        asked = job.spec.get("init_from") or {}
        model = asked.get("model") or (job.spec.get("model") or {}).get("registered")
        parent = jobs_repository.get(session, job.init_from_job)
        exists = parent is not None and parent.deleted_at is None
        found.append(
            views.ModelParent(
                job_id=job.init_from_job, step=origin.get("step"), model=model, exists=exists
            )
        )
        job = parent
    return found
