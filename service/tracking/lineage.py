"""The jobs from which a job was made, and the jobs and models that were made from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sqlalchemy.orm import Session

from dray import views
from dray.input.model_names import ModelReference
from service.db.models import JobRow
from service.db.repositories.catalog import lineage as repository
from service.db.repositories.submission import sweeps as sweeps_repository
from service.db.session import Database
from service.jobs import serializers
from service.jobs.service import found

MAX_JOBS = 200
"""Maximum number of jobs, and of versions of models, in a lineage."""


class Lineages:
    """The use case."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, job_id: str) -> views.Lineage:
        """Return the lineage of a job. Raises NotFound."""
        return await self._database.read(lambda session: _lineage(session, found(session, job_id)))


def _lineage(session: Session, job: JobRow) -> views.Lineage:
    known: dict[str, JobRow | None] = {job.id: job}
    links: dict[tuple[str, str, str], views.LineageLink] = {}
    _add_ancestors(session, job, known, links)
    _add_descendants(session, job, known, links)
    is_complete = len(known) <= MAX_JOBS
    shown = dict(list(known.items())[:MAX_JOBS])
    versions = repository.versions(session, list(shown), MAX_JOBS + 1)
    for model, version, source, step in versions[:MAX_JOBS]:
        name = str(ModelReference(model, version))
        link = views.LineageLink(parent=source, child=name, kind="registered", step=step)
        links[source, name, link.kind] = link
    rows = [row for row in shown.values() if row is not None]
    variants = serializers.variants(session, rows)
    is_sweep = job.array_id is not None and bool(sweeps_repository.get(session, job.array_id))
    return views.Lineage(
        job_id=job.id,
        array_id=job.array_id,
        is_sweep=is_sweep,
        jobs=[_shown(job_id, row, variants) for job_id, row in shown.items()],
        links=[link for link in links.values() if _is_shown(link, shown)],
        is_complete=is_complete and len(versions) <= MAX_JOBS,
    )


Known = dict[str, JobRow | None]
Links = dict[tuple[str, str, str], views.LineageLink]


def _add_ancestors(session: Session, job: JobRow, known: Known, links: Links) -> None:
    level = [job]
    while level and len(known) <= MAX_JOBS:
        above = [link for row in level for link in _links_to(row)]
        links.update(((link.parent, link.child, link.kind), link) for link in above)
        new = list(dict.fromkeys(link.parent for link in above if link.parent not in known))
        rows = repository.jobs(session, new)
        known.update((job_id, rows.get(job_id)) for job_id in new)
        level = [rows[job_id] for job_id in new if job_id in rows]


def _add_descendants(session: Session, job: JobRow, known: Known, links: Links) -> None:
    level: Collection[str] = [job.id]
    while level and len(known) <= MAX_JOBS:
        rows = repository.made_from(session, level, MAX_JOBS + 1)
        for row in rows:
            below = [link for link in _links_to(row) if link.parent in level]
            links.update(((link.parent, link.child, link.kind), link) for link in below)
        new = {row.id: row for row in rows if row.id not in known}
        known.update(new)
        level = list(new)


def _links_to(row: JobRow) -> list[views.LineageLink]:
    """Return the links from the jobs from which this job was made."""
    found = []
    if row.init_from_job is not None:
        asked = row.spec.get("init_from") or {}
        found.append(
            views.LineageLink(
                parent=row.init_from_job,
                child=row.id,
                kind="init_from",
                step=(row.init_from or {}).get("step"),
                model=asked.get("model") or (row.spec.get("model") or {}).get("registered"),
            )
        )
    origin = row.spec.get("origin") or {}
    edited = origin.get("job")
    if edited is not None and edited != row.id:
        found.append(views.LineageLink(parent=edited, child=row.id, kind="edited"))
    return found


def _is_shown(link: views.LineageLink, shown: Mapping[str, JobRow | None]) -> bool:
    return link.parent in shown and (link.kind == "registered" or link.child in shown)


def _shown(job_id: str, row: JobRow | None, variants: Mapping[str, str]) -> views.LineageJob:
    if row is None:
        return views.LineageJob(id=job_id, name=None, state=None)
    return views.LineageJob(
        id=row.id,
        name=row.name,
        variant=variants.get(row.id),
        state=row.state,
        owner=row.owner,
        attempts=row.attempt,
    )
