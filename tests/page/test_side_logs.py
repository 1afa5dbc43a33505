"""The output of several ranks side by side."""

from __future__ import annotations

import itertools
import random
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from tests.marks import IN_BROWSER
from tests.page.conftest import Watched
from tests.page.site import Site
from tests.page.test_charts import called
from tests.unit.api.serving import wait_until
from tests.unit.service.helpers import log

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = IN_BROWSER

NUM_RANKS = 4


@pytest.fixture(scope="module")
def job_id(site: Site) -> str:
    """A running job of four ranks, each of which writes a line a second; rank 2 writes three."""
    job = site.submit("side-by-side", NUM_RANKS)
    site.claim(job, "cpu-a", NUM_RANKS)
    for rank in range(NUM_RANKS):
        lines = []
        for second in range(40):
            at = site.hands.now + timedelta(seconds=second)
            texts = [f"rank {rank} second {second}"] * (3 if rank == 2 else 1)
            for text in texts:
                lines.append(log(len(lines), text, rank=rank, at=at))
        site.hands.report(job, 1, lines)
    return job


def cells(page: Page) -> list[list[str]]:
    """Return the texts of the rows that are drawn, without their times."""
    return page.evaluate(
        "() => [...document.querySelectorAll('.line.side')].map((row) =>"
        " [...row.querySelectorAll('.text')].map((one) => one.textContent))"
    )  # type: ignore[no-any-return]


def test_lines_of_a_second_begin_in_the_same_row(job_id: str, tab: Watched) -> None:
    page = tab.open(f"jobs/{job_id}?tab=logs&rank=1")
    page.get_by_text("40 lines").wait_for()
    page.get_by_label("follow").uncheck()
    page.get_by_label("Add a rank side by side").select_option("2")
    page.locator(".line.side").first.wait_for()
    assert "side=1%2C2" in page.url
    assert cells(page)[:4] == [
        ["rank 1 second 0", "rank 2 second 0"],
        ["", "rank 2 second 0"],
        ["", "rank 2 second 0"],
        ["rank 1 second 1", "rank 2 second 1"],
    ]
    page.get_by_label("Add a rank side by side").select_option("0")
    wait_until(lambda: len(cells(page)[0]) == 3, "three columns")
    page.reload()
    wait_until(lambda: [len(row) for row in cells(page)[:1]] == [3], "three columns again")
    page.get_by_role("button", name=re.compile("^Remove .*2")).click()
    wait_until(lambda: len(cells(page)[0]) == 2, "two columns")
    page.go_back()
    wait_until(lambda: len(cells(page)[0]) == 3, "three columns")
    page.get_by_role("button", name="All ranks in one column").click()
    wait_until(lambda: not cells(page), "the usual view")
    assert page.locator(".log .line").first.is_visible()


def test_the_search_covers_the_ranks_that_are_shown(job_id: str, tab: Watched) -> None:
    page = tab.open(f"jobs/{job_id}?tab=logs&side=0,3&find=second 3")
    # Seconds 3 and 30 to 39 of two ranks.
    page.get_by_text("22 hits").wait_for()
    search = page.get_by_label("Search the log")
    search.press("Shift+Enter")
    page.get_by_text("22 of 22 hits").wait_for()
    hit = page.locator(".line.side .hit")
    hit.wait_for()
    assert hit.inner_text() in ("rank 0 second 39", "rank 3 second 39")
    box, line = page.locator(".sides .log").bounding_box(), hit.bounding_box()
    assert box is not None
    assert line is not None
    assert box["y"] < line["y"] < box["y"] + box["height"]


def test_a_phone_shows_the_ranks_below_each_other(job_id: str, tab: Watched) -> None:
    tab.page.set_viewport_size({"width": 390, "height": 844})
    page = tab.open(f"jobs/{job_id}?tab=logs&side=0,3")
    logs = page.locator(".sides .log")
    wait_until(lambda: logs.count() == 2, "a box of each rank")
    first, second = (logs.nth(n).bounding_box() for n in range(2))
    assert first is not None
    assert second is not None
    assert second["y"] >= first["y"] + first["height"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_what_an_address_names_and_the_job_lacks_is_left_out(job_id: str, tab: Watched) -> None:
    page = tab.open(f"jobs/{job_id}?tab=logs&side=7,1,x,1,-2")
    page.locator(".log .line").first.wait_for()
    assert not cells(page)


def slow(lines: list[dict[str, Any]], ranks: list[int]) -> list[list[int | None]]:
    """Place the lines of one second after the other. A late line counts for the newest second."""
    newest, groups = -1, dict[int, list[dict[str, Any]]]()
    for line in lines:
        if line["rank"] in ranks:
            newest = max(newest, int(datetime.fromisoformat(line["time"]).timestamp()))
            groups.setdefault(newest, []).append(line)
    rows: list[list[int | None]] = []
    for _, group in sorted(groups.items()):
        columns = [[one["number"] for one in group if one["rank"] == rank] for rank in ranks]
        rows += [list(row) for row in itertools.zip_longest(*columns)]
    return rows


def test_rows_keep_all_lines_in_order(tab: Watched) -> None:
    page = tab.open("none")
    chance = random.Random(46)
    for _ in range(30):
        at = datetime(2026, 1, 1, tzinfo=UTC)
        lines: list[dict[str, Any]] = []
        for number in range(chance.randint(0, 60)):
            at += timedelta(seconds=chance.choice([-0.4, 0, 0.2, 1, 30]))
            rank = chance.randint(0, 3)
            lines.append({"rank": rank, "number": number, "time": at.isoformat()})
        ranks = chance.sample(range(4), chance.randint(1, 3))
        rows = called(page, "views/job/side_logs.js", "m.aligned(v[0], v[1])", lines, ranks)
        for column, rank in enumerate(ranks):
            numbers = [row[column]["number"] for row in rows if row[column]]
            assert numbers == [line["number"] for line in lines if line["rank"] == rank]
        assert [[one and one["number"] for one in row] for row in rows] == slow(lines, ranks)
