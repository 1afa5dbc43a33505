"""Text charts."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from dray.cli.display.plot import Curve, Style, chart


def text_of(*curves: Curve, **style: object) -> list[str]:
    lines = chart(curves, Style(**{"width": 40, "height": 8, **style}))  # type: ignore[arg-type]
    return ["".join(text for text, _ in line) for line in lines]


def rising(key: str = "val/accuracy") -> Curve:
    return Curve(key, list(range(50)), [step / 49 for step in range(50)])


def columns_with_dots(line: str) -> list[int]:
    return [n for n, character in enumerate(line) if 0x2800 < ord(character) <= 0x28FF]


def test_a_rising_line_rises_from_left_to_right() -> None:
    name, *rows, steps = text_of(rising())
    assert name == "val/accuracy  last 1"
    assert len(rows) == 8
    starts = [columns_with_dots(row)[0] for row in rows]
    assert starts == sorted(starts, reverse=True)
    assert len(set(starts)) == 8
    assert rows[0].lstrip().startswith("1 ┤")
    assert rows[-1].lstrip().startswith("0 ┤")
    assert steps.split() == ["step", "0", "49"]


def test_no_line_is_wider_than_the_terminal() -> None:
    for width in (20, 40, 80, 200):
        assert max(map(len, text_of(rising(), width=width))) <= width


def test_a_spike_is_seen_whatever_stands_beside_it() -> None:
    values = [0.0] * 500
    values[250] = 9.0
    rows = text_of(Curve("k", list(range(500)), values))[1:-1]
    assert all(columns_with_dots(row) for row in rows)


def test_a_level_line_and_a_single_point_are_drawn() -> None:
    for curve in (Curve("k", [1, 2], [3.0, 3.0]), Curve("k", [7], [0.0])):
        assert sum(bool(columns_with_dots(row)) for row in text_of(curve)) == 1


def test_what_is_not_finite_is_a_gap_and_a_note() -> None:
    curve = Curve("k", list(range(6)), [0.0, 1.0, "NaN", math.inf, 1.0, 0.0])
    *_, note = text_of(curve)
    assert note == "  k: 2 of 6 values are NaN or infinite"
    top = text_of(curve)[1]
    assert "⠀" not in top
    assert max(right - left for left, right in pairwise(columns_with_dots(top))) > 5


def test_nothing_finite_is_said() -> None:
    lines = text_of(Curve("k", [1], ["NaN"]))
    assert lines == ["k  last NaN", "  nothing to draw", "  k: 1 of 1 values are NaN or infinite"]


def test_powers_of_ten_are_a_straight_line_on_a_logarithmic_axis() -> None:
    curve = Curve("lr", list(range(30)), [10.0**-n for n in range(30)])
    name, *rows, _ = text_of(curve, log=True)
    assert name.endswith("(log)")
    starts = [columns_with_dots(row)[0] for row in rows]
    gaps = [right - left for left, right in pairwise(starts)]
    assert max(gaps) - min(gaps) <= 1
    assert rows[-1].lstrip().startswith("1e-29 ┤")


def test_a_logarithmic_axis_leaves_out_what_is_not_above_zero_and_says_so() -> None:
    *_, note = text_of(Curve("k", [1, 2, 3], [0.0, -1.0, 5.0]), log=True)
    assert note == "  k: 2 of 3 values are 0 or negative"


def test_curves_together_are_told_apart_by_letters_or_by_colours() -> None:
    falling = Curve("train/loss", list(range(50)), [1 - step / 49 for step in range(50)])
    plain = text_of(falling, rising())
    assert plain[:2] == ["a train/loss  last 0", "b val/accuracy  last 1"]
    assert plain[2].split()[-2:] == ["┤aaaa", "bbbb"]
    level = Curve("lr", [0, 49], [0.5, 0.5])
    assert "*" in "".join(text_of(rising(), level))  # where the curves cross
    lines = chart([falling, rising()], Style(width=40, height=8, colours=True))
    assert {owner for line in lines for _, owner in line} == {None, 0, 1}
    assert "".join(text for text, _ in lines[0]) == "train/loss  last 0"


def test_without_unicode_stars_do() -> None:
    lines = text_of(rising(), unicode=False)
    assert "".join(lines).isascii()
    assert "*" in lines[1]


@pytest.mark.parametrize("values", [[1e308, -1e308], [5e-324, 1e308], [1e-300, 1.0]])
def test_the_largest_and_smallest_numbers_break_nothing(values: list[float]) -> None:
    for log in (False, True):
        assert len(text_of(Curve("k", [0, 10**12], values), log=log)) >= 10
