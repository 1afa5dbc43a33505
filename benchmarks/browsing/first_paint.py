"""Time to show 10,000 jobs, or a job with 20 long series, compared with MLflow's page."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.browsing import browser, stores
from benchmarks.browsing.browser import Visit
from benchmarks.browsing.stores import KEYS, MLFLOW_WORKERS, NUM_JOBS, NUM_POINTS
from benchmarks.figures import ratio_of_medians
from benchmarks.machine import wait_until_quiet
from benchmarks.report import Comparison, Result, Row, Table
from benchmarks.serving.servers import dray

GOAL = 0.5
NUM_ROWS = 10
"""Number of rows with which the list of jobs counts as shown."""
LIST_HEIGHT, JOB_HEIGHT = 860, 3600
"""Heights of the window. In the higher one all curves of both pages are in view, so that both pages
draw them all."""

METHOD = (
    f"dray (`python -m api --no-loops`) and `mlflow server` with {MLFLOW_WORKERS} workers, its "
    "default, run during all turns, each on SQLite.",
    f"Both have {NUM_JOBS:,} finished jobs (MLflow: runs of the default experiment, each with 12 "
    f"parameters, 5 metrics and a tag) and one with {len(KEYS)} series of {NUM_POINTS:,} points, "
    "with the same values in both. They are inserted by SQL into the tables and indexes that "
    "each service created, dray's points in chunks as the service writes them.",
    "Pages, with their default settings: dray's job list and MLflow's runs of the experiment, "
    f"in a window of 1280 x {LIST_HEIGHT}; dray's job page and MLflow's metrics tab of the run, "
    f"in a window of 1280 x {JOB_HEIGHT}, in which all {len(KEYS)} curves are visible for both.",
    "Each visit uses a new browser context with no cache, in one headless Chromium on the same "
    "machine. Visits alternate, in reverse order every other round. The first round is not "
    "counted.",
    "First paint: the browser's first contentful paint, which can be just a loading message. "
    f"Shown: the first frame in which {NUM_ROWS} rows of the list are in the document, or all "
    f"{len(KEYS)} curves are drawn. Both are measured from the start of the navigation.",
    f"Bytes: all responses that finished within {browser.REST_S:g} s after that, as sent over "
    "the wire (compressed if the server compresses them), including headers. MLflow downsamples "
    "a series to a little over 320 points, and dray's page to 800.",
    "Ratio of medians, with an interval from a bootstrap of both sides. A/A: dray's odd visits "
    "against its even visits.",
)


@dataclass
class Contender:
    """A page of one of the servers, and its visits."""

    page: str
    server: str
    url: str
    ready: str
    height: int
    visits: list[Visit] = field(default_factory=list)


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    with _contenders(progress) as contenders, browser.chromium() as chromium:
        for number in range(num_rounds + 1):
            wait_until_quiet(at_most_s=10)
            for each in contenders[:: 1 if number % 2 == 0 else -1]:
                found = browser.visit(chromium, each.url, each.ready, each.height)
                if number:
                    each.visits.append(found)
                progress(
                    f"round {number}: {each.page} of {each.server} painted after "
                    f"{found.first_s:.2f} s, shown after {found.ready_s:.2f} s, "
                    f"{found.num_bytes / 1e3:,.0f} kB in {found.num_requests} answers"
                )
    return conclude(contenders)


@contextmanager
def _contenders(progress: Callable[[str], None]) -> Iterator[list[Contender]]:
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dray-bench-")))
        progress(f"writing {NUM_JOBS:,} jobs and {len(KEYS)} x {NUM_POINTS:,} points, twice")
        job_id = stores.fill_dray(root / "dray", NUM_JOBS, NUM_POINTS)
        filled = stores.mlflow(root / "mlflow", NUM_JOBS, NUM_POINTS)
        mlflow, run_id = stack.enter_context(filled)
        own = stack.enter_context(dray(root / "dray"))
        yield contenders_at(own.port, job_id, mlflow.port, run_id)


def contenders_at(port: int, job_id: str, mlflow_port: int, run_id: str) -> list[Contender]:
    ours, theirs = f"http://127.0.0.1:{port}/#", f"http://127.0.0.1:{mlflow_port}/#/experiments/0"
    run = f"{theirs}/runs/{run_id}/model-metrics"
    line = ".scatterlayer path.js-line[d]"
    return [
        Contender(
            "list", "dray", f"{ours}/jobs", _count(".jobs tbody .name a", NUM_ROWS), LIST_HEIGHT
        ),
        Contender(
            "list",
            "MLflow",
            f"{theirs}/runs",
            _count(".ag-row a[href*='/runs/']", NUM_ROWS),
            LIST_HEIGHT,
        ),
        Contender(
            "job",
            "dray",
            f"{ours}/jobs/{job_id}",
            _count(".panel .u-wrap canvas", len(KEYS)),
            JOB_HEIGHT,
        ),
        Contender("job", "MLflow", run, _count(line, len(KEYS)), JOB_HEIGHT),
    ]


def _count(selector: str, number: int) -> str:
    return f'document.querySelectorAll("{selector}").length >= {number}'


def conclude(contenders: list[Contender]) -> Result:
    by_page = {(each.page, each.server): each.visits for each in contenders}
    rows, comparisons, fetched = [], [], []
    for each in contenders:
        label = f"{each.page} of {each.server}"
        rows.append(Row(f"{label}: first paint", [one.first_s for one in each.visits]))
        rows.append(Row(f"{label}: shown", [one.ready_s for one in each.visits]))
        last = each.visits[-1]
        fetched.append([label, f"{last.num_bytes:,}", str(last.num_requests)])
    for page in ("list", "job"):
        ours, theirs = by_page[page, "dray"], by_page[page, "MLflow"]
        for what, of in _WHAT.items():
            comparisons.append(_comparison(f"{page}, {what}", [*map(of, ours)], [*map(of, theirs)]))
    return Result(
        name="first_paint",
        title="The page in a browser",
        method=METHOD,
        rows=rows,
        comparisons=comparisons,
        tables=[Table("Fetched (last visit)", ("", "bytes", "answers"), fetched)],
    )


_WHAT: Mapping[str, Callable[[Visit], float]] = {
    "first paint": lambda visit: visit.first_s,
    "shown": lambda visit: visit.ready_s,
    "bytes": lambda visit: float(visit.num_bytes),
}


def _comparison(label: str, ours: list[float], theirs: list[float]) -> Comparison:
    ratio = ratio_of_medians(ours, theirs)
    return Comparison(
        label=f"{label}: dray / MLflow",
        n=len(ours),
        ratio=ratio,
        same=ratio_of_medians(ours[::2], ours[1::2]),
        goal=f"at most {GOAL}",
        met=ratio.value <= GOAL,
    )
