"""Draws a chart of curves as SVG for an HTML page, whose style sheet has the colours."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from service.domain.charts.curves import DASHED_FROM
from service.domain.charts.ticks import Axis, clock_text, fitting, number, ticks, time_ticks

WIDTH, HEIGHT = 760, 250
"""Width of the picture, and height of the area of the curves, in pixels."""
DASH = "7 4"
DASHES = ("", DASH, "2 3", "10 3 2 3")
"""The dashes of the metrics of a chart, in their order."""
FEW = 30
"""The points of curves with fewer points are marked."""
_TOP, _RIGHT, _BELOW, _ROW = 34, 18, 44, 17
_CHARACTER = 6.4
"""Typical width of a character in pixels."""
_FAR = 50.0
X_NAMES = {
    "step": "step",
    "epoch": "epoch",
    "samples": "samples",
    "tokens": "tokens",
    "time": "time (UTC)",
    "seconds": "seconds since the first step",
    "bytes": "bytes sent",
}


@dataclass(frozen=True)
class ChartCurve:
    name: str
    colour: int
    xs: Sequence[float]
    ys: Sequence[float]
    dash: str = ""
    raw: Sequence[float] | None = None
    """The values before they were smoothed; None if `ys` are the values themselves."""


@dataclass(frozen=True)
class Chart:
    title: str
    y_name: str
    curves: Sequence[ChartCurve]
    axis: str = "step"
    """One of `X_NAMES`."""
    is_log: bool = False
    y_min: float | None = None
    y_max: float | None = None


def dash_of(colour: int, metric: int, num_metrics: int) -> str:
    """Return the dashes of a curve: by its metric if the chart has several, else by its colour."""
    if num_metrics > 1:
        return DASHES[metric % len(DASHES)]
    return DASH if colour >= DASHED_FROM else ""


def num_omitted(curve: ChartCurve, *, is_log: bool) -> tuple[int, int]:
    """Return the number of values that are NaN or infinite, and the number of values that a log
    axis can't show."""
    values = curve.ys if curve.raw is None else curve.raw
    finite = [value for value in values if math.isfinite(value)]
    return len(values) - len(finite), sum(value <= 0 for value in finite) if is_log else 0


def draw(chart: Chart, name: str) -> str:
    """Return the chart as an element `svg`. name: the beginning of its ids, which are unique in the
    page."""
    shown = [(x, y) for curve in chart.curves for x, y in _finite(curve, chart.is_log)]
    y_axis = fitting(
        (y for _, y in shown), is_log=chart.is_log, low=chart.y_min, high=chart.y_max, margin=0.05
    )
    x_axis = fitting(x for x, _ in shown)
    x_ticks = time_ticks(x_axis, 7) if chart.axis == "time" else ticks(x_axis, 10)
    y_ticks = ticks(y_axis, 8)
    left = 34 + _CHARACTER * max((_columns(label) for _, label in y_ticks), default=1)
    area = _PlotArea(left, _TOP, WIDTH - left - _RIGHT, HEIGHT, x_axis, y_axis)
    rows = -(-len(chart.curves) // _per_row(chart.curves)) if len(chart.curves) > 1 else 0
    height = _TOP + HEIGHT + _BELOW + rows * _ROW
    pieces = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-labelledby="{name}-t {name}-d">',
        f'<title id="{name}-t">{text(chart.title)}</title>',
        f'<desc id="{name}-d">{text(description(chart))}</desc>',
        f'<text class="head" x="10" y="20">{text(cut(chart.title, 100))}</text>',
        f'<clipPath id="{name}-c"><rect x="{_n(area.left - 3)}" y="{_TOP - 3}" '
        f'width="{_n(area.width + 6)}" height="{HEIGHT + 6}"/></clipPath>',
        *_grid(area, x_ticks, y_ticks),
        f'<text class="label" text-anchor="middle" x="{_n(area.left + area.width / 2)}" '
        f'y="{_TOP + HEIGHT + 34}">{X_NAMES[chart.axis]}</text>',
        f'<text class="label" text-anchor="middle" transform="translate(14 {_TOP + HEIGHT // 2}) '
        f'rotate(-90)">{text(cut(chart.y_name, 40))}</text>',
    ]
    if not shown:
        pieces.append(
            f'<text text-anchor="middle" x="{_n(area.left + area.width / 2)}" '
            f'y="{_TOP + HEIGHT // 2}">No values</text>'
        )
    pieces.append(f'<g clip-path="url(#{name}-c)">')
    for curve in chart.curves:
        pieces += _curve(area, curve, chart.is_log)
    pieces.append("</g>")
    pieces += _legend(chart.curves) if rows else ()
    return "".join((*pieces, "</svg>"))


def description(chart: Chart) -> str:
    """Return the chart in words: the number of points, the first, last, lowest and highest value of
    each curve."""
    sentences = [
        f"{chart.y_name} by {X_NAMES[chart.axis]}{', log scale' * chart.is_log}, "
        f"{len(chart.curves)} curve{'s' * (len(chart.curves) != 1)}."
    ]
    for curve in chart.curves:
        points = list(_finite(curve, chart.is_log))
        if not points:
            sentences.append(f"{curve.name}: no values.")
            continue
        (first_x, first), (last_x, last) = points[0], points[-1]
        low, high = min(y for _, y in points), max(y for _, y in points)
        sentences.append(
            f"{curve.name}: {len(points)} point{'s' * (len(points) != 1)}, {number(first)} at "
            f"{place(chart.axis, first_x)} to {number(last)} at {place(chart.axis, last_x)}, "
            f"lowest {number(low)}, highest {number(high)}."
        )
    return " ".join(sentences)


