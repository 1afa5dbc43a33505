"""The useful share follows from the samples and the ledger, whatever happened in between."""

from __future__ import annotations

import pytest

from benchmarks.figures import ratio_of_sums
from benchmarks.goodput import count, measure
from benchmarks.goodput.count import Entry, Sample
from benchmarks.recovery import work

STEP_S = 0.05


def samples(until: float, pauses: list[tuple[float, float]]) -> list[Sample]:
    """Every 0.5 s; a step each 0.05 s, but for these pauses (from, to)."""
    found = []
    for tick in range(int(until * 2) + 1):
        at = tick / 2
        stood = sum(max(0.0, min(at, end) - begin) for begin, end in pauses)
        found.append(Sample(at, round((at - stood) / STEP_S)))
    return found


def test_the_undisturbed_step_time_does_not_know_of_the_kills() -> None:
    seen = samples(120.0, [(71.0, 74.0)])
    stretches = count.undisturbed(seen, [71.0], length_s=5.0, blind_s=10.0)
    assert count.step_time(stretches, 0.0, 120.0) == pytest.approx(STEP_S)
    assert sum(stretch.took_s for stretch in stretches) == pytest.approx(120 - 15)


def test_a_pause_is_what_counting_finds_missing() -> None:
    seen = samples(120.0, [(70.0, 73.0)])
    first, second = count.counted(seen, [0.0, 60.0, 120.0], STEP_S)
    assert first == pytest.approx((60.0, 60.0))
    assert second == pytest.approx((57.0, 60.0))


def test_each_minute_is_measured_by_its_own_steps() -> None:
    slow = [Sample(60.0 + tick, 1200 + tick * 5) for tick in range(1, 61)]
    stretches = count.undisturbed(samples(60.0, []) + slow, [], length_s=5.0, blind_s=10.0)
    assert count.step_time(stretches, 0.0, 60.0) == pytest.approx(STEP_S)
    assert count.step_time(stretches, 60.0, 120.0) == pytest.approx(0.2)


def test_without_a_quiet_stretch_nothing_is_claimed() -> None:
    seen = samples(10.0, [])
    stretches = count.undisturbed(seen, [5.0], length_s=5.0, blind_s=10.0)
    with pytest.raises(ValueError, match="long enough"):
        count.step_time(stretches, 0.0, 10.0)


def entry(at: float, useful: float, recovering: float) -> Entry:
    return Entry(at, {"useful": useful, "recovering": recovering, "idle": 0.0})


def test_the_ledger_is_read_between_its_own_entries() -> None:
    entries = [entry(1.0, 2.0, 0.0), entry(61.0, 116.0, 6.0), entry(121.5, 237.0, 6.0)]
    edges = [0.0, 60.0, 120.0]
    assert count.booked(entries, edges) == [(114.0, 120.0), (121.0, 121.0)]
    assert count.classes(entries, edges) == {"useful": 235.0, "recovering": 6.0, "idle": 0.0}


def test_kills_come_one_a_minute_and_the_same_again() -> None:
    kills = measure.schedule(5)
    assert kills == measure.schedule(5)
    assert kills != measure.schedule(5, seed=1)
    assert [int(at // 60) for at, _ in kills] == [1, 2, 3, 4, 5]
    assert {rank for _, rank in kills} <= set(range(work.NUM_RANKS))


def test_a_ratio_of_sums_weighs_by_size_and_has_an_interval() -> None:
    ratio = ratio_of_sums([(1.0, 1.0), (6.0, 9.0)])
    assert ratio.value == pytest.approx(0.7)
    assert ratio.low == pytest.approx(2 / 3)
    assert ratio.high == pytest.approx(1.0)


def test_a_result_shows_each_minute_and_says_whether_the_goal_is_met() -> None:
    kills = [(80.0, 1), (140.0, 0)]
    seen = measure.Seen(
        samples=samples(180.0, [(80.0, 80.6), (140.0, 143.0)]),
        entries=[
            entry(0.0, 0.0, 0.0),
            entry(60.0, 120.0, 0.0),
            entry(120.0, 238.8, 1.2),
            entry(180.0, 357.6, 2.4),
        ],
        kills=kills,
        edges=[0.0, 60.0, 120.0, 180.0],
        recoveries_s=[0.6, 3.0],
    )
    result = measure.conclude(seen)
    by_ledger, by_counting = result.comparisons
    assert by_ledger.ratio.value == pytest.approx(0.99)
    assert by_ledger.met
    assert by_counting.ratio.value == pytest.approx(1 - 3.6 / 120)
    assert by_counting.same.value == pytest.approx(1.0)
    minutes, uses = result.tables
    assert minutes.rows[0] == ["1", "rank 1 at 20.0 s", "99.00%", "99.00%"]
    assert minutes.rows[1] == ["2", "rank 0 at 20.0 s", "99.00%", "95.00%"]
    assert ["recovering", "2.40", "1.00%"] in [list(row) for row in uses.rows]
