# Written by `make blocking` from dray/_async/report_pages.py: change that file instead.
"""Reports: pages of Markdown with charts and tables of runs."""

from __future__ import annotations

from collections.abc import Generator

from dray import views
from dray._http.transport import Call, params, present, segment
from dray._sync.calls import Calls


class ReportPageCalls(Calls):
    def create_report(
        self, title: str, text: str = "", *, project: str | None = None
    ) -> views.ReportDocument:
        """Store a report, whose `text` is Markdown with blocks of charts and tables. Raises
        Unprocessable with the line of an error in a block, or TooManyReports."""
        body = {"title": title, "text": text, **present(project=project)}
        return self._read(views.ReportDocument, Call.with_json("POST", "/v1/reports", body))

    def reports(
        self, *, owner: str | None = None, project: str | None = None, page_size: int = 100
    ) -> Generator[views.ReportSummary, None, None]:
        """Yield the reports of all users, newest first, or only of `owner` (`@me` for the caller)
        and for `project`."""
        query = params(owner=owner, project=project)
        return self._items(views.ReportPage, "/v1/reports", query, page_size=page_size)

    def report(self, report_id: str) -> views.ReportDocument:
        """Return a report. Raises ReportNotFound."""
        return self._read(views.ReportDocument, Call("GET", _path(report_id)))

    def change_report(
        self,
        report_id: str,
        *,
        version: int,
        title: str | None = None,
        text: str | None = None,
        project: str | None = None,
    ) -> views.ReportDocument:
        """Replace the title, the text or the project of a report; an empty string removes the
        project.

        version: the version that you read. Raises ReportChanged if the report has a newer version,
        so that no change of another user is lost, and Forbidden for another user's report.
        """
        body = {"version": version, **present(title=title, text=text)}
        if project is not None:
            body["project"] = project or None
        return self._read(views.ReportDocument, Call.with_json("PATCH", _path(report_id), body))

    def delete_report(self, report_id: str) -> None:
        """Delete your report; admins can also delete reports of other users. Raises ReportNotFound
        or Forbidden."""
        self._send(Call("DELETE", _path(report_id)))

    def export_report(self, report_id: str, *, values: bool = False) -> str:
        """Return a report as an HTML file that needs no script and no other file.

        values: add a table with the values of each chart. Raises ReportNotFound.
        """
        call = Call("GET", f"{_path(report_id)}/html", params(values=values or None))
        return (self._send(call)).text


def _path(report_id: str) -> str:
    return f"/v1/reports/{segment(report_id)}"
