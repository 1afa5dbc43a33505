"""Plots of the replayed workloads, as SVG."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple, TypeVar

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from benchmarks.report import Picture
from benchmarks.scheduler.measure import Figures, Pair
from benchmarks.scheduler.replay import GPUS_PER_NODE, NUM_NODES, ROUND_S

NUM_GPUS = NUM_NODES * GPUS_PER_NODE
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "dray",
}
"""The background is white even on a dark page. Text is stored as text. The same data results in the
same file."""
LEVELS = np.linspace(0.0, 1.0, 201)
MEAN_OVER = 10
"""Number of rounds over which plotted means are taken."""


class Look(NamedTuple):
    """Style of one policy. Lines and marks can be distinguished without colours."""

    color: str
    dashes: str | tuple[float, tuple[float, ...]]
    mark: str


LOOKS = {
    "Tiresias": Look("#c2571a", (0.0, (4.0, 1.5)), "D"),
    "dray": Look("#2f5f93", "solid", "o"),
}

T = TypeVar("T")


def draw(published: Mapping[int, Pair], drawn: Mapping[int, Pair]) -> list[Picture]:
    by_name = {f"published {number}": pair for number, pair in published.items()}
    pooled = {name: [pair] for name, pair in by_name.items()}
    pooled[f"all {len(published)} published"] = list(published.values())
    pooled[f"all {len(drawn)} drawn"] = list(drawn.values())
    with mpl.rc_context(STYLE):
        return [
            Picture(
                "scheduler_completion",
                "The share of the jobs that are complete within a time after they were submitted. "
                "A vertical line is the mean",
                _grid(pooled, _completion, "completion time", "share of the jobs"),
            ),
            Picture(
                "scheduler_users",
                "The mean slowdown of each user's jobs; 1 is the time of a job alone",
                _grid(by_name, _slowdown, "user", "mean slowdown"),
            ),
            Picture(
                "scheduler_gpus",
                f"GPUs in use, of {NUM_GPUS}, in the mean of each {MEAN_OVER} rounds",
                _grid(by_name, _held, "hours since the start", "GPUs in use"),
            ),
        ]


def _grid(panels: Mapping[str, T], plot: Callable[[Axes, T], None], x: str, y: str) -> str:
    """Return an SVG with two rows of panels and one legend. x, y: labels of all axes."""
    num_columns = -(-len(panels) // 2)
    figure = Figure(figsize=(3.4 * num_columns, 5.6), layout="constrained")
    grid = figure.subplots(2, num_columns, sharex=True, sharey=True)
    for axes, (name, panel) in zip(grid.flat, panels.items(), strict=True):
        axes.set_title(name)
        plot(axes, panel)
    figure.supxlabel(x, fontsize="medium")
    figure.supylabel(y, fontsize="medium")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return written.getvalue()


def _by_policy(pair: Pair) -> dict[str, Figures]:
    return {"Tiresias": pair.tiresias, "dray": pair.dray}


def _completion(axes: Axes, pairs: Sequence[Pair]) -> None:
    """Plot the empirical distributions of the completion times of all jobs."""
    for name, look in LOOKS.items():
        times = [t for pair in pairs for t in _by_policy(pair)[name].completion_s]
        quantiles = np.quantile(times, LEVELS, method="inverted_cdf")
        axes.plot(quantiles, LEVELS, label=name, color=look.color, linestyle=look.dashes)
        axes.axvline(mean(times), linewidth=0.9, color=look.color, linestyle=look.dashes)
    axes.set_xscale("log")
    axes.set_xticks([60, 600, 3600, 36000], ["1 min", "10 min", "1 h", "10 h"])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks([0.0, 0.25, 0.5, 0.75, 1.0], ["0", "25%", "50%", "75%", "100%"])
    axes.set_ylim(0.0, 1.02)


def _slowdown(axes: Axes, pair: Pair) -> None:
    """Plot a mark for each user and policy, with a line between the marks of a user."""
    of_policies = _by_policy(pair)
    users = list(pair.dray.slowdown)
    numbers = range(1, len(users) + 1)
    both = np.array([[f.slowdown[user] for user in users] for f in of_policies.values()])
    axes.vlines(numbers, both.min(axis=0), both.max(axis=0), color="#b9b9b9", linewidth=1.4)
    for values, name in zip(both, of_policies, strict=True):
        look = LOOKS[name]
        axes.plot(numbers, values, look.mark, label=name, color=look.color)
    axes.axhline(1.0, color="#b9b9b9", linewidth=1.0)
    axes.set_yscale("log")
    axes.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks(numbers)
    axes.grid(visible=False, axis="x")


def _held(axes: Axes, pair: Pair) -> None:
    for name, figures in _by_policy(pair).items():
        look = LOOKS[name]
        starts = range(0, len(figures.held), MEAN_OVER)
        edges = [start * ROUND_S / 3600 for start in (*starts, starts[-1] + MEAN_OVER)]
        values = [mean(figures.held[start : start + MEAN_OVER]) for start in starts]
        axes.stairs(
            values, edges, label=name, color=look.color, linestyle=look.dashes, linewidth=1.3
        )
    axes.set_yticks(range(0, NUM_GPUS + 1, NUM_GPUS // 4))
