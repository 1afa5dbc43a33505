"""The table of 100,000 jobs in a browser: its first rows, another order, and scrolling."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import numpy as np

from benchmarks.browsing import browser
from benchmarks.figures import ratio_of_medians
from benchmarks.machine import wait_until_quiet
from benchmarks.report import Comparison, Result, Row, Table, seconds
from benchmarks.serving import jobs
from benchmarks.serving.servers import dray
from benchmarks.serving.sorted_lists import write_values

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NUM_JOBS = 100_000
NUM_ROWS = 50
HEIGHT = 2400
"""Height of the window, in which the document has more than `NUM_ROWS` rows."""
FIRST_GOAL_S, SORT_GOAL_S, FRAME_GOAL_S = 0.3, 0.2, 0.033
SCROLL_S, SCROLL_PX = 3.0, 100
"""Duration of scrolling, and the distance of each frame."""
REST_MS = 500
COLUMNS = "state,val/accuracy,best:val/accuracy,lr,cost,created_at"
ORDERS = ("val/accuracy", "best:val/accuracy", "lr", "Cost", "Name")
"""Headings that are clicked one after another."""
FIRST = "first rows"
USUAL, CHOSEN = "usual columns", "chosen columns"
ROWS = ".jobs tbody .name > a"

METHOD = (
    f"dray (`python -m api --no-loops`) on SQLite with {NUM_JOBS:,} finished jobs, each with three "
    "metrics, a cost and a label, and every second job with a learning rate of its own.",
    f"A headless Chromium on the same machine, in a window of 1280 x {HEIGHT}. First rows: from "
    f"the start of the navigation until the first frame in which {NUM_ROWS} rows are in the "
    "document, with a new browser context and no cache, and with the usual columns or with "
    f"`{COLUMNS}`.",
    "Another order: from the click on a heading until the first frame in which the heading is "
    f"marked and {NUM_ROWS} rows are in the document; for {len(ORDERS)} headings, one after "
    "another. The previous rows are removed with the click.",
    f"Scrolling: the time between two frames while the window is scrolled by {SCROLL_PX} pixels in "
    f"each frame, for {SCROLL_S:g} s, in which more jobs are loaded.",
    "The first round is not counted. The goals are for the medians, and for the 95th percentile of "
    "the frames. Ratio: median over the goal. A/A: odd against even samples.",
)

_SORT = """
([title, rows, selector]) => new Promise((resolve) => {
  const headings = [...document.querySelectorAll('.jobs th .sort')];
  const began = performance.now();
  headings.find((one) => one.textContent === title).click();
  const look = () => {
    const marked = document.querySelector('.jobs th[aria-sort]')?.textContent ?? '';
    const isMarked = marked.replace(/^[^ ]* /, '') === title;
    if (isMarked && document.querySelectorAll(selector).length >= rows) {
      resolve(performance.now() - began);
    } else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})
"""
_SCROLL = """
([pixels, milliseconds]) => new Promise((resolve) => {
  const frames = [];
  const began = performance.now();
  let last = began;
  const frame = () => {
    const now = performance.now();
    frames.push(now - last);
    last = now;
    scrollBy(0, pixels);
    if (now - began < milliseconds) requestAnimationFrame(frame);
    else resolve(frames.slice(1));
  };
  requestAnimationFrame(frame);
})
"""


@dataclass
class Samples:
    """Durations in seconds."""

    first: dict[str, list[float]] = field(default_factory=lambda: {USUAL: [], CHOSEN: []})
    orders: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ORDERS})
    frames: list[float] = field(default_factory=list)


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    found = Samples()
    with _server(progress) as port, browser.chromium() as chromium:
        for number in range(num_rounds + 1):
            wait_until_quiet(at_most_s=10)
            one = _round(chromium, f"http://127.0.0.1:{port}/#/jobs")
            progress(f"round {number} of {num_rounds}")
            if number:
                for name, times in one.first.items():
                    found.first[name] += times
                for name, times in one.orders.items():
                    found.orders[name] += times
                found.frames += one.frames
    return conclude(found)


@contextmanager
def _server(progress: Callable[[str], None]) -> Iterator[int]:
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as folder:
        home = Path(folder)
        progress(f"writing {NUM_JOBS:,} jobs")
        jobs.finished(home, NUM_JOBS)
        write_values(home, "")
        with dray(home) as server:
            yield server.port


def _round(chromium: Browser, url: str) -> Samples:
    found = Samples()
    ready = f'document.querySelectorAll("{ROWS}").length >= {NUM_ROWS}'
    chosen = f"{url}?{urlencode({'columns': COLUMNS})}"
    for name, address in ((USUAL, url), (CHOSEN, chosen)):
        visit = browser.visit(chromium, address, ready, HEIGHT)
        found.first[name].append(visit.ready_s)
    context = chromium.new_context(viewport={"width": 1280, "height": HEIGHT})
    try:
        page = context.new_page()
        page.goto(chosen)
        page.locator(ROWS).nth(NUM_ROWS - 1).wait_for()
        for title in ORDERS:
            page.wait_for_timeout(REST_MS)
            found.orders[title].append(_ms(page, _SORT, [title, NUM_ROWS, ROWS])[0])
        page.wait_for_timeout(REST_MS)
        found.frames = _ms(page, _SCROLL, [SCROLL_PX, 1000 * SCROLL_S])
    finally:
        context.close()
    return found


def _ms(page: Page, script: str, argument: Sequence[Any]) -> list[float]:
    """Run a script that returns one or several durations in milliseconds. Returns seconds."""
    result = page.evaluate(script, argument)
    return [one / 1000 for one in (result if isinstance(result, list) else [result])]


def conclude(found: Samples) -> Result:
    rows = [
        *(Row(f"{FIRST}, {name}", times) for name, times in found.first.items()),
        *(Row(f"sorted anew by {name}", times) for name, times in found.orders.items()),
    ]
    goals = {row.label: FIRST_GOAL_S if FIRST in row.label else SORT_GOAL_S for row in rows}
    comparisons = [
        Comparison(
            label=f"{row.label} / goal",
            n=len(row.samples),
            ratio=ratio_of_medians(row.samples, [goals[row.label]]),
            same=ratio_of_medians(row.samples[::2], row.samples[1::2]),
            goal=f"median at most {seconds(goals[row.label])}",
            met=float(np.median(row.samples)) <= goals[row.label],
        )
        for row in rows
    ]
    p95, longest = float(np.percentile(found.frames, 95)), max(found.frames)
    frames = [[str(len(found.frames)), seconds(p95), seconds(FRAME_GOAL_S), seconds(longest)]]
    columns = ["frames", "p95", "goal of p95", "longest"]
    return Result(
        name="table_speed",
        title="The table of jobs in a browser",
        method=METHOD,
        rows=[*rows, Row("a frame while scrolling", found.frames)],
        comparisons=comparisons,
        tables=[Table("Scrolling", columns, frames)],
    )
