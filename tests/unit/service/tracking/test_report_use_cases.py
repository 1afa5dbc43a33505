"""Reports on each database: versions, owners, pages, and what an export shows."""

from __future__ import annotations

import asyncio
import math
import random
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from dray import views
from dray.report_requests import ReportChangeRequest, ReportRequest
from ray_workers.shared.contracts import Cause
from service.db.repositories.catalog import reports as repository
from service.domain.callers import Caller
from service.domain.errors import BadCursor, InvalidDocument
from service.telemetry.series_filters import MetricsFilter
from service.tracking.reports import use_cases
from service.tracking.reports.use_cases import (
    ReportChanged,
    ReportNotFound,
    ReportOfAnother,
    Reports,
    TooManyReports,
)
from tests.seeds import drawn
from tests.unit.service.domain.test_chart_svg import drawn_of, inverse, scales
from tests.unit.service.helpers import Service, metrics

ANN, BOB, ROOT = Caller("ann", False), Caller("bob", False), Caller("root", True)


@pytest.fixture
def reports(service: Service) -> Reports:
    return Reports(service.database)


async def stored(reports: Reports, text: str = "", title: str = "Rates", **fields: Any) -> str:
    return (await reports.create(ReportRequest(title=title, text=text, **fields), ANN)).id


def change(version: int, **fields: Any) -> ReportChangeRequest:
    return ReportChangeRequest.model_validate({"version": version, **fields})


async def test_a_change_of_an_older_version_is_refused(reports: Reports) -> None:
    report_id = await stored(reports, "one", project="vision")
    two = await reports.change(report_id, change(1, text="two"), ANN)
    assert (two.version, two.text, two.title, two.project) == (2, "two", "Rates", "vision")
    with pytest.raises(ReportChanged, match="its version is now 2, not 1"):
        await reports.change(report_id, change(1, text="lost"), ANN)
    same = await reports.change(report_id, change(2, text="two"), ANN)
    assert same.version == 2, "nothing was changed"
    third = await reports.change(report_id, change(2, project=None, title="New"), ROOT)
    assert (third.version, third.project, third.title) == (3, None, "New")
    assert (third.owner, third.updated_by) == ("ann", "root")
    assert await reports.get(report_id) == third


async def test_of_two_writers_at_once_one_is_refused(reports: Reports) -> None:
    report_id = await stored(reports)
    for version in range(1, 6):
        wanted = [change(version, text=f"{version} by {n}") for n in range(4)]
        found = await asyncio.gather(
            *(reports.change(report_id, each, ANN) for each in wanted), return_exceptions=True
        )
        (won,) = [one for one in found if isinstance(one, views.ReportDocument)]
        assert sum(isinstance(one, ReportChanged) for one in found) == 3
        assert await reports.get(report_id) == won


async def test_only_the_owner_and_admins_change_a_report(reports: Reports) -> None:
    report_id = await stored(reports, "text")
    for call in (
        reports.change(report_id, change(1, text="mine"), BOB),
        reports.delete(report_id, BOB),
    ):
        with pytest.raises(ReportOfAnother, match="belongs to ann"):
            await call
    assert (await reports.get(report_id)).text == "text"
    assert "by ann. bob exported it" in await reports.export(report_id, BOB, with_values=False)
    await reports.delete(report_id, ROOT)
    for missing in (report_id, "report-x", "\0", "é" * 1000):
        for again in (
            reports.get(missing),
            reports.delete(missing, ANN),
            reports.change(missing, change(1, text=""), ANN),
            reports.export(missing, ANN, with_values=False),
        ):
            with pytest.raises(ReportNotFound):
                await again


async def test_a_wrong_text_is_not_stored(reports: Reports) -> None:
    report_id = await stored(reports, "text")
    wrong = "```chart\nmetrics: a\n```"
    for call in (
        reports.create(ReportRequest(title="x", text=wrong), ANN),
        reports.change(report_id, change(1, text=wrong), ANN),
        reports.preview(ReportRequest(title="x", text=wrong)),
    ):
        with pytest.raises(InvalidDocument, match="line 1: select runs"):
            await call
    assert (await reports.get(report_id)).version == 1
    page = await reports.list(None, None, limit=10, cursor=None)
    assert [one.id for one in page.items] == [report_id]


async def test_pages_contain_each_report_once(reports: Reports) -> None:
    mine = [await stored(reports, title=f"r{n}", project="ab"[n % 2]) for n in range(7)]
    other = (await reports.create(ReportRequest(title="other"), BOB)).id

    async def listed(owner: str | None, project: str | None) -> list[str]:
        found, cursor = [], None
        while True:
            page = await reports.list(owner, project, limit=2, cursor=cursor)
            found += [one.id for one in page.items]
            cursor = page.next_cursor
            if cursor is None:
                return found

    assert await listed(None, None) == [other, *reversed(mine)]
    assert await listed("ann", None) == mine[::-1]
    assert await listed("ann", "b") == mine[1::2][::-1]
    assert await listed("\0", None) == []
    for bad in ("x", "W10"):
        with pytest.raises(BadCursor):
            await reports.list(None, None, limit=2, cursor=bad)


async def test_a_user_has_a_limited_number_of_reports(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(use_cases, "MOST", 3)
    await stored(reports)
    calls = [reports.create(ReportRequest(title="x"), ANN) for _ in range(6)]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(one, TooManyReports) for one in found) == 4
    await reports.create(ReportRequest(title="x"), BOB)


async def test_a_report_of_another_release_is_shown_without_charts(
    service: Service, reports: Reports
) -> None:
    report_id = await stored(reports)

    def spoil(session: Any) -> None:
        row = repository.get(session, report_id)
        assert row is not None
        row.text = "before\n```chart\nmetrics: a\nthrough: b\n```"

    service.database.write_sync(spoil)
    found = await reports.get(report_id)
    assert [part.kind for part in found.parts] == ["text"]
    assert found.problem is not None
    assert "there is no field 'through'" in found.problem
    assert "can't be shown" in await reports.export(report_id, ANN, with_values=False)


