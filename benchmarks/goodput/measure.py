"""One long job; every minute one of its ranks is killed."""

from __future__ import annotations

import math
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from benchmarks.figures import ratio_of_sums
from benchmarks.goodput import count
from benchmarks.goodput.count import Entry, Sample
from benchmarks.machine import BenchmarkError, wait_until_quiet
from benchmarks.pages import JobPages, newest
from benchmarks.processes import service
from benchmarks.recovery import work
from benchmarks.report import Comparison, Result, Row, Table
from dray import Client
from dray.views import JobState

SEED = 0
MINUTE_S = 60.0
EARLIEST_S, LATEST_S = 15.0, 45.0
"""Seconds of a minute between which its kill is, so that the ledger changes in the minute after the
kill too."""
SAMPLE_S = 0.1
KEEP_EVERY = 20
"""The results keep every n-th sample."""
ASK_S = 1.0
"""Pause between two requests for the ledger, which changes every ten seconds."""
WARMUP_S = 15.0
WINDOW_S, BLIND_S = 5.0, 10.0
START_WITHIN_S = 120.0
NUM_STEPS = 10**6
GOAL, GOAL_WORDS = 0.97, "at least 97%"

METHOD = (
    "A real `python -m api` with its embedded Ray trains one job of two ranks on CPU (gloo, one "
    "thread each): the digits CNN, batch size 128, AdamW, and checkpoints with `every_steps: "
    "auto`. No other contender runs.",
    "In one minute, nothing is killed. In each of the other minutes, of which there is one for "
    "every two rounds, one rank's process receives SIGKILL by its pid. The rank and the second "
    f"within the minute, from {EARLIEST_S:g} to {LATEST_S:g}, are drawn with a fixed seed.",
    "By its own ledger: useful slot-seconds over all slot-seconds, from `goodput` in the "
    "response for the job, which is updated every ten seconds. Each minute boundary is moved to "
    "the nearest entry.",
    "By counting: the number of committed steps according to the ranks' pages, times the "
    "undisturbed step time, over the elapsed time. The undisturbed step time is the median over "
    f"intervals of {WINDOW_S:g} s in the same minute without a kill in them or in the "
    f"{BLIND_S:g} s before. A repeated step counts only once, and training more slowly after a "
    "recovery reduces the result.",
    "Ratio: over all minutes with a kill, with an interval from a bootstrap of the minutes. A/A: "
    "the same calculation for the minute without a kill, divided into sixths (its distance from "
    "1 is the loss, or the measurement error, without any kill).",
)


@dataclass
class Seen:
    """All that was seen of the run."""

    samples: list[Sample] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    kills: list[tuple[float, int]] = field(default_factory=list)
    """(time, rank)"""
    edges: list[float] = field(default_factory=list)
    """Edges of the minutes, the first of which is without a kill."""
    recoveries_s: list[float] = field(default_factory=list)
    """Recovery times reported by the job's events."""


def schedule(num_minutes: int, *, seed: int = SEED) -> list[tuple[float, int]]:
    """(second, rank) of each kill, in a run whose minute 0 has none."""
    generator = random.Random(seed)
    return [
        (
            minute * MINUTE_S + generator.uniform(EARLIEST_S, LATEST_S),
            generator.randrange(work.NUM_RANKS),
        )
        for minute in range(1, num_minutes + 1)
    ]


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """Train for a minute left alone, and for one with a kill for every two rounds."""
    kills = schedule(math.ceil(num_rounds / 2))
    wait_until_quiet()
    with (
        tempfile.TemporaryDirectory(prefix="dray-bench-") as home,
        service(Path(home), num_slots=work.NUM_RANKS) as client,
    ):
        job_id = client.submit(work.job(NUM_STEPS, "auto")).id
        stops = [state for state in JobState if state.is_terminal]
        client.wait(job_id, START_WITHIN_S, [JobState.RUNNING, *stops])
        run = Run(client, job_id, progress)
        run.go_on(WARMUP_S, kills=[])
        run.go_on(MINUTE_S * (len(kills) + 1), kills=kills)
        seen = run.seen
        job = client.get(job_id)
        if job.state is not JobState.RUNNING or job.recoveries != len(kills):
            raise BenchmarkError(
                f"the job is {job.state} ({job.reason.message}) and was mended "
                f"{job.recoveries} times, not {len(kills)}"
            )
        seen.recoveries_s = [
            event.data["recovery_s"] for event in client.events(job_id) if event.code == "recovered"
        ]
        client.cancel(job_id)
        client.wait(job_id, START_WITHIN_S)
    return conclude(seen)


