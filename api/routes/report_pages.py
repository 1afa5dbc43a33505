"""/v1/reports: pages of Markdown with charts and tables of runs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field

from api.context import (
    Caller,
    NoParameters,
    PageQuery,
    Query,
    TheCaller,
    TheContext,
    use_cases,
)
from api.http import body
from api.http.caching import answer, fresh
from api.http.concurrency import TOO_MANY
from api.http.waiting import limited
from api.openapi import json_body
from api.problems import BODY, declare
from dray import views
from dray.report_requests import ReportChangeRequest, ReportRequest
from service.tracking.reports.html import POLICY
from service.tracking.reports.use_cases import Reports

router = APIRouter(prefix="/v1/reports", tags=["reports"])
TheReports = Annotated[Reports, use_cases(lambda runtime: Reports(runtime.database))]
HTML = "text/html"
THE_FILE: dict[int | str, dict[str, Any]] = {
    200: {"content": {HTML: {"schema": {"type": "string"}}}}
}


class ReportsQuery(PageQuery):
    owner: Annotated[str | None, Field(max_length=255)] = None
    """Only reports of this owner; `@me` means the caller."""
    project: Annotated[str | None, Field(max_length=255)] = None
    """Only reports for this project."""


class ExportQuery(Query):
    values: bool = False
    """Add a table with the values of each chart, at most 100 points of each curve."""


@router.get(
    "",
    operation_id="list_reports",
    response_model=views.ReportPage,
    responses=declare("invalid_parameter", "bad_cursor"),
)
async def list_reports(
    request: Request,
    reports: TheReports,
    caller: Caller,
    query: Annotated[ReportsQuery, QueryParameters()],
) -> Response:
    """List the reports of all users, newest first, without their texts."""
    owner = caller if query.owner == "@me" else query.owner
    found = await reports.list(owner, query.project, limit=query.limit, cursor=query.cursor)
    return answer(request, found)


@router.post(
    "",
    operation_id="create_report",
    status_code=201,
    response_model=views.ReportDocument,
    openapi_extra=json_body(ReportRequest),
    dependencies=[NoParameters],
    responses=declare(*BODY, "too_many_reports"),
)
async def create_report(
    request: Request, context: TheContext, reports: TheReports, caller: TheCaller
) -> Response:
    """Store a report. An error in a chart or a table states the line of the text."""
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(ReportRequest, request, limit_bytes)
    report = await reports.create(wanted, caller)
    return fresh(report, 201, {"Location": f"/v1/reports/{report.id}"})


@router.post(
    "/preview",
    operation_id="preview_report",
    response_model=views.ReportPreview,
    openapi_extra=json_body(ReportRequest),
    dependencies=[NoParameters],
    responses=declare(*BODY),
)
async def preview_report(
    request: Request, context: TheContext, reports: TheReports, _: Caller
) -> Response:
    """Check the text of a report and divide it into its parts, without storing it."""
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(ReportRequest, request, limit_bytes)
    return fresh(await reports.preview(wanted), 200)


@router.get(
    "/{report_id}",
    operation_id="get_report",
    response_model=views.ReportDocument,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "report_not_found"),
)
async def get_report(request: Request, reports: TheReports, _: Caller, report_id: str) -> Response:
    """Show a report."""
    return answer(request, await reports.get(report_id))


@router.patch(
    "/{report_id}",
    operation_id="change_report",
    response_model=views.ReportDocument,
    openapi_extra=json_body(ReportChangeRequest),
    dependencies=[NoParameters],
    responses=declare(*BODY, "report_not_found", "report_changed", "forbidden"),
)
async def change_report(
    request: Request,
    context: TheContext,
    reports: TheReports,
    caller: TheCaller,
    report_id: str,
) -> Response:
    """Change a report of the caller. The change is refused if the report has a newer version than
    the caller read. Admins can also change reports of other users."""
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(ReportChangeRequest, request, limit_bytes)
    return fresh(await reports.change(report_id, wanted, caller), 200)


@router.delete(
    "/{report_id}",
    operation_id="delete_report",
    status_code=204,
    response_class=Response,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "report_not_found", "forbidden"),
)
async def delete_report(reports: TheReports, caller: TheCaller, report_id: str) -> Response:
    """Delete a report of the caller. Admins can also delete reports of other users."""
    await reports.delete(report_id, caller)
    return Response(status_code=204)


@router.get(
    "/{report_id}/html",
    operation_id="export_report",
    response_class=Response,
    responses=THE_FILE | declare("invalid_parameter", "report_not_found", TOO_MANY),
)
async def export_report(
    request: Request,
    reports: TheReports,
    caller: TheCaller,
    report_id: str,
    query: Annotated[ExportQuery, QueryParameters()],
) -> Response:
    """Return a report as one HTML file that needs no script and no other file. Charts are drawn as
    SVG with the values that the runs have now.

    The server processes two exports per caller at a time. A few more requests wait, and all further
    requests are refused with 429.
    """
    async with limited(request):
        text = await reports.export(report_id, caller, with_values=query.values)
    headers = {
        "Cache-Control": "no-store",
        "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'; sandbox",
        "Content-Disposition": f'attachment; filename="{report_id}.html"',
    }
    return Response(text, media_type=f"{HTML}; charset=utf-8", headers=headers)
