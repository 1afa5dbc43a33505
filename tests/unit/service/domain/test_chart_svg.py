"""Charts as SVG: the picture is read back and compared with the points, and its text is inert."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

import pytest

from service.domain.charts import svg
from service.domain.charts.svg import Chart, ChartCurve
from service.domain.charts.ticks import clock_text, fitting, number, ticks, time_ticks
from service.tracking.reports.html import COLOURS
from tests.seeds import drawn

SPACE = "{http://www.w3.org/2000/svg}"
NAN, INF = math.nan, math.inf
STYLES = Path(__file__).parents[4] / "api" / "page" / "static" / "app.css"
POINT = re.compile(r"[ML](-?[\d.]+) (-?[\d.]+)")
Point = tuple[float, float]


def read(picture: str) -> ElementTree.Element:
    return ElementTree.fromstring(picture)


def value_of(label: str) -> float:
    return float(label.replace(",", ""))


def scales(root: ElementTree.Element) -> tuple[list[Point], list[Point]]:
    """Return the ticks of each axis as (pixel, value)."""
    across, up = [], []
    for one in root.iter(f"{SPACE}text"):
        if one.get("class") is not None or not one.text or one.text == "No values":
            continue
        if one.get("text-anchor") == "middle":
            across.append((float(one.get("x", "")), value_of(one.text)))
        elif one.get("text-anchor") == "end":
            up.append((float(one.get("y", "")) - 4, value_of(one.text)))
    return across, up


def inverse(scale: Sequence[Point], pixel: float, *, is_log: bool = False) -> float:
    """Return the value at a pixel, by the rule of three between two ticks. All numbers are scaled
    by the largest, so that nothing overflows."""
    (a, low), (b, high) = scale[0], scale[-1]
    if is_log:
        low, high = math.log10(low), math.log10(high)
        return low + (pixel - a) / (b - a) * (high - low)
    size = max(abs(low), abs(high))
    return low / size + (pixel - a) / (b - a) * (high / size - low / size)


def drawn_of(root: ElementTree.Element, colour: int) -> tuple[list[list[Point]], list[Point]]:
    """Return the points of the lines of a curve, and the points that are marked."""
    lines = [
        [(float(x), float(y)) for x, y in POINT.findall(f"M{piece}")]
        for path in root.iter(f"{SPACE}path")
        if path.get("class") == f"c{colour}" and "h22" not in path.get("d", "")
        for piece in path.get("d", "").split("M")[1:]
    ]
    dots = [
        (float(dot.get("cx", "")), float(dot.get("cy", "")))
        for dot in root.iter(f"{SPACE}circle")
        if dot.get("class") == f"c{colour}"
    ]
    return lines, dots


def expected(xs: Sequence[float], ys: Sequence[float], *, is_log: bool) -> list[list[Point]]:
    """Return the runs of points that can be drawn."""

    def fits(point: Point) -> bool:
        return abs(point[1]) < INF and (point[1] > 0 or not is_log)

    pairs = zip(xs, ys, strict=True)
    return [list(group) for can, group in groupby(pairs, key=fits) if can]


def drawn_values(randomly: random.Random, count: int, *, is_log: bool) -> list[float]:
    size = 10.0 ** randomly.choice([-300, -30, -3, 0, 0, 0, 2, 6, 30, 290])
    shift = randomly.choice([0, 0, 1, 1e3]) * size
    values = [shift + randomly.gauss(0, 1) * size for _ in range(count)]
    if is_log:
        values = [10.0 ** randomly.uniform(-8, 8) for _ in range(count)]
    if randomly.random() < 0.3:
        values = [values[0]] * count if values else []
    odd = [NAN, INF, -INF, *([0.0, -1.0] if is_log else [])]
    return [randomly.choice(odd) if randomly.random() < 0.15 else one for one in values]


@pytest.mark.parametrize("seed", drawn(60))
def test_the_points_of_a_picture_are_those_of_the_series(seed: int) -> None:
    randomly = random.Random(seed)
    is_log = randomly.random() < 0.4
    curves = []
    for colour in range(randomly.randint(1, 3)):
        count = randomly.choice([0, 1, 2, 5, 29, 30, 200])
        xs = sorted(randomly.sample(range(10 ** randomly.choice([3, 6, 12])), count))
        ys = drawn_values(randomly, count, is_log=is_log)
        curves.append(ChartCurve(f"run {colour}", colour, [float(x) for x in xs], ys))
    root = read(svg.draw(Chart("t", "y", curves, is_log=is_log), "c"))
    across, up = scales(root)
    assert len(across) >= 2
    assert len(up) >= 2
    size_x, size_y = (max(abs(value) for _, value in scale) for scale in (across, up))

    def is_at(pixel: Point, point: Point) -> bool:
        x_near = inverse(across, pixel[0]) == pytest.approx(point[0] / size_x, abs=2e-4)
        if is_log:
            per_pixel = abs(math.log10(up[-1][1] / up[0][1]) / (up[-1][0] - up[0][0]))
            found, wanted, near = (
                inverse(up, pixel[1], is_log=True),
                math.log10(point[1]),
                per_pixel,
            )
        else:
            found, wanted, near = inverse(up, pixel[1]), point[1] / size_y, 1e-3
        return x_near and abs(found - wanted) <= near

    for curve in curves:
        runs = expected(curve.xs, curve.ys, is_log=is_log)
        lines, dots = drawn_of(root, curve.colour)
        lone = [run for run in runs if len(run) == 1]
        marked = [point for run in (runs if len(curve.xs) < svg.FEW else lone) for point in run]
        runs = [run for run in runs if len(run) > 1]
        assert [len(line) for line in lines] == [len(run) for run in runs]
        assert len(dots) == len(marked)
        pixels = [pixel for line in (*lines, dots) for pixel in line]
        points = [point for run in (*runs, marked) for point in run]
        assert all(map(is_at, pixels, points))


def test_values_that_cannot_be_drawn_interrupt_the_line() -> None:
    ys = [1.0, 2.0, NAN, 3.0, INF, 5.0, 6.0]
    root = read(
        svg.draw(Chart("t", "y", [ChartCurve("a", 3, list(map(float, range(7))), ys)]), "c")
    )
    lines, dots = drawn_of(root, 3)
    assert ([len(line) for line in lines], len(dots)) == ([2, 2], 5)
    curve = ChartCurve("a", 3, [0.0, 1.0, 2.0, 3.0], [-1.0, 0.0, NAN, 2.0])
    assert svg.num_omitted(curve, is_log=True) == (1, 2)
    assert svg.num_omitted(curve, is_log=False) == (1, 0)
    lines, dots = drawn_of(read(svg.draw(Chart("t", "y", [curve], is_log=True), "c")), 3)
    assert (lines, len(dots)) == ([], 1)


@pytest.mark.parametrize("is_log", [False, True])
def test_a_chart_without_values_says_so(is_log: bool) -> None:
    nothing = [ChartCurve("a", 0, [], []), ChartCurve("b", 1, [1.0], [NAN])]
    root = read(svg.draw(Chart("t", "y", nothing, is_log=is_log), "c"))
    assert "No values" in [one.text for one in root.iter(f"{SPACE}text")]
    assert "a: no values." in (root.findtext(f"{SPACE}desc") or "")


def test_the_limits_of_y_hold() -> None:
    curve = ChartCurve("a", 0, [0.0, 1.0, 2.0], [0.0, 1e300, 5.0])
    root = read(svg.draw(Chart("t", "y", [curve], y_min=0.0, y_max=10.0), "c"))
    _, up = scales(root)
    assert {value for _, value in up} <= set(map(float, range(11)))
    (line,), _ = drawn_of(root, 0)
    assert all(abs(top) < 20_000 for _, top in line), "browsers can draw all coordinates"


NAMES = (
    "</svg><script>alert(1)</script>",
    "a" * 300,
    '" onload="x',
    "&lt;&#0;\x00\x01\ud800",
    "学習率 " * 60,
    "]]><!--",
)


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names_are_text(name: str) -> None:
    curves = [ChartCurve(f"{name}{n}", n, [0.0, 1.0], [float(n), 1.0]) for n in range(3)]
    picture = svg.draw(Chart(name, name, curves), "c")
    root = read(picture)
    used = {one.tag.removeprefix(SPACE) for one in root.iter()}
    assert used == {"svg", "title", "desc", "text", "path", "clipPath", "rect", "g", "circle"}
    assert not any(attribute.startswith("on") for one in root.iter() for attribute in one.attrib)
    titles = [one.text for one in root.iter(f"{SPACE}title")]
    plain = re.sub(r"[\x00-\x08\ud800]", "\ufffd", name)
    assert titles == [plain, *(f"{plain}{n}" for n in range(3))]
    for one in root.iter(f"{SPACE}text"):
        assert len(one.text or "") <= 111


@pytest.mark.parametrize("seed", drawn(200))
def test_ticks_are_within_the_axis_in_order_and_differ(seed: int) -> None:
    randomly = random.Random(seed)
    size = 10.0 ** randomly.uniform(-307, 307)
    values = [randomly.uniform(-1, 1) * size for _ in range(2)]
    if seed % 3 == 0:
        values = [size, math.nextafter(size, INF)]
    is_log = seed % 5 == 0
    axis = fitting(map(abs, values) if is_log else values, is_log=is_log)
    found = ticks(axis, 6)
    places = [value for value, _ in found]
    assert 2 <= len(found) <= 21
    assert places == sorted(set(places))
    span = axis.high / 2 - axis.low / 2
    assert all(axis.low - span * 1e-6 <= one <= axis.high + span * 1e-6 for one in places)
    if seed % 3:
        assert len({label for _, label in found}) == len(found)


def test_times_are_in_utc() -> None:
    start = 1_796_000_000.0
    assert clock_text(start) == "2026-11-30 00:53:20"
    hours = time_ticks(fitting([start, start + 7200]), 6)
    assert [label for _, label in hours] == ["01:00", "01:30", "02:00", "02:30"]
    days = time_ticks(fitting([start, start + 40 * 86400]), 6)
    assert all(re.fullmatch(r"2026-1\d-\d\d|2027-0\d-\d\d", label) for _, label in days)
    assert clock_text(1e300) == number(1e300)
    assert len(time_ticks(fitting([0.0, 1e15]), 6)) >= 2


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"), (-0.0, "0"), (1234567.0, "1,234,567"), (0.00012345678, "0.000123457"),
        (1e-7, "1e-7"), (12345678.9, "1.23457e7"), (NAN, "NaN"), (-INF, "-Infinity"),
        (-2.5, "-2.5"), (99999.999, "100,000"), (1e308, "1e308"),
    ],
)  # fmt: skip
def test_numbers_are_short(value: float, shown: str) -> None:
    assert number(value) == shown


def test_the_colours_are_those_of_the_web_page() -> None:
    found = re.findall(r"\.colour-(\d+) \{ color: light-dark\((#\w+), (#\w+)\)", STYLES.read_text())
    assert [(light, dark) for _, light, dark in found] == list(COLOURS)
    assert [int(n) for n, _, _ in found] == list(range(20))
