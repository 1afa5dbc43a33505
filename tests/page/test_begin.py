"""The beginning of a job on the page: its requests, and the axes of curves with few points."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from api.page.static_files import load
from tests.marks import IN_BROWSER, SOAK
from tests.page.conftest import Watched
from tests.page.site import Site
from tests.unit.api.serving import LiveServer, wait_until
from tests.unit.service.helpers import metrics

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = IN_BROWSER

NOTES_WAITS = """
Headers.prototype.get = () => null;  // answers do not say the server's time
window.waits = [];
const real = window.setTimeout;
window.setTimeout = (done, delay) => { window.waits.push(delay); return real(done, delay); };
"""
PERIODS = "waits.filter((delay) => delay >= 1000 && delay <= 5000)"
LABELS = """(ranges) => ranges.map(([axis, low, high]) => {
  const [from, to] = ticks.shownRange(axis, low, high);
  return ticks.tickLabels(axis, low === high ? [low] : ticks.ticks(axis, from, to, 340));
})"""
NOON = 1795712400.0
"""2026-11-26, 12:00 in New York."""
DAY_S = 86400


def module(page: Page, name: str) -> None:
    """Make a module of the page available as a variable of this name."""
    place = f"/page/{load().version}/lib/{name}.js"
    page.evaluate(f"import('{place}').then((module) => {{ window.{name} = module; }})")


@SOAK
def test_a_job_is_asked_for_sooner_at_its_begin_and_not_more_often_later(
    site: Site, tab: Watched
) -> None:
    page, now = tab.page, site.hands.now
    page.clock.set_fixed_time(now)
    page.add_init_script(NOTES_WAITS)
    for age_s, waits in ((0, {1000}), (7, {3000, 3500}), (DAY_S, {3000, 5000})):
        site.hands.now = now - timedelta(seconds=age_s)
        job_id = site.submit("begins", 1)
        site.claim(job_id, "cpu-a", 1)
        site.hands.report(job_id, 1, [metrics(1, {"loss": 1.0}, at=site.hands.now)])
        tab.open(f"jobs/{job_id}")
        page.reload()
        page.get_by_role("region", name="loss").wait_for()
        found = partial(page.evaluate, PERIODS)
        wait_until(lambda found=found, waits=waits: waits <= set(found()), f"{waits} at {age_s} s")
        assert set(found()) == waits


def test_marks_of_an_axis_are_told_apart(browser: Browser, server: LiveServer) -> None:
    context = browser.new_context(timezone_id="America/New_York", locale="en-US")
    page = context.new_page()
    page.goto(server.url)
    module(page, "ticks")

    def labels(ranges: Iterable[Sequence[str | float]]) -> list[list[str]]:
        found: list[list[str]] = page.evaluate(LABELS, list(ranges))
        return found

    expected: dict[tuple[str, float, float], str] = {
        ("step", 0, 0): "0",
        ("step", 123_456, 123_456): "123,456",
        ("step", 1, 3): "1|2|3",
        ("step", 1_200_000, 1_200_004): "1,200,000|1,200,001|1,200,002|1,200,003|1,200,004",
        ("step", 0, 3e6): "0|500k|1M|1.5M|2M|2.5M|3M",
        ("time", NOON, NOON): "12:00:00",
        ("time", NOON, NOON + 0.2): "12:00:00.00|12:00:00.05|12:00:00.10|12:00:00.15|12:00:00.20",
        ("time", NOON, NOON + 4): "12:00:00|12:00:01|12:00:02|12:00:03|12:00:04",
        ("time", NOON, NOON + 70): "12:00:00|12:00:15|12:00:30|12:00:45|12:01:00",
        ("time", NOON, NOON + DAY_S): "12:00|18:00|Nov 27|06:00|12:00",
        # The clocks are set back on the first of November.
        ("time", NOON - 26 * DAY_S, NOON - 24 * DAY_S): "Nov 1|12:00|Nov 2|12:00",
        ("seconds", 0, 0): "0 s",
        ("seconds", 0, 0.2): "0 s|0.05 s|0.1 s|0.15 s|0.2 s",
        ("seconds", 0, 7200): "0 s|30 min|1 h|1 h 30 min|2 h",
        ("seconds", 18_000, 18_003): "5 h|5 h 1 s|5 h 2 s|5 h 3 s",
        ("bytes", 0, 5e6): "0 MiB|1 MiB|2 MiB|3 MiB|4 MiB",
    }
    assert ["|".join(found) for found in labels(expected)] == list(expected.values())
    begins = {"step": 1e6, "time": NOON, "seconds": 9e3, "bytes": 7e9}
    ranges = [(axis, at, at + 1.5**n) for axis, at in begins.items() for n in range(-18, 52)]
    for case, found in zip(ranges, labels(ranges), strict=True):
        assert 1 <= len(found) <= 12, (case, found)
        assert all(a != b for a, b in pairwise(found)), (case, found)
    context.close()


@SOAK
def test_one_step_has_a_place_in_time_and_none_in_bytes_that_were_not_counted(tab: Watched) -> None:
    page = tab.open()
    module(page, "series")

    def at_step_7(axis: str, series: dict[str, Any]) -> float | None:
        found: float | None = page.evaluate(f"(known) => series.{axis}(known)?.(7) ?? null", series)
        return found

    one = {"loss": {"steps": [7], "values": [0.5], "times": [time.time()]}}
    assert at_step_7("secondsOf", one) == 0
    assert at_step_7("sentOf", one) is None
    assert at_step_7("secondsOf", {}) is None
