"""The average that a better worst 1% of the replayed jobs costs: rules that were weighed."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from statistics import mean
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.machine import BenchmarkError
from benchmarks.report import Picture, Result, Table
from benchmarks.scheduler import workloads
from benchmarks.scheduler.measure import DATA, NUM_DRAWN, Bench, Figures, data_folder, worst_s
from benchmarks.scheduler.pictures import STYLE
from benchmarks.scheduler.tiresias import Tiresias
from benchmarks.scheduler.weighed import Rule, WeighedPolicy

TRIED_ON = range(100, 130)
"""Seeds of the workloads on which rules were chosen."""
RULES = (
    Rule("as decided"),
    *(Rule(f"equal from {work}", float(work)) for work in (2000, 1500, 1250, 1000, 500)),
    *(
        Rule(f"equal from {work}, no idle slots", float(work), keeps_gangs=True, fills=True)
        for work in (3500, 2500, 2000, 1500, 1000)
    ),
)
METHOD = (
    "The replay of `scheduler`, with the policy's own rule and with other rules, on 30 workloads "
    "drawn with separate seeds (100 to 129), and then on the workloads of `scheduler`. All "
    "figures are relative to Tiresias. Worst 1%: the mean completion time of the slowest 1% of "
    "all jobs together. 'of each workload': the mean of the workloads' ratios, each for its two "
    "slowest jobs out of 160.",
    "'equal from W': jobs with at least W work left, in the unit of the order, run in the order "
    "of their submission and are displaced for each other. 'no idle slots': in addition, a gang "
    "is not displaced if some of its slots would become idle, and a gang of which more than half "
    "would fit on idle slots displaces smaller jobs from the rest.",
    "The rules run in a copy of the policy's round (`benchmarks/scheduler/weighed.py`). With the "
    "policy's own rule, it results in the same completion time for each job. Nothing is random.",
    "Created with `POLLUX_DATA=FOLDER python -m benchmarks scheduler_frontier`, which takes four "
    "minutes.",
)


class Point(NamedTuple):
    """One rule on several workloads, over Tiresias."""

    average: float
    worst: float
    worst_of_each: float
    user: float

    @classmethod
    def of(cls, ours: Sequence[Figures], theirs: Sequence[Figures]) -> Point:
        pairs = list(zip(ours, theirs, strict=True))
        return cls(
            mean(one.average_s / other.average_s for one, other in pairs),
            mean(worst_s(ours)) / mean(worst_s(theirs)),
            mean(mean(worst_s([one])) / mean(worst_s([other])) for one, other in pairs),
            max(one.worst_user / other.worst_user for one, other in pairs),
        )


def measure(_num_rounds: int, progress: Callable[[str], None]) -> Result:
    folder = data_folder()
    if folder is None:
        raise BenchmarkError(f"{DATA} names no folder with the traces")
    bench, of_published = Bench(folder), workloads.published(folder)
    sets = {
        "30 drawn to choose by": {n: workloads.drawn(of_published, n) for n in TRIED_ON},
        "4 published": of_published,
        "10 drawn": {n: workloads.drawn(of_published, n) for n in range(NUM_DRAWN)},
    }
    points: dict[str, dict[str, Point]] = {}
    for name, rows_of in sets.items():
        theirs = [bench.play(rows, Tiresias(), n) for n, rows in rows_of.items()]
        points[name] = {}
        for rule in RULES:
            ours = [bench.play(rows, WeighedPolicy(rule), n) for n, rows in rows_of.items()]
            points[name][rule.name] = point = Point.of(ours, theirs)
            progress(", ".join([name, rule.name, *_spoken(point)]))
    columns = ["rule", "average", "worst 1%", "of each workload", "worst user"]
    return Result(
        name="scheduler_frontier",
        title="The average against the worst 1% of replayed jobs",
        method=METHOD,
        rows=[],
        comparisons=[],
        tables=[
            Table(name, columns, [[rule, *_spoken(point)] for rule, point in of_rules.items()])
            for name, of_rules in points.items()
        ],
        pictures=[_picture(points)],
    )


def _spoken(point: Point) -> list[str]:
    return [f"{figure:.3f}" for figure in point]


def _picture(points: dict[str, dict[str, Point]]) -> Picture:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.4 * len(points), 3.4), layout="constrained")
        grid = figure.subplots(1, len(points), sharex=True, sharey=True)
        for axes, (name, of_rules) in zip(grid, points.items(), strict=True):
            axes.set_title(name)
            axes.axhline(1.0, color="#b9b9b9", linewidth=1.0)
            axes.axvline(0.87, color="#b9b9b9", linewidth=1.0)
            for label, color, mark, chosen in (
                ("as decided", "#2f5f93", "o", [n for n in of_rules if n == "as decided"]),
                ("long jobs equal", "#c2571a", "D", [n for n in of_rules if n[-1].isdigit()]),
                ("and no idle slots", "#4d7d3a", "s", [n for n in of_rules if n[-1] == "s"]),
            ):
                found = [of_rules[n] for n in chosen]
                x, y = [p.average for p in found], [p.worst for p in found]
                axes.plot(x, y, mark, linestyle="dashed", color=color, label=label, linewidth=0.9)
        figure.supxlabel("average completion time over Tiresias", fontsize="medium")
        figure.supylabel("worst 1% over Tiresias", fontsize="medium")
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return Picture(
        "scheduler_frontier",
        "The average and the worst 1% under rules that were weighed. The lines are the goals: at "
        "most 0.87 and 1.00",
        written.getvalue(),
    )
