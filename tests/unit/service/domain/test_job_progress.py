"""The expected ends of jobs, for many kinds of random speeds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from service.domain.progress import MAX_MARKS, Mark, TimeLeft, end_between, reached, seconds_left
from tests.marks import FRESH_SEEDS, RULES

pytestmark = RULES

Paces = Iterator[float]
NUM_DRAWN = 60


def constant(draw: random.Random, total: int) -> Paces:
    while True:
        yield 1.0


def noisy(draw: random.Random, total: int) -> Paces:
    spread = draw.uniform(0.05, 0.6)
    while True:
        yield draw.lognormvariate(0.0, spread)


def drifting(draw: random.Random, total: int) -> Paces:
    """Yield paces that become up to twice as slow or as fast by the end."""
    drift = draw.uniform(-0.5, 1.0)
    for step in itertools.count():
        yield (1 + drift * step / total) * draw.uniform(0.9, 1.1)


def with_checkpoints(draw: random.Random, total: int) -> Paces:
    every, pause = draw.randint(2, max(3, total // 8)), draw.uniform(0.1, 0.4)
    for step in itertools.count(1):
        yield draw.uniform(0.9, 1.1) + (pause * every if step % every == 0 else 0.0)


def beside_others(draw: random.Random, total: int) -> Paces:
    """Yield alternately fast and slow paces, as when other jobs share the machine from time to
    time."""
    level = 1.0
    while True:
        if draw.random() < 8 / total:
            level = draw.uniform(0.7, 1.5)
        yield level


KINDS: list[Callable[[random.Random, int], Paces]] = [
    constant,
    noisy,
    drifting,
    with_checkpoints,
    beside_others,
]


@pytest.mark.parametrize("is_lost", [False, True], ids=["one attempt", "an attempt lost"])
@pytest.mark.parametrize("kind", KINDS)
def test_nine_of_ten_jobs_end_within_their_range(
    kind: Callable[[random.Random, int], Paces], is_lost: bool
) -> None:
    draw = random.Random(None if FRESH_SEEDS else f"{kind.__name__} {is_lost}")
    inside = [found for _ in range(NUM_DRAWN) if (found := _ends_inside(kind, draw, is_lost))]
    assert len(inside) > NUM_DRAWN / 2
    assert sum(found == "inside" for found in inside) >= 0.9 * len(inside)


def _ends_inside(
    kind: Callable[[random.Random, int], Paces], draw: random.Random, is_lost: bool
) -> str | None:
    """Return the position of the true end in the range at some time during training; None without a
    range."""
    total, step_s = draw.choice([50, 200, 1000, 5000]), draw.uniform(0.2, 30.0)
    steps_s = [step_s * factor for factor in itertools.islice(kind(draw, total), total)]
    looked_at = int(total * draw.uniform(0.1, 0.95))
    # A new attempt resumes from a checkpoint, without the paces of the previous attempt.
    begins = draw.randrange(looked_at) if is_lost else 0
    at_s, marks = 1e9, list[Mark]()
    for step in range(begins, looked_at):
        at_s += steps_s[step]
        marks = reached(marks, Mark(at_s, step + 1))
    left = seconds_left(marks, total)
    if left is None:
        return None
    return "inside" if left.earliest_s <= sum(steps_s[looked_at:]) <= left.latest_s else "outside"


def steady(number: int, step_s: float = 10.0) -> list[Mark]:
    return [Mark(n * step_s, n + 1) for n in range(number)]


def test_steady_steps_give_a_narrow_range_around_the_end() -> None:
    left = seconds_left(steady(21), 41)
    assert left == TimeLeft(pytest.approx(200 / 1.16, rel=0.01), pytest.approx(232, rel=0.01))


@pytest.mark.parametrize(
    "marks",
    [[], steady(4), steady(9, 1e-4), [Mark(0.0, 1), Mark(100.0, 230_000)]],
    ids=["no steps", "few steps", "a moment", "one pace"],
)
def test_without_enough_measured_steps_no_end_is_estimated(marks: list[Mark]) -> None:
    assert seconds_left(marks, 230_000) is None


def test_a_job_without_end_has_no_expected_end() -> None:
    assert end_between(steady(20), 2**62, None) is None


def test_a_time_limit_bounds_both_times() -> None:
    limit = datetime.fromtimestamp(0, UTC) + timedelta(seconds=250)
    assert end_between(steady(21), 10_000, limit) == (limit, limit)


def test_the_last_step_has_nothing_left() -> None:
    assert seconds_left(steady(20), 20) == TimeLeft(0.0, 0.0)


def test_marks_are_few_spread_over_all_of_the_time_and_begin_and_end_with_the_measured() -> None:
    marks: list[Mark] = []
    for mark in steady(2000):
        marks = reached(marks, mark)
    assert len(marks) == MAX_MARKS
    assert (marks[0], marks[-1]) == (Mark(0.0, 1), Mark(19990.0, 2000))
    gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(marks)]
    assert max(gaps) <= 19990 / MAX_MARKS * 3


def test_a_step_that_is_reported_again_changes_nothing_and_an_earlier_one_begins_anew() -> None:
    marks = steady(5)
    assert reached(marks, Mark(99.0, 5)) == marks
    assert reached(marks, Mark(3.0, 6)) == marks
    assert reached(marks, Mark(99.0, 3)) == [Mark(99.0, 3)]
