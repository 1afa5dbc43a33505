"""Rows of recent points: every double is restored exactly, for all ranks or for a single rank."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from service.domain.series import Points, Series, join, pack_row, unpack_row

steps = st.lists(st.integers(0, 2**53), min_size=1, max_size=4, unique=True).map(sorted)
points = steps.flatmap(
    lambda taken: st.tuples(
        st.just(taken), st.lists(st.floats(), min_size=len(taken), max_size=len(taken))
    )
)
some_series = st.dictionaries(
    st.tuples(st.sampled_from(["train/loss", "a b", 'quoted"', "ä"]), st.integers(0, 3)),
    points,
    max_size=6,
)


def as_text(found: dict[Series, Points]) -> dict[Series, str]:
    """NaN is not equal to itself."""
    return {series: repr(points) for series, points in found.items()}


@given(some_series, st.integers(0, 3))
def test_a_row_returns_the_series_from_which_it_was_made(
    found: dict[Series, Points], rank: int
) -> None:
    row = pack_row(found)
    assert as_text(unpack_row(row)) == as_text(found)
    of_rank = {series: points for series, points in found.items() if series[1] == rank}
    assert as_text(unpack_row(row, rank)) == as_text(of_rank)


def test_later_points_come_after_the_earlier_ones() -> None:
    found: dict[Series, Points] = {("x", 0): ([1], [1.0])}
    join(found, {("x", 0): ([2, 3], [2.0, math.inf]), ("x", 1): ([7], [7.0])})
    assert found == {("x", 0): ([1, 2, 3], [1.0, 2.0, math.inf]), ("x", 1): ([7], [7.0])}


def test_series_with_the_same_steps_name_them_once() -> None:
    taken = list(range(100))
    alike = {(f"key-{n}", 0): (taken, [float(n)] * 100) for n in range(10)}
    assert len(pack_row(alike)) < 8 * 100 * 11 + 200
