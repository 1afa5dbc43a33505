"""The page with much content, and with a server that is killed while the page is open."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.marks import IN_BROWSER, SOAK
from tests.page.conftest import Watched
from tests.page.site import Site
from tests.unit.api.serving import serving, wait_until
from tests.unit.service.helpers import metrics

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [IN_BROWSER, SOAK]

NUM_JOBS = 5_000
NUM_POINTS = 1_000_000
MAX_POINTS = 800
"""Number of points of a series that the page requests at a time."""
MAX_ROWS = 80
"""Number of rows in the document at a time, however many exist."""


def rows(page: Page) -> list[str]:
    return page.locator(".jobs .name > a").all_inner_texts()


def test_thousands_of_jobs_are_scrolled_through(site: Site, tab: Watched) -> None:
    for number in range(NUM_JOBS):
        site.submit(f"many-{number:04d}")
    page = tab.open()
    page.locator(".jobs .name > a").first.wait_for()
    assert rows(page)[0] == f"many-{NUM_JOBS - 1:04d}"

    def last() -> bool:
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        assert len(rows(page)) <= MAX_ROWS
        return rows(page)[-1] == "many-0000"

    wait_until(last, "the first job that was submitted")
    page.get_by_text(f"{NUM_JOBS:,} jobs").wait_for()
    page.evaluate("scrollTo(0, 0)")
    site.submit("the-newest")
    wait_until(lambda: rows(page)[0] == "the-newest", "the newest job")


def test_a_million_points_are_zoomed(site: Site, tab: Watched) -> None:
    job_id = site.submit("long")
    site.claim(job_id)
    spike = 654_321
    for begin in range(1, NUM_POINTS, 50_000):
        site.hands.report(
            job_id,
            1,
            [
                metrics(n, {"loss": 9.0 if n == spike else math.sin(n / 1e5)}, at=site.hands.now)
                for n in range(begin, begin + 50_000)
            ],
        )
    page = tab.open(f"jobs/{job_id}")
    over = page.get_by_role("region", name="loss").locator(".u-over")
    over.wait_for()
    steps: list[int] = []
    for _ in range(4):  # each time a tenth of what was shown, around the spike
        box = over.bounding_box()
        assert box is not None
        low, high = (steps[0], steps[-1]) if steps else (1, NUM_POINTS)
        at = box["x"] + box["width"] * (spike - low) / (high - low)
        page.mouse.move(max(box["x"], at - box["width"] / 20), box["y"] + 20)
        page.mouse.down()
        page.mouse.move(min(box["x"] + box["width"], at + box["width"] / 20), box["y"] + 30)
        with page.expect_response(lambda response: "until_step" in response.url) as asked:
            page.mouse.up()
        series = asked.value.json()["series"]["loss"]
        steps = series["steps"]
        assert len(steps) <= MAX_POINTS
        assert max(series["values"]) == 9.0
        page.wait_for_timeout(100)
    assert steps == list(range(steps[0], steps[-1] + 1)), "every step is there in the end"


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
    return number


def test_a_server_that_was_away_is_caught_up_with(
    browser: Browser, tmp_path: Path, port: int
) -> None:
    with serving(tmp_path, port=port) as server:
        job_id = server.submit(name="before")
        context = browser.new_context()
        tab = Watched(context.new_page(), server, breaks=True)
        page = tab.open()
        page.get_by_text("before").wait_for()
        other = Watched(context.new_page(), server, breaks=True)
        other.open(f"jobs/{job_id}?tab=events")
        other.page.locator("table").get_by_text("submitted to the queue").wait_for()
        page.bring_to_front()
        server.ask_to_stop()
    page.get_by_text("The server has not answered").wait_for()
    assert rows(page) == ["before"]
    with serving(tmp_path, port=port) as server:
        server.submit(name="after")
        page.get_by_text("after", exact=True).wait_for()
        page.get_by_text("The server has not answered").wait_for(state="detached")
        server.train(job_id)
        other.page.bring_to_front()
        other.page.locator("table").get_by_text("starts 1 worker").wait_for()
        context.close()
    assert not tab.wrong
    assert not other.wrong
