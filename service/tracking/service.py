"""Use cases for tracking: compare jobs, and annotate jobs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy.orm import Session

from dray import views
from dray.requests import MAX_TAGS, AnnotationRequest
from service.db.models import JobRow
from service.db.repositories import jobs as jobs_repository
from service.db.repositories.catalog import mlflow_exports
from service.db.repositories.catalog import tracking as repository
from service.db.session import Database, touch
from service.domain.errors import AnnotationsChanged, TooManyTags
from service.domain.events import ANONYMOUS
from service.jobs.service import found
from service.tracking import comparisons


class Tracking:
    """Use cases for tracking, each in one transaction. All callers may read and annotate all
    jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._clock = database.clock

    async def compare(self, job_ids: Sequence[str]) -> views.Comparison:
        """Compare jobs with each other and with a baseline. Raises NotFound or NotComparable."""
        now = self._clock()
        return await self._database.read(lambda s: comparisons.compare(s, job_ids, now))

    async def annotations(self, job_id: str) -> views.Annotations:
        return await self._database.read(lambda s: _annotations(s, found(s, job_id)))

    async def annotate(
        self,
        job_id: str,
        wanted: AnnotationRequest,
        *,
        revision: int | None = None,
        actor: str = ANONYMOUS,
    ) -> views.Annotations:
        """Change tags and notes on behalf of `actor`, whatever the job's state.

        Raises AnnotationsChanged if `revision` is outdated, or TooManyTags if there are too many.
        """
        now = self._clock()

        def work(session: Session) -> views.Annotations:
            row = found(session, job_id, lock=True)
            annotate_row(session, row, wanted, revision=revision, actor=actor, now=now)
            return _annotations(session, row)

        return await self._database.write(work)


def annotate_row(
    session: Session,
    row: JobRow,
    wanted: AnnotationRequest,
    *,
    revision: int | None = None,
    actor: str,
    now: datetime,
) -> bool:
    """Change the tags, notes and colour of a locked job, and return whether anything was changed.
    Raises the errors of `Tracking.annotate`."""
    touch(session, row.id)
    before = _annotations(session, row)
    if revision is not None and before.revision != revision:
        raise AnnotationsChanged(
            f"the tags and notes of {row.id} have changed and are now at revision "
            f"{before.revision}",
            hint="read the current tags and notes again, and apply your change to them",
        )
    tags = sorted((set(before.tags) | set(wanted.add_tags)) - set(wanted.remove_tags))
    if len(tags) > MAX_TAGS:
        message = f"{row.id} would have {len(tags)} tags: at most {MAX_TAGS} are allowed"
        raise TooManyTags(message, pointer="/add_tags")
    notes = before.notes if wanted.notes is None else wanted.notes
    colour = before.colour if wanted.colour is None else wanted.colour
    colour = None if colour == "auto" else colour
    if (tags, notes, colour) == (before.tags, before.notes, before.colour):
        return False
    row.colour = colour
    repository.set_tags(session, row.id, tags)
    repository.annotate(session, row.id, notes, now, actor)
    mlflow_exports.reopen(session, row.id)
    return True


def _annotations(session: Session, row: JobRow) -> views.Annotations:
    kept = repository.annotation(session, row.id)
    return views.Annotations(
        tags=jobs_repository.tags(session, [row.id])[row.id],
        notes=kept.notes if kept else "",
        colour=row.colour,
        revision=kept.revision if kept else 0,
        updated_at=kept and kept.updated_at,
        updated_by=kept and kept.updated_by,
    )