def pictures(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(one) for one in re.findall(r"<svg .*?</svg>", page, re.DOTALL)]


async def trained(service: Service, *points: tuple[int, float], **fields: Any) -> str:
    job_id = await service.running(**fields)
    frames = [metrics(step, {"val/loss": value}) for step, value in points]
    service.end(job_id, 1, Cause.SUCCEEDED, frames=frames)
    return job_id


@pytest.mark.parametrize("seed", drawn(2))
async def test_the_export_shows_the_points_of_the_api(
    service: Service, reports: Reports, seed: int
) -> None:
    randomly = random.Random(seed)
    ids = []
    for count in (0, 1, 7, 2500):
        steps = sorted(randomly.sample(range(1, 10_000), count))
        values = [math.nan if randomly.random() < 0.01 else randomly.gauss(5, 2) for _ in steps]
        ids.append(await trained(service, *zip(steps, values, strict=True), name=f"of {count}"))
    text = f"```chart\nmetrics: val/loss\nruns: [{', '.join(ids)}]\n```"
    report_id = await stored(reports, text)
    page = await reports.export(report_id, BOB, with_values=True)
    (picture,) = pictures(page)
    across, up = scales(picture)
    size_x, size_y = (max(abs(value) for _, value in scale) for scale in (across, up))
    (part,) = (await reports.get(report_id)).parts
    assert part.query is not None
    drawn_curves = []
    for job_id in ids:
        found = (await service.queries.metrics(job_id, MetricsFilter(max_points=800))).series
        if "val/loss" not in found:
            continue
        series = found["val/loss"]
        drawn_curves.append(
            [
                (step, value)
                for step, value in zip(series.steps, series.values, strict=True)
                if not isinstance(value, str)
            ]
        )
    marks = {one.get("class") for one in picture.iter() if (one.get("class") or "").startswith("c")}
    assert len(marks) == len(drawn_curves) == 3
    by_size = {}
    for mark in marks:
        lines, dots = drawn_of(picture, int(str(mark)[1:]))
        pixels = sorted({*dots, *(pixel for line in lines for pixel in line)})
        by_size[len(pixels)] = pixels
    assert sorted(by_size) == sorted(len(curve) for curve in drawn_curves)
    for curve in drawn_curves:
        for (left, top), (step, value) in zip(by_size[len(curve)], curve, strict=True):
            assert inverse(across, left) == pytest.approx(step / size_x, abs=1e-4)
            assert inverse(up, top) == pytest.approx(value / size_y, abs=1e-3)
    assert "No values of val/loss: of 0." in page
    assert "of the points are NaN or infinite" in page


async def test_what_a_chart_lacks_is_said(service: Service, reports: Reports) -> None:
    gone, bad, kept = [
        await trained(service, (1, -1.0), (2, value), name=name, labels={"experiment": "e"})
        for name, value in (("gone", 1.0), ("</svg><script>", math.inf), ("kept", 2.0))
    ]
    text = (
        f"```chart\nmetrics: [val/loss, val/none]\nruns: [{gone}, {bad}, {kept}]\nscale: log\n```\n"
        f"```table\nruns: [{gone}, {bad}]\ncolumns: name,val/loss,created_at,lr\n```\n"
        '```chart\nmetrics: val/loss\nwhere: experiment = "e"\nlimit: 1\nx: seconds\n```\n'
        '```table\nwhere: experiment = "none"\n```\n'
        '```chart\nmetrics: val/loss\nwhere: experiment = "e"\nx: tokens\n```'
    )
    report_id = await stored(reports, text)
    await service.jobs.delete(gone)
    page = await reports.export(report_id, ANN, with_values=True)
    assert page.count(f"No job has the id {gone}. It may have been deleted.") == 2
    assert "&lt;/svg&gt;&lt;script&gt;, val/loss: 1 of the points are NaN or infinite." in page
    assert "kept, val/loss: 1 of the points are zero or negative" in page
    assert "No values of val/none: &lt;/svg&gt;&lt;script&gt;, kept." in page
    assert "More runs match. The first 1 are shown." in page
    assert "No run matches." in page
    assert "No values of val/loss by tokens: kept, &lt;/svg&gt;&lt;script&gt;." in page
    assert "<td>Infinity</td>" in page
    assert "<script" not in page
    assert len(pictures(page)) == 3


async def test_trials_are_sorted_and_time_is_an_axis(service: Service, reports: Reports) -> None:
    ids = []
    for value in (0.5, 0.1, 0.9):
        ids.append(await trained(service, (1, 3.0), (5, value), name=f"at {value}"))
        service.advance(60)
    where = " or ".join(f'id = "{each}"' for each in ids)
    body = f"where: {where}\nsort: val/loss\nlimit: 2\n"
    text = (
        f"```table\n{body}columns: val/loss\n```\n```chart\nmetrics: val/loss\nx: time\n{body}```"
    )
    report_id = await stored(reports, text)
    page = await reports.export(report_id, ANN, with_values=False)
    cells = re.findall(r"<td>([^<]*)<br>", page)
    assert cells == ["at 0.1", "at 0.5"]
    (picture,) = pictures(page)
    words = [one.text for one in picture.iter()]
    assert "time (UTC)" in words
    preview = await reports.preview(ReportRequest(title="x", text=text))
    assert preview.parts == (await reports.get(report_id)).parts
    assert preview.parts[0].query == {
        "where": where,
        "sort": "val/loss",
        "columns": "val/loss",
        "limit": 2,
    }
