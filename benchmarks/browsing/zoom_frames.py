"""The frames of the page while a reader zooms in charts that show 20 long series of 20 jobs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.browsing import browser, stores
from benchmarks.browsing.stores import KEYS, NUM_POINTS
from benchmarks.machine import BenchmarkError, wait_until_quiet
from benchmarks.report import Result, Row, Table
from benchmarks.serving.servers import dray

if TYPE_CHECKING:
    from playwright.sync_api import Page

NUM_RUNS = 20
WIDTH, HEIGHT = 1280, 3600
"""The window, in which all charts are visible, so that a zoom draws all of them."""
P95_GOAL_S, LONGEST_GOAL_S = 0.033, 0.1
MOVES = 12
"""Number of movements of the pointer during a drag."""
REST_MS = 400
AFTER_MS = 50
"""Frames count until this many milliseconds after the last drawing or answer."""
WITHIN_S = 120.0

METHOD = (
    f"dray (`python -m api --no-loops`) on SQLite with {NUM_RUNS} finished jobs, each with "
    f"{len(KEYS)} series of {NUM_POINTS:,} points, whose values differ between the jobs. The page "
    f"compares the jobs in a window of {WIDTH} x {HEIGHT} of a headless Chromium on the same "
    f"machine, in which all {len(KEYS)} charts are visible.",
    f"A zoom: the pointer goes over a chart, drags over a part of it with {MOVES} movements, and "
    "is released; the page draws all charts, and then again in full detail when the server has "
    "answered for each job. Then a double click shows everything again. The charts and the parts "
    "alternate. The first zoom is not counted.",
    "A frame: the time between two calls of `requestAnimationFrame`, from the first movement of "
    f"the pointer until {AFTER_MS} ms after the page has drawn the last chart.",
)

_RECORD = """() => {
  window.frames_ = [];
  window.recording = true;
  let before = null;
  const next = (now) => {
    if (before !== null) window.frames_.push([now, now - before]);
    before = now;
    if (window.recording) requestAnimationFrame(next);
  };
  requestAnimationFrame(next);
}"""
_STOP = """() => {
  window.recording = false;
  return window.frames_.filter(([at]) => at <= window.busyAt + %s).map(([, took]) => took);
}"""
_COUNT = """
(() => {
  window.busyAt = 0;
  const note = () => { window.busyAt = performance.now(); };
  const draw = CanvasRenderingContext2D.prototype.clearRect;
  CanvasRenderingContext2D.prototype.clearRect = function (...given) {
    note();
    return draw.apply(this, given);
  };
  const get = window.fetch;
  let open = 0;
  window.fetch = async (...given) => {
    open += 1;
    try {
      return await get(...given);
    } finally {
      open -= 1;
      note();
    }
  };
  window.isQuiet = (rest) => open === 0 && performance.now() - window.busyAt > rest;
})();
"""

_SHOWN = f"document.querySelectorAll('.panel .u-over').length >= {len(KEYS)}"


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as folder:
        home = Path(folder) / "dray"
        progress(f"writing {NUM_RUNS} jobs with {len(KEYS)} x {NUM_POINTS:,} points")
        job_ids = stores.fill_runs(home, NUM_RUNS, NUM_POINTS)
        with dray(home) as server, browser.chromium() as chromium:
            context = chromium.new_context(viewport={"width": WIDTH, "height": HEIGHT})
            page = context.new_page()
            page.set_default_timeout(1000 * WITHIN_S)
            page.add_init_script(_COUNT)
            page.goto(f"http://127.0.0.1:{server.port}/#/compare?jobs={','.join(job_ids)}")
            wait_until(page, _SHOWN)
            settle(page)
            zooms = []
            for number in range(num_rounds + 1):
                wait_until_quiet(at_most_s=10)
                frames = zoom(page, number)
                if number:
                    zooms.append(frames)
                progress(
                    f"zoom {number}: {len(frames)} frames, p95 "
                    f"{1000 * np.percentile(frames, 95):.1f} ms, longest "
                    f"{1000 * max(frames):.1f} ms"
                )
    return conclude(zooms)


def zoom(page: Page, number: int) -> list[float]:
    """Zoom in and out once. Returns the seconds of each frame."""
    over = page.locator(".panel .u-over").nth((7 * number) % len(KEYS))
    box = over.bounding_box()
    if box is None:
        raise BenchmarkError("a chart is not shown")
    first = box["x"] + box["width"] * (0.15 + 0.05 * (number % 5))
    last = first + box["width"] * 0.3
    y = box["y"] + box["height"] / 2

    def drag() -> None:
        page.mouse.move(first, y, steps=MOVES)
        page.mouse.down()
        page.mouse.move(last, y, steps=MOVES)
        page.mouse.up()
        wait_until(page, "location.hash.includes('range=')")

    def show_all() -> None:
        page.mouse.dblclick(first, y)
        wait_until(page, "!location.hash.includes('range=')")

    return [*recorded(page, drag), *recorded(page, show_all)]


def recorded(page: Page, act: Callable[[], None]) -> list[float]:
    """Return the seconds of each frame from the action until the page has drawn its result."""
    page.evaluate(_RECORD)
    act()
    settle(page)
    found: Any = page.evaluate(_STOP % AFTER_MS)
    return [one / 1000 for one in found]


def settle(page: Page) -> None:
    """Wait until the page makes no requests and draws no charts."""
    wait_until(page, f"window.isQuiet({REST_MS})")


def wait_until(page: Page, condition: str) -> None:
    """Evaluate the condition repeatedly. Playwright's own function needs `eval`, which the page's
    Content-Security-Policy forbids."""
    deadline = time.monotonic() + WITHIN_S
    while not page.evaluate(condition):
        if time.monotonic() > deadline:
            raise BenchmarkError(f"not true within {WITHIN_S:g} s: {condition}")
        page.wait_for_timeout(50)


def conclude(zooms: Sequence[Sequence[float]]) -> Result:
    frames = [one for each in zooms for one in each]
    p95, longest = float(np.percentile(frames, 95)), max(frames)
    met = {True: "yes", False: "no"}
    return Result(
        name="zoom_frames",
        title="Frames while zooming in 20 charts",
        method=METHOD,
        rows=[
            Row("frame", frames),
            Row("longest frame of a zoom", [max(each) for each in zooms]),
        ],
        comparisons=[],
        tables=[
            Table(
                "Goals",
                ("", "measured", "goal", "met"),
                [
                    ["95% of the frames", _ms(p95), _ms(P95_GOAL_S), met[p95 <= P95_GOAL_S]],
                    [
                        "longest frame",
                        _ms(longest),
                        _ms(LONGEST_GOAL_S),
                        met[longest <= LONGEST_GOAL_S],
                    ],
                ],
            )
        ],
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
