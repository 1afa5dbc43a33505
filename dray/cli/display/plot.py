"""Charts for a terminal, in which colours or letters distinguish the curves.

The functions have no side effects. A braille character is a grid of 2 x 4 dots, so a chart of 60 x
12 characters has 120 x 48 dots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from dray.cli.display.output import number

Value = float | str
"""A metric value in the API's format, in which NaN and infinities are strings."""
Span = tuple[str, int | None]
"""Text, and the number of the series that determines its colour."""
Line = list[Span]

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of the dot in each row and column of a braille character (Unicode block U+2800)."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Curve:
    """A series to draw: lists of equal length, with ascending steps."""

    key: str
    steps: Sequence[int]
    values: Sequence[Value]


@dataclass(frozen=True)
class Style:
    """The size of the chart and the capabilities of the terminal."""

    width: int = 80
    height: int = 12
    """Lines of the chart, not counting axes and legends."""
    log: bool = False
    colours: bool = False
    unicode: bool = True
    axis: str = "step"
    """Name of the horizontal axis."""


@dataclass(frozen=True)
class _Axes:
    first_step: int
    last_step: int
    low: float
    high: float

    def column(self, step: int, dots: int) -> float:
        span = self.last_step - self.first_step
        return (step - self.first_step) / span * (dots - 1) if span else (dots - 1) / 2

    def row(self, value: float, dots: int) -> float:
        """Return the row of a value, counted in dots from the top."""
        # Halve both values before subtracting, since the difference of two finite numbers can
        # overflow.
        span = self.high / 2 - self.low / 2
        return (self.high / 2 - value / 2) / span * (dots - 1)


def chart(curves: Sequence[Curve], style: Style) -> list[Line]:
    """Return the lines of a chart: a legend, the curves, the steps, and notes on omitted values."""
    lines: list[Line] = [[(_legend(curves, n, style), n)] for n in range(len(curves))]
    pieces = [list(_drawable(curve, log=style.log)) for curve in curves]
    flat = [point for runs in pieces for run in runs for point in run]
    notes: list[Line] = [[(note, None)] for curve in curves for note in _notes(curve, style.log)]
    if not flat:
        return [*lines, [("  nothing to draw", None)], *notes]
    axes = _axes(flat)
    labels = _labels(axes, style)
    gutter = max(map(len, labels.values()))
    columns = max(10, style.width - gutter - 2)
    canvas = _Canvas(columns, style.height)
    for index, runs in enumerate(pieces):
        for run in runs:
            canvas.draw(index, [axes_point(axes, point, canvas) for point in run])
    bar = "┤" if style.unicode else "|"
    for row in range(style.height):
        label = labels.get(row, "")
        lines.append([(f"{label:>{gutter}} {bar}", None), *canvas.line(row, len(curves), style)])
    return [*lines, [(_steps(axes, style.axis, gutter + 2, columns), None)], *notes]


def axes_point(axes: _Axes, point: tuple[int, float], canvas: _Canvas) -> tuple[float, float]:
    step, value = point
    return axes.column(step, canvas.columns * 2), axes.row(value, canvas.rows * 4)


def _legend(curves: Sequence[Curve], index: int, style: Style) -> str:
    curve = curves[index]
    last = curve.values[-1] if curve.values else None
    now = "" if last is None else f"  last {number(last)}"
    mark = "" if len(curves) == 1 or style.colours else f"{_letter(index)} "
    return f"{mark}{curve.key}{now}{'  (log)' if style.log else ''}"


def _letter(number: int) -> str:
    return _LETTERS[number % len(_LETTERS)]


def _drawable(curve: Curve, *, log: bool) -> Iterator[list[tuple[int, float]]]:
    """Yield runs of consecutive drawable points. For a logarithmic axis, the values are base-10
    logarithms."""
    run: list[tuple[int, float]] = []
    for step, value in zip(curve.steps, curve.values, strict=True):
        if isinstance(value, str) or not math.isfinite(value) or (log and value <= 0):
            if run:
                yield run
            run = []
            continue
        run.append((step, math.log10(value) if log else value))
    if run:
        yield run


def _notes(curve: Curve, log: bool) -> Iterator[str]:
    """Yield notes on the values that are omitted from the chart."""
    words = [value for value in curve.values if isinstance(value, str) or not math.isfinite(value)]
    if words:
        yield f"  {curve.key}: {len(words)} of {len(curve.values)} values are NaN or infinite"
    numbers = [value for value in curve.values if not isinstance(value, str)]
    hidden = sum(value <= 0 for value in numbers if math.isfinite(value)) if log else 0
    if hidden:
        yield f"  {curve.key}: {hidden} of {len(curve.values)} values are 0 or negative"


def _axes(points: Sequence[tuple[int, float]]) -> _Axes:
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = min(values), max(values)
    if low == high:  # a constant series is drawn in the middle
        pad = abs(low) / 2 or 1.0
        low, high = low - pad, high + pad
    return _Axes(min(steps), max(steps), low, high)


def _labels(axes: _Axes, style: Style) -> dict[int, str]:
    """Return the labels of the top, middle and bottom rows, keyed by row."""
    last = style.height - 1
    found: dict[int, str] = {}
    for row in sorted({0, last // 2, last}):
        below = row / last if last else 0.5
        value = axes.high * (1 - below) + axes.low * below
        found[row] = number(10.0**value if style.log and value < 308 else value)
    return found


def _steps(axes: _Axes, word: str, indent: int, columns: int) -> str:
    first, last = f"{word} {axes.first_step}", str(axes.last_step)
    return " " * indent + first + last.rjust(max(columns - len(first), len(last) + 1))


class _Canvas:
    """A grid of dots. Each dot stores the curves that contain it."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._dots: dict[tuple[int, int], int] = {}
        self._owners: dict[tuple[int, int], set[int]] = {}

    def draw(self, owner: int, points: Sequence[tuple[float, float]]) -> None:
        """Connect points with straight lines. Points are (x, y) in dots from the upper left."""
        previous = points[0]
        for point in points:
            (x0, y0), (x1, y1) = previous, point
            num = max(1, round(max(abs(x1 - x0), abs(y1 - y0))))
            for n in range(num + 1):
                x, y = x0 + (x1 - x0) * n / num, y0 + (y1 - y0) * n / num
                self._dot(owner, round(x), round(y))
            previous = point

    def _dot(self, owner: int, x: int, y: int) -> None:
        cell = (y // 4, x // 2)
        self._dots[cell] = self._dots.get(cell, 0) | _DOTS[y % 4][x % 2]
        self._owners.setdefault(cell, set()).add(owner)

    def line(self, row: int, num_curves: int, style: Style) -> Line:
        spans: Line = []
        for column in range(self.columns):
            owners = self._owners.get((row, column))
            if not owners:
                spans.append((" ", None))
                continue
            braille = chr(0x2800 + self._dots[row, column])
            spans.append((self._mark(owners, num_curves, braille, style), max(owners)))
        while spans and spans[-1][0] == " ":
            spans.pop()
        return [
            ("".join(text for text, _ in group), owner)
            for owner, group in groupby(spans, key=lambda span: span[1])
        ]

    def _mark(self, owners: set[int], num_curves: int, braille: str, style: Style) -> str:
        if num_curves > 1 and not style.colours:  # without colours, letters distinguish the curves
            return _letter(min(owners)) if len(owners) == 1 else "*"
        return braille if style.unicode else "*"
