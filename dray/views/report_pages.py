"""Views of reports: pages of Markdown with charts and tables of runs."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from dray.views.base import View


class ReportSummary(View):
    """A report without its text."""

    id: str
    title: str
    owner: str
    project: str | None = None
    version: int
    """Number of the current version, starting at 1."""
    created_at: datetime
    updated_at: datetime
    updated_by: str


class ReportPage(View):
    items: list[ReportSummary]
    next_cursor: str | None = None


class ReportPart(View):
    """A piece of a report: Markdown, a chart or a table."""

    kind: Literal["text", "chart", "table"]
    line: int
    """Number of its first line in the report's text, starting at 1."""
    text: str = ""
    """The Markdown of a part of the kind `text`."""
    block: dict[str, Any] | None = None
    """The fields of the chart or table, with defaults for fields that the text does not set."""
    query: dict[str, Any] | None = None
    """The parameters of `GET /v1/jobs` that return the runs of the chart or table."""


class ReportDocument(ReportSummary):
    """A report with its text."""

    text: str
    parts: list[ReportPart]
    """The text, divided into Markdown, charts and tables, in their order."""
    problem: str | None = None
    """Why the charts and tables can't be read; null if they can. Only set for a report that an
    earlier release stored."""


class ReportPreview(View):
    """The parts of a text that was not stored."""

    parts: list[ReportPart]