class Run:
    """A job that trains, and is watched and struck."""

    def __init__(self, client: Client, job_id: str, progress: Callable[[str], None]) -> None:
        self._client = client
        self._job_id = job_id
        self._pages = JobPages(job_id)
        self._progress = progress
        self.seen = Seen()

    def go_on(self, for_s: float, kills: Sequence[tuple[float, int]]) -> None:
        """Watch for a while, and kill what is due; keeps what was seen of this while only."""
        self.seen = Seen()
        began = time.monotonic()
        self.seen.edges = [
            began + minute * MINUTE_S for minute in range(int(for_s // MINUTE_S) + 1)
        ]
        due, ask_at = list(kills), began
        while (now := time.monotonic()) < began + for_s:
            observations = self._pages.observe()
            if observations:
                step = max(observation.status.step for observation in observations)
                self.seen.samples.append(Sample(now, step))
            if due and now >= began + due[0][0]:
                self._kill(due.pop(0)[1])
            if now >= ask_at:
                ask_at = now + ASK_S
                self._ask()
            time.sleep(SAMPLE_S)
        self._ask()

    def _kill(self, rank: int) -> None:
        observation = newest(self._pages.observe(), rank)
        if observation is None or not observation.state:
            raise BenchmarkError(f"rank {rank} has no process that could be killed")
        self.seen.kills.append((time.monotonic(), rank))
        os.kill(observation.status.pid, signal.SIGKILL)
        self._progress(f"killed rank {rank} after step {observation.status.step}")

    def _ask(self) -> None:
        goodput = self._client.get(self._job_id).goodput
        if goodput is None:
            return
        entry = Entry(time.monotonic(), goodput.slot_seconds.model_dump())
        entries = self.seen.entries
        if not entries or entries[-1].slot_seconds != entry.slot_seconds:
            entries.append(entry)


def conclude(seen: Seen) -> Result:
    """The figures that follow from what was seen."""
    kills = [at for at, _ in seen.kills]
    stretches = count.undisturbed(seen.samples, kills, length_s=WINDOW_S, blind_s=BLIND_S)
    alone, minutes = _sixths(seen.edges[0]), seen.edges[1:]
    by_count = [
        pair
        for edges in pairwise(minutes)
        for pair in count.counted(seen.samples, edges, count.step_time(stretches, *edges))
    ]
    alone_step_s = count.step_time(stretches, alone[0], alone[-1])
    by_ledger = count.booked(seen.entries, minutes)
    return Result(
        name="goodput",
        title="Goodput at one kill a minute",
        method=METHOD,
        rows=[
            Row("undisturbed step", [stretch.step_s for stretch in stretches]),
            Row("recovery, by the job's events", seen.recoveries_s),
        ],
        comparisons=[
            _share("by its ledger", by_ledger, count.booked(seen.entries, alone)),
            _share("by counting", by_count, count.counted(seen.samples, alone, alone_step_s)),
        ],
        tables=[_minute_by_minute(seen, by_ledger, by_count), _uses(seen)],
        raw=asdict(replace(seen, samples=seen.samples[::KEEP_EVERY])),
    )


def _sixths(began: float) -> list[float]:
    return [began + part * MINUTE_S / 6 for part in range(7)]


def _share(
    how: str, minutes: Sequence[tuple[float, float]], alone: Sequence[tuple[float, float]]
) -> Comparison:
    ratio = ratio_of_sums(minutes)
    same = ratio_of_sums([part for part in alone if part[1] > 0])
    label = f"useful / all, {how}"
    return Comparison(label, len(minutes), ratio, same, GOAL_WORDS, ratio.value >= GOAL)


def _minute_by_minute(
    seen: Seen,
    by_ledger: Sequence[tuple[float, float]],
    by_count: Sequence[tuple[float, float]],
) -> Table:
    rows = [
        [
            str(number),
            f"rank {rank} at {at - began:.1f} s",
            f"{useful / held:.2%}",
            f"{worth / took:.2%}",
        ]
        for number, ((at, rank), began, (useful, held), (worth, took)) in enumerate(
            zip(seen.kills, seen.edges[1:], by_ledger, by_count, strict=False), start=1
        )
    ]
    return Table("Minute by minute", ["minute", "killed", "by its ledger", "by counting"], rows)


def _uses(seen: Seen) -> Table:
    used = count.classes(seen.entries, seen.edges[1:])
    total = sum(used.values())
    rows = [[name, f"{value:.2f}", f"{value / total:.2%}"] for name, value in used.items()]
    title = "Where the slot-seconds of these minutes went, by its ledger"
    return Table(title, ["class", "slot-seconds", "share"], rows)
