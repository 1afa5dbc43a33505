"""Use cases for reports: write, list, show, delete and export them.

All users can read all reports, as they can read all jobs. Only the owner of a report and admins may
change and delete it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sqlalchemy.orm import Session

from dray import views
from dray.report_requests import ChartBlock, ReportChangeRequest, ReportRequest, TableBlock
from service.db.models import ReportRow
from service.db.repositories.catalog import reports as repository
from service.db.session import Database, touch
from service.db.types import storable
from service.domain.callers import Caller
from service.domain.cursors import decode_cursor, encode_cursor
from service.domain.errors import BadCursor, Conflict, DomainError, InvalidDocument, NotFound
from service.domain.ids import new_report_id
from service.tracking.reports import html, runs
from service.tracking.reports.html import ExportOrigin, Section
from service.tracking.reports.parts import PartOfText, parameters_of, parts_of

MOST = 1000
"""Maximum number of reports of one user."""
SCOPE = "reports"


class ReportNotFound(NotFound, code="report_not_found"): ...


class TooManyReports(Conflict, code="too_many_reports"): ...


class ReportChanged(Conflict, code="report_changed"): ...


class ReportOfAnother(DomainError, code="forbidden"): ...


class Reports:
    """The use cases. Each raises ReportNotFound for a report that does not exist, and
    InvalidDocument, with the line, for a text whose charts or tables are wrong."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def preview(self, wanted: ReportRequest) -> views.ReportPreview:
        """Return the parts of a report without storing it."""
        parts = await asyncio.to_thread(parts_of, wanted.text)
        return views.ReportPreview(parts=[_part(part) for part in parts])

    async def create(self, wanted: ReportRequest, caller: Caller) -> views.ReportDocument:
        """Store a report. Raises TooManyReports."""
        await asyncio.to_thread(parts_of, wanted.text)

        def work(session: Session) -> views.ReportDocument:
            touch(session)
            if repository.number(session, caller.name) >= MOST:
                raise TooManyReports(
                    f"{caller.name} already has {MOST:,} reports",
                    hint="delete a report that is no longer needed: `dray report rm REPORT`",
                )
            now = self._database.time(session)
            row = ReportRow(
                id=new_report_id(now),
                title=wanted.title,
                text=wanted.text,
                owner=caller.name,
                project=wanted.project,
                version=1,
                created_at=now,
                updated_at=now,
                updated_by=caller.name,
            )
            session.add(row)
            session.flush()
            return _report(row)

        return await self._database.write(work)

    async def get(self, report_id: str) -> views.ReportDocument:
        return await self._database.read(lambda session: _report(_found(session, report_id)))

    async def change(
        self, report_id: str, wanted: ReportChangeRequest, caller: Caller
    ) -> views.ReportDocument:
        """Change a report. Raises ReportChanged if it has a newer version than the caller read, and
        ReportOfAnother."""
        if wanted.text is not None:
            await asyncio.to_thread(parts_of, wanted.text)

        def work(session: Session) -> views.ReportDocument:
            touch(session)
            row = _found(session, report_id, lock=True)
            _refuse_another(row, caller, "change")
            if row.version != wanted.version:
                raise ReportChanged(
                    f"{row.updated_by} changed the report: its version is now {row.version}, not "
                    f"{wanted.version}",
                    hint="read the report again, and apply your change to its current text",
                )
            title = row.title if wanted.title is None else wanted.title
            text = row.text if wanted.text is None else wanted.text
            project = wanted.project if "project" in wanted.model_fields_set else row.project
            if (title, text, project) != (row.title, row.text, row.project):
                row.title, row.text, row.project = title, text, project
                row.version += 1
                row.updated_at = self._database.time(session)
                row.updated_by = caller.name
                session.flush()
            return _report(row)

        return await self._database.write(work)

    async def delete(self, report_id: str, caller: Caller) -> None:
        """Delete a report. Raises ReportOfAnother."""

        def work(session: Session) -> None:
            touch(session)
            row = _found(session, report_id, lock=True)
            _refuse_another(row, caller, "delete")
            session.delete(row)

        await self._database.write(work)

    async def list(
        self, owner: str | None, project: str | None, *, limit: int, cursor: str | None
    ) -> views.ReportPage:
        """Return reports, newest first. Raises BadCursor for a cursor from another list."""
        before = None if cursor is None else decode_cursor(SCOPE, cursor)
        if before is not None and not (isinstance(before, str) and storable(before)):
            raise BadCursor("the cursor does not belong to this listing")
        if not all(storable(each) for each in (owner, project) if each is not None):
            return views.ReportPage(items=[], next_cursor=None)

        def work(session: Session) -> views.ReportPage:
            rows = repository.page(session, owner, project, before, limit + 1)
            items = [views.ReportSummary(**_facts(row)) for row in rows[:limit]]
            more = encode_cursor(SCOPE, items[-1].id) if len(rows) > limit else None
            return views.ReportPage(items=items, next_cursor=more)

        return await self._database.read(work)

    async def export(self, report_id: str, caller: Caller, *, with_values: bool) -> str:
        """Return the report as an HTML file, with the values that its runs have now."""

        def read(session: Session) -> tuple[ExportOrigin, str]:
            row = _found(session, report_id)
            origin = ExportOrigin(
                title=row.title,
                report_id=row.id,
                version=row.version,
                owner=row.owner,
                exported_by=caller.name,
                exported_at=self._database.time(session),
            )
            return origin, row.text

        origin, text = await self._database.read(read)
        parts, problem = await asyncio.to_thread(_readable, text)
        # Each block is read in a transaction of its own, so that no transaction is long.
        sections = [await self._section(part) for part in parts]
        if problem is not None:
            sections.insert(0, Section(PartOfText(1), problem=problem))
        return await asyncio.to_thread(html.render, origin, sections, with_values=with_values)

    async def _section(self, part: PartOfText) -> Section:
        def read(session: Session) -> Section:
            match part.block:
                case ChartBlock() as block:
                    return Section(part, chart=runs.chart(session, block))
                case TableBlock() as block:
                    return Section(part, table=runs.table(session, block))
            return Section(part)

        if part.block is None:
            return Section(part)
        try:
            return await self._database.read(read)
        except DomainError as error:
            return Section(part, problem=error.message)