def place(axis: str, x: float) -> str:
    """Return a position on the x axis as text."""
    return clock_text(x) if axis == "time" else number(x)


def text(value: str) -> str:
    """Escape text for HTML and XML. Control characters, which XML forbids, are replaced."""
    plain = "".join(
        "\ufffd" if unicodedata.category(one) in ("Cc", "Cs") and one not in "\t\n" else one
        for one in value
    )
    return escape(plain)


def cut(value: str, most: int) -> str:
    """Shorten text to a width of `most` Latin characters."""
    width = 0
    for at, character in enumerate(value):
        width += _columns(character)
        if width > most:
            return f"{value[: max(0, at - 1)]}…"
    return value


def _columns(value: str) -> int:
    return sum(1 + (unicodedata.east_asian_width(one) in "WF") for one in value)


@dataclass(frozen=True)
class _PlotArea:
    """The area of the curves, in pixels."""

    left: float
    top: float
    width: float
    height: float
    x_axis: Axis
    y_axis: Axis

    def x(self, value: float) -> float:
        return self.left + self.width * _near(self.x_axis.share(value))

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - _near(self.y_axis.share(value)))


def _near(share: float) -> float:
    """Keep points that are far outside of the picture at coordinates that browsers can draw."""
    return max(-_FAR, min(_FAR, share))


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _is_shown(x: float, y: float, is_log: bool) -> bool:
    return math.isfinite(x) and math.isfinite(y) and (y > 0 or not is_log)


def _finite(curve: ChartCurve, is_log: bool) -> Iterator[tuple[float, float]]:
    for x, y in zip(curve.xs, curve.ys, strict=True):
        if _is_shown(x, y, is_log):
            yield x, y


def _grid(
    area: _PlotArea, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[tuple[float, str]]
) -> Iterator[str]:
    bottom = area.top + area.height
    for value, label in x_ticks:
        x = _n(area.x(value))
        yield f'<path class="grid" d="M{x} {_n(area.top)}V{_n(bottom)}"/>'
        yield f'<text text-anchor="middle" x="{x}" y="{_n(bottom + 16)}">{text(label)}</text>'
    for value, label in y_ticks:
        y = area.y(value)
        yield f'<path class="grid" d="M{_n(area.left)} {_n(y)}H{_n(area.left + area.width)}"/>'
        yield (
            f'<text text-anchor="end" x="{_n(area.left - 6)}" y="{_n(y + 4)}">{text(label)}</text>'
        )


def _curve(area: _PlotArea, curve: ChartCurve, is_log: bool) -> Iterator[str]:
    look = f'class="c{curve.colour}"' + (f' stroke-dasharray="{curve.dash}"' if curve.dash else "")
    if curve.raw is not None:
        yield from _lines(area, curve.xs, curve.raw, is_log, f'{look} opacity=".3"', False)
    is_marked = len(curve.xs) < FEW
    yield from _lines(area, curve.xs, curve.ys, is_log, f'{look} stroke-width="1.6"', is_marked)


def _lines(
    area: _PlotArea,
    xs: Sequence[float],
    ys: Sequence[float],
    is_log: bool,
    look: str,
    is_marked: bool,
) -> Iterator[str]:
    """Draw a line that is interrupted where values are missing. Lone points are always marked."""
    lines: list[list[str]] = [[]]
    for x, y in zip(xs, ys, strict=True):
        if _is_shown(x, y, is_log):
            lines[-1].append(f"{_n(area.x(x))} {_n(area.y(y))}")
        elif lines[-1]:
            lines.append([])
    path = "".join(f"M{'L'.join(line)}" for line in lines if len(line) > 1)
    if path:
        yield f'<path {look} d="{path}"/>'
    for line in lines:
        for point in line if is_marked or len(line) == 1 else ():
            x_text, y_text = point.split(" ")
            yield f'<circle {look} cx="{x_text}" cy="{y_text}" r="2.4"/>'


def _per_row(curves: Sequence[ChartCurve]) -> int:
    """Return the number of names in each row of the legend."""
    longest = max(_columns(curve.name) for curve in curves)
    return 4 if longest <= 20 else 2 if longest <= 48 else 1


def _legend(curves: Sequence[ChartCurve]) -> Iterator[str]:
    columns = _per_row(curves)
    width = (WIDTH - 20) / columns
    for at, curve in enumerate(curves):
        x = 10 + at % columns * width
        y = _TOP + HEIGHT + _BELOW + at // columns * _ROW + 6
        dash = f' stroke-dasharray="{curve.dash}"' if curve.dash else ""
        most = int((width - 40) / _CHARACTER)
        yield (
            f'<g><title>{text(curve.name)}</title><path class="c{curve.colour}" stroke-width="2.4"'
            f'{dash} d="M{_n(x)} {y}h22"/><text x="{_n(x + 28)}" y="{y + 4}">'
            f"{text(cut(curve.name, most))}</text></g>"
        )
