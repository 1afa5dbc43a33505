"""Plots of the loss over time, steps and bytes, as SVG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.report import Picture

if TYPE_CHECKING:
    from benchmarks.topologies.measure import Curve

GREY = "#808080"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "savefig.transparent": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "dray",
}
"""The background is transparent, and the greys are readable on light and dark pages. Text is stored
as text."""
LOOKS = (
    ("#4c8fd6", "o"),
    ("#6fa8a0", "s"),
    ("#d08a2e", "^"),
    ("#b8a13a", "v"),
    ("#d0573c", "D"),
    ("#9b7fd1", "P"),
    ("#c46fae", "X"),
    ("#5faa5f", "*"),
)
"""Lines also have different marks."""


def draw(name: str, title: str, curves: Mapping[str, Curve]) -> Picture:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.0, 4.4), layout="constrained")
        panels = figure.subplots(1, 3, sharey=True)
        for axes, (label, of) in zip(panels, _panels(curves).items(), strict=True):
            for (topology, curve), (color, mark) in zip(curves.items(), LOOKS, strict=True):
                axes.plot(of[topology], curve.loss, color=color, marker=mark, label=topology)
            axes.set_xlabel(label)
            if label != "steps":
                axes.set_xscale("log")
                axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(NullFormatter())
        panels[0].set_ylabel("val/loss")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    caption = f"{title}: the validation loss against time, steps, and bytes sent by all ranks"
    return Picture(name, caption, written.getvalue())


def _panels(curves: Mapping[str, Curve]) -> dict[str, dict[str, Sequence[float]]]:
    return {
        "seconds": {name: curve.seconds for name, curve in curves.items()},
        "steps": {name: curve.steps for name, curve in curves.items()},
        "megabytes": {
            name: [sent / 1e6 for sent in curve.sent_bytes] for name, curve in curves.items()
        },
    }