def _found(session: Session, report_id: str, *, lock: bool = False) -> ReportRow:
    row = repository.get(session, report_id, lock=lock) if storable(report_id) else None
    if row is None:
        raise ReportNotFound(
            f"there is no report {report_id[:100]}", hint="`dray report ls` lists all reports"
        )
    return row


def _refuse_another(row: ReportRow, caller: Caller, may: str) -> None:
    if row.owner != caller.name and not caller.is_admin:
        raise ReportOfAnother(
            f"the report belongs to {row.owner}; only its owner and admins may {may} it",
            hint="copy its text to a report of your own",
        )


def _facts(row: ReportRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "title": row.title,
        "owner": row.owner,
        "project": row.project,
        "version": row.version,
        "created_at": row.created_at,
        "updated_at": row.updated_at,
        "updated_by": row.updated_by,
    }


def _readable(text: str) -> tuple[Sequence[PartOfText], str | None]:
    """Return the parts of a stored text. If an earlier release stored a text that this release
    refuses, return the whole text as one part, and the reason."""
    try:
        return parts_of(text), None
    except InvalidDocument as error:
        return (PartOfText(1, text),), error.message


def _report(row: ReportRow) -> views.ReportDocument:
    parts, problem = _readable(row.text)
    return views.ReportDocument(
        **_facts(row), text=row.text, parts=[_part(part) for part in parts], problem=problem
    )


def _part(part: PartOfText) -> views.ReportPart:
    if part.block is None:
        return views.ReportPart(kind="text", line=part.line, text=part.text)
    return views.ReportPart(
        kind=part.kind,
        line=part.line,
        block=part.block.model_dump(mode="json"),
        query=parameters_of(part.block),
    )
