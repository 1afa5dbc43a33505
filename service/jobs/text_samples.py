"""Texts that the models of jobs generated at their evaluations."""

from __future__ import annotations

from sqlalchemy.orm import Session

from dray import views
from service.db.models import TextSamplesRow
from service.db.repositories.telemetry import text_samples as repository
from service.db.session import Database
from service.domain.cursors import decode_cursor, encode_cursor
from service.domain.errors import BadCursor
from service.jobs.service import found


class SampleListing:
    """The use case."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def list(
        self, job_id: str, *, step: int | None = None, limit: int = 100, cursor: str | None = None
    ) -> views.SampledTextsPage:
        """Return the texts of a job, or only the texts of a step, in the order of the steps. Raises
        NotFound, and BadCursor for a cursor from another listing."""
        scope = f"samples:{job_id}"
        after_step = -1
        if cursor is not None:
            after_step = decode_cursor(scope, cursor)
            if type(after_step) is not int or not 0 <= after_step < 2**63:
                raise BadCursor("the cursor does not belong to this listing")

        def work(session: Session) -> views.SampledTextsPage:
            given = found(session, job_id).spec.get("samples") or {}
            rows = repository.of_job(
                session, job_id, step=step, after_step=after_step, limit=limit + 1
            )
            more = len(rows) > limit
            return views.SampledTextsPage(
                prompts=given.get("prompts", []),
                items=[_view(row) for row in rows[:limit]],
                next_cursor=encode_cursor(scope, rows[limit - 1].step) if more else None,
            )

        return await self._database.read(work)


def _view(row: TextSamplesRow) -> views.SampledTexts:
    return views.SampledTexts(
        step=row.step, attempt=row.attempt, time=row.created_at, texts=row.texts
    )
