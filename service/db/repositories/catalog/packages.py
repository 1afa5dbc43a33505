"""SQL for the packages of jobs. Jobs with the same packages share one list."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.db.models import JobPackagesRow, PackageListRow
from service.db.repositories.bulk import insert_of, table_of


def put(session: Session, job_id: str, packages: Mapping[str, str]) -> None:
    """Store the packages of a job, by name, instead of an earlier list."""
    text = json.dumps(packages, sort_keys=True, separators=(",", ":"))
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    if session.get(PackageListRow, sha256) is None:
        insert = insert_of(session)(table_of(PackageListRow))
        new = insert.values(sha256=sha256, packages=dict(packages))
        session.execute(new.on_conflict_do_nothing(index_elements=["sha256"]))
    session.merge(JobPackagesRow(job_id=job_id, sha256=sha256))
    session.flush()


def of_job(session: Session, job_id: str) -> Mapping[str, str] | None:
    """Return the packages of a job, by name; None if they are unknown."""
    query = (
        select(PackageListRow.packages)
        .join(JobPackagesRow, JobPackagesRow.sha256 == PackageListRow.sha256)
        .where(JobPackagesRow.job_id == job_id)
    )
    return session.scalar(query)
