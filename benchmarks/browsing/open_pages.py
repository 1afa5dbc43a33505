"""The cost of 50 open pages: processor time of the service, and steps of concurrent jobs."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.browsing.page_client import (
    JOB_POLLS,
    LIST_POLLS,
    Asked,
    OpenPage,
    observe,
    route_of,
)
from benchmarks.figures import median_of_ratios
from benchmarks.machine import BenchmarkError
from benchmarks.report import Comparison, Result, Row, Table, seconds
from benchmarks.serving.servers import Running
from benchmarks.serving.training import training
from dray import Client

NUM_JOBS = 8
NUM_JOB_PAGES, NUM_LISTS = 40, 10
TURN_S = 6.0
OPEN_S, CLOSE_S = 4.5, 1.0
"""Before a turn: for opened pages to have read their series once, and for closed ones to be gone.
"""
WARMUP_S = 5.0
OBSERVE_S, LOAD_S = 16.0, 5.0
GOAL = 1.05
MOST_MISSED, SPARE = 1.25, 2
"""A real page may call a route this many times as often as its imitation, plus this many calls: a
poll may fall just inside or just outside the watched time, and an event triggers several calls at
once."""
STEP_TIME = "perf/step_time_s"
READ_POINTS = 10_000
RARELY = {"/v1/jobs/{job_id}/events"}
"""Routes that a page calls only when a stream ends, and does not poll."""
GOLDEN = 0.618034
"""Multiples of it, without their whole part, are spread evenly over 0 to 1."""

METHOD = (
    f"A real `python -m api` with its embedded Ray and {NUM_JOBS} slots trains {NUM_JOBS} jobs "
    "of one worker each (the digits CNN), which together need more cores than the machine has.",
    f"Pages: {NUM_JOB_PAGES} show the curves of a job, evenly spread over the jobs, and "
    f"{NUM_LISTS} show the job list. All are in the foreground, because a page in the background "
    "pauses. They are imitated by raw-socket clients in one process on the same machine, whose "
    "cost is included in the figures. The clients send the same requests as the page's code, "
    "equally often, with a browser's headers and conditional requests, and hold its event "
    "streams open. Real browsers would use the machine's cores, but users' browsers run on "
    "other machines.",
    "Before the first turn, a real Chromium has a job page and the job list open for "
    f"{OBSERVE_S:g} s. The measurement fails if one of them sends a request that its imitation "
    f"does not send, or requests a route more than {MOST_MISSED:g} times as often plus {SPARE} "
    "requests. The table shows both.",
    f"Turns of {TURN_S:g} s without and with pages alternate (A B B A). They begin {CLOSE_S:g} s "
    f"after all pages were closed, or {OPEN_S:g} s after all were opened, with their polls "
    "spread over a period. The cost of opening pages is not counted.",
    "A step: its duration as measured and reported by the rank, for all jobs, assigned to a turn "
    "by the time of the report. Ratio: for neighbouring turns, the median step with pages over "
    "the median step without; shown is the median of these ratios, with an interval from a "
    "bootstrap of the pairs. A/A: one turn without pages over the next.",
    "CPU time is that of the service's process, excluding Ray and training.",
)


@dataclass
class Turn:
    has_pages: bool
    began: float
    ended: float
    cpu_s: float
    """Processor time of the service."""
    steps_s: list[float] = field(default_factory=list)

    @property
    def took_s(self) -> float:
        return self.ended - self.began

    @property
    def share(self) -> float:
        """Share of one processor that the service used."""
        return self.cpu_s / self.took_s

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps_s)


@dataclass(frozen=True)
class Kind:
    """Pages of one kind, imitated and in a real browser."""

    name: str
    polls: Mapping[str, float]
    """Seconds between two requests of an imitation, by the route."""
    imitated_s: float
    """For which imitations were open, summed up over all of them."""
    asked: Asked
    real_s: float
    real: Mapping[str, int]
    """How often the real one asked for each route."""

    @property
    def planned_rate(self) -> float:
        """Requests per second of one imitation to which the answers come at once."""
        return sum(1 / every_s for every_s in self.polls.values())

    @property
    def rate(self) -> float:
        """Requests per second of one imitation."""
        return self.asked.routes.total() / self.imitated_s

    @property
    def real_rate(self) -> float:
        return sum(self.real.values()) / self.real_s


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    asked, turns = (Asked(), Asked()), list[Turn]()
    with training(NUM_JOBS) as (server, client, job_ids):
        progress(f"{NUM_JOBS} jobs train; a browser looks at one of them and at the list")
        time.sleep(WARMUP_S)
        real = observe(server.port, [f"jobs/{job_ids[0]}", "jobs"], LOAD_S, OBSERVE_S)
        for number in range(num_rounds):
            for has_pages in (False, True)[:: 1 if number % 2 == 0 else -1]:
                taking = turn(server, job_ids, asked if has_pages else None)
                turns.append(asyncio.run(taking))
            shares = ", ".join(f"{each.share:.0%}" for each in turns[-2:])
            progress(f"round {number + 1}: the service took {shares} of a processor")
        add_steps(client, job_ids, turns)
    open_s = sum(each.took_s for each in turns if each.has_pages)
    of_job = {f"/v1/jobs/{{job_id}}{part}": every_s for part, every_s in JOB_POLLS.items()}
    of_list = {route_of(target): every_s for target, every_s in LIST_POLLS.items()}
    kinds = [
        Kind("a job's page", of_job, NUM_JOB_PAGES * open_s, asked[0], OBSERVE_S, real[0]),
        Kind("the list", of_list, NUM_LISTS * open_s, asked[1], OBSERVE_S, real[1]),
    ]
    check_imitation(kinds)
    return conclude(turns, kinds)


async def turn(server: Running, job_ids: Sequence[str], asked: tuple[Asked, Asked] | None) -> Turn:
    """One turn; with pages open if there is something that counts what they ask for."""
    pages = [] if asked is None else _open(server.port, job_ids, *asked)
    try:
        await _rest(pages, OPEN_S if pages else CLOSE_S)
        used, began = _cpu_s(server), time.time()
        for each in asked or ():
            each.is_counted = True
        await _rest(pages, TURN_S)
        for each in asked or ():
            each.is_counted = False
        return Turn(asked is not None, began, time.time(), _cpu_s(server) - used)
    finally:
        for page in pages:
            page.cancel()
        await asyncio.gather(*pages, return_exceptions=True)


def _open(
    port: int, job_ids: Sequence[str], of_jobs: Asked, of_list: Asked
) -> list[asyncio.Task[None]]:
    """Pages, whose polls are spread over their periods."""
    jobs = [
        OpenPage(port, of_jobs, GOLDEN * number % 1).show_job(job_ids[number % len(job_ids)])
        for number in range(NUM_JOB_PAGES)
    ]
    lists = [
        OpenPage(port, of_list, GOLDEN * number % 1).show_list() for number in range(NUM_LISTS)
    ]
    return [asyncio.create_task(page) for page in [*jobs, *lists]]


async def _rest(pages: Sequence[asyncio.Task[None]], seconds_: float) -> None:
    """Wait; a page that fails meanwhile ends the measurement."""
    if not pages:
        await asyncio.sleep(seconds_)
        return
    done, _ = await asyncio.wait(pages, timeout=seconds_, return_when=asyncio.FIRST_COMPLETED)
    for page in done:
        page.result()


def _cpu_s(server: Running) -> float:
    times = server.processes[0].cpu_times()
    return float(times.user + times.system)


def add_steps(client: Client, job_ids: Sequence[str], turns: Sequence[Turn]) -> None:
    """Give each turn the times of the steps that were reported in it."""
    for job_id in job_ids:
        for at, step_s in _steps(client, job_id):
            for each in turns:
                if each.began <= at < each.ended:
                    each.steps_s.append(step_s)
    if not all(each.steps_s for each in turns):
        raise BenchmarkError("there is a turn in which no step was reported")


def _steps(client: Client, job_id: str) -> Iterator[tuple[float, float]]:
    """When each step of a job was reported, and its time."""
    after = -1
    while True:
        page = client.metrics(
            job_id,
            keys=[STEP_TIME],
            after_step=after,
            max_points=READ_POINTS,
            in_order=True,
            times=True,
        )
        found = page.series.get(STEP_TIME)
        if found is None or found.steps[-1] <= after:
            return
        assert found.times is not None, "the service noted no times"
        # A live job's newest step is answered again.
        for step, value, at in zip(found.steps, found.values, found.times, strict=True):
            if step > after:
                yield at, float(value)
        after = found.steps[-1]


def check_imitation(kinds: Sequence[Kind]) -> None:
    """BenchmarkError if a real page asks for more than its imitation."""
    for kind in kinds:
        unknown = kind.real.keys() - kind.asked.routes.keys() - RARELY
        if unknown:
            raise BenchmarkError(f"{kind.name} also asks for {', '.join(sorted(unknown))}")
        for route, every_s in kind.polls.items():
            planned = kind.real_s / every_s
            if kind.real.get(route, 0) > MOST_MISSED * planned + SPARE:
                raise BenchmarkError(
                    f"{kind.name} asked for {route} {kind.real[route]} times, its imitation "
                    f"does so {planned:.1f} times in {kind.real_s:g} s"
                )


def conclude(turns: Sequence[Turn], kinds: Sequence[Kind]) -> Result:
    quiet = [each for each in turns if not each.has_pages]
    watched = [each for each in turns if each.has_pages]
    slowdown = median_of_ratios(
        [(ours.step_s, theirs.step_s) for ours, theirs in zip(watched, quiet, strict=True)]
    )
    same = [
        (one.step_s, two.step_s) if number % 2 else (two.step_s, one.step_s)
        for number, (one, two) in enumerate(pairwise(quiet))
    ]
    of_service = [statistics.mean(each.share for each in part) for part in (quiet, watched)]
    num_pages = NUM_JOB_PAGES + NUM_LISTS
    latencies = [one for kind in kinds for one in kind.asked.latencies_s]
    num_not_modified = sum(kind.asked.num_not_modified for kind in kinds)
    num_refused = sum(kind.asked.num_refused for kind in kinds)
    open_s = sum(each.took_s for each in watched)
    return Result(
        name="open_pages",
        title="Open pages while jobs train",
        method=METHOD,
        rows=[
            Row("median step of a turn, without pages", [each.step_s for each in quiet]),
            Row(f"median step of a turn, with {num_pages} pages", [t.step_s for t in watched]),
            Row("an answer to a page", latencies),
        ],
        comparisons=[
            Comparison(
                label="a step, with pages / without",
                n=len(quiet),
                ratio=slowdown,
                same=median_of_ratios(same or [(1.0, 1.0)]),
                goal=f"at most {GOAL}",
                met=slowdown.value <= GOAL,
            )
        ],
        tables=[
            Table(
                "The service",
                ("", "value"),
                [
                    ["share of one processor, without pages", f"{of_service[0]:.1%}"],
                    ["share of one processor, with pages", f"{of_service[1]:.1%}"],
                    [
                        "processor time of a page, per second",
                        seconds((of_service[1] - of_service[0]) / num_pages),
                    ],
                    ["requests per second", f"{len(latencies) / open_s:.1f}"],
                    ["answers without change (304)", f"{num_not_modified / len(latencies):.0%}"],
                    ["answers that said to ask later (429)", str(num_refused)],
                    ["bytes per second", f"{sum(k.asked.num_bytes for k in kinds) / open_s:,.0f}"],
                    ["steps per second, without pages", _speed(quiet)],
                    ["steps per second, with pages", _speed(watched)],
                ],
            ),
            Table(
                "Requests per second of one page",
                ("", "imitation", "if answered at once", "Chromium"),
                [
                    [
                        kind.name,
                        *(f"{r:.2f}" for r in (kind.rate, kind.planned_rate, kind.real_rate)),
                    ]
                    for kind in kinds
                ],
            ),
        ],
        raw={"shares": [[each.has_pages, each.share] for each in turns]},
    )


def _speed(turns: Sequence[Turn]) -> str:
    steps = sum(len(each.steps_s) for each in turns)
    return f"{steps / sum(each.took_s for each in turns):.1f}"
