"""Samples of system metrics: packing, joining in chronological order, and downsampling."""

from __future__ import annotations

import math
import random

import pytest

from service.domain.system_metrics import (
    RANKS_OF_ROW,
    SystemSamples,
    first_rank,
    joined,
    of_report,
    pack,
    thinned,
    unpack,
)


def same(one: SystemSamples, other: SystemSamples) -> bool:
    """Whether they are equal, treating NaN as equal to itself."""
    return list(one.times) == list(other.times) and {
        series: [str(value) for value in values] for series, values in one.columns.items()
    } == {series: [str(value) for value in values] for series, values in other.columns.items()}


def test_a_row_holds_the_samples_of_its_ranks_and_gives_those_of_one() -> None:
    samples = SystemSamples(
        [100, 110, 120],
        {
            ("system/cpu", 0): [0.5, math.nan, 2.0],
            ("system/node/cpu", 0): [1.0, 2.0, 3.0],
            ("system/cpu", 1): [0.0, 2.0**40, 1.0],
            ("system/cpu", 3): [4.0, 4.0, 4.0],
        },
    )
    row = pack(samples)
    assert same(unpack(row), samples)
    one = unpack(row, 1)
    assert one.columns == {("system/cpu", 1): [0.0, 2.0**40, 1.0]}
    assert unpack(row, 2).columns == {}
    assert len(row) < 150 + 3 * 8 + 4 * 3 * 4


def test_parts_are_joined_in_the_order_of_time_each_time_once() -> None:
    """The clock of the node of a later attempt can be behind."""
    parts = [
        SystemSamples([100, 110], {("a", 0): [1.0, 2.0]}),
        SystemSamples([105, 110, 120], {("a", 0): [3.0, 4.0, 5.0], ("b", 0): [6.0, 7.0, 8.0]}),
        SystemSamples([130], {("b", 0): [9.0]}),
    ]
    nan = math.nan
    columns = {("a", 0): [1.0, 3.0, 2.0, 5.0, nan], ("b", 0): [nan, 6.0, nan, 8.0, 9.0]}
    assert same(joined(parts), SystemSamples([100, 105, 110, 120, 130], columns))
    assert joined([]) == SystemSamples([], {})


def test_samples_become_their_means_at_the_time_of_the_last() -> None:
    nan = math.nan
    samples = SystemSamples(
        [1, 2, 3, 4, 5], {("a", 0): [1.0, 3.0, nan, 8.0, 7.0], ("b", 0): [nan] * 5}
    )
    columns = {("a", 0): [2.0, 8.0, 7.0], ("b", 0): [nan] * 3}
    assert same(thinned(samples, 2), SystemSamples([2, 4, 5], columns))
    assert same(thinned(samples, 1), samples)
    assert list(thinned(samples, 64).times) == [5]


def test_a_report_is_divided_by_the_rows_of_its_ranks() -> None:
    last = RANKS_OF_ROW
    columns = [([0, last], {"a": [1.0, 2.0], "n": [3.0, 4.0]}), ([1], {"a": [5.0]})]
    found = of_report(100, columns)
    assert found == {
        0: SystemSamples([100], {("a", 0): [1.0], ("n", 0): [3.0], ("a", 1): [5.0]}),
        last: SystemSamples([100], {("a", last): [2.0], ("n", last): [4.0]}),
    }
    assert [first_rank(rank) for rank in (0, last - 1, last, last + 1)] == [0, 0, last, last]


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_packed_is_unpacked(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randrange(1, 5)
    columns = {
        (f"k{chance.randrange(4)}", chance.randrange(70)): [
            chance.choice([math.nan, 0.0, chance.randrange(1000) / 8]) for _ in range(count)
        ]
        for _ in range(chance.randrange(30))
    }
    samples = SystemSamples(sorted(chance.sample(range(1000), count)), columns)
    assert same(unpack(pack(samples)), samples)
