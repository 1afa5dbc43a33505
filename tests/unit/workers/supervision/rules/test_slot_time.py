"""How an attempt's slot-seconds are divided among the categories."""

from __future__ import annotations

import random

import pytest

from ray_workers.shared.heartbeat import (
    TIME_CATEGORIES,
    RankObservation,
    RankPhase,
    RankStatus,
    TimeCategory,
)
from ray_workers.supervision.rules.slot_time import SlotTimeLedger

Seconds = dict[TimeCategory, float]


def rank(
    number: int,
    uses: Seconds,
    *,
    now: TimeCategory = TimeCategory.UNREPORTED,
    age_s: float = 0.0,
    alive: bool = True,
    phase: RankPhase = RankPhase.COMPUTE,
) -> RankObservation:
    """An observation of a script, which has reported a step if it does useful work now."""
    has_reported = now is not TimeCategory.UNREPORTED
    step, first_at = (7, 1e9) if has_reported else (0, 0.0)
    uses = dict.fromkeys(TIME_CATEGORIES, 0.0) | uses
    status = RankStatus(step, phase, 0, 0.0, 0, 0, first_at, 1, now, uses, False)
    return RankObservation(number, 0, status, age_s, "S" if alive else "")


def books(
    observations: list[RankObservation],
    *,
    num_slots: int,
    held_s: float,
    otherwise: TimeCategory = TimeCategory.IDLE,
) -> dict[str, float]:
    """The categories that are not 0, of an attempt that held its slots for this long."""
    ledger = SlotTimeLedger()
    ledger.hold(num_slots, now=0.0)
    ledger.hold(num_slots, now=held_s)
    found = ledger.account(observations, otherwise)
    assert sum(found.values()) == pytest.approx(num_slots * held_s)
    return {name: pytest.approx(seconds) for name, seconds in found.items() if seconds > 1e-9}


FIRST: Seconds = {
    TimeCategory.STARTING: 0.5,
    TimeCategory.UNREPORTED: 1.5,
    TimeCategory.USEFUL: 6.0,
    TimeCategory.RECOMPUTED: 1.0,
    TimeCategory.CHECKPOINTING: 1.0,
}


def test_a_script_starts_until_its_first_report() -> None:
    found = books([rank(0, FIRST, now=TimeCategory.USEFUL)], num_slots=1, held_s=10.0)
    assert found == {"starting": 2.0, "useful": 6.0, "recomputed": 1.0, "checkpointing": 1.0}


def test_ranks_that_report_nothing_do_as_the_one_that_does() -> None:
    observations = [
        rank(0, FIRST, now=TimeCategory.USEFUL),
        rank(1, {TimeCategory.STARTING: 0.5}, age_s=9.5),
    ]
    found = books(observations, num_slots=2, held_s=10.0)
    assert found == {"starting": 4.0, "useful": 12.0, "recomputed": 2.0, "checkpointing": 2.0}


def test_a_rank_that_ended_before_the_others_was_of_use_no_longer_than_it_ran() -> None:
    uses = {TimeCategory.STARTING: 0.5, TimeCategory.UNREPORTED: 5.5}
    ended = rank(1, uses, alive=False, phase=RankPhase.FINISH)
    found = books([rank(0, FIRST, now=TimeCategory.USEFUL), ended], num_slots=2, held_s=10.0)
    assert found == {
        "starting": 4.0,
        "useful": 6.0 + 4.0 * 6 / 8,
        "recomputed": 1.5,
        "checkpointing": 1.5,
        "idle": 4.0,
    }


def test_a_rank_that_was_killed_before_it_could_book_its_time_ran_as_long_as_the_first() -> None:
    killed = rank(1, {TimeCategory.STARTING: 0.5}, alive=False)
    found = books([rank(0, FIRST, now=TimeCategory.USEFUL), killed], num_slots=2, held_s=12.0)
    assert found == {
        "starting": 4.0,
        "useful": 12.0,
        "recomputed": 2.0,
        "checkpointing": 2.0,
        "idle": 4.0,
    }


def test_a_rank_that_reports_late_trained_before_that_as_the_first_did() -> None:
    late = {TimeCategory.STARTING: 0.5, TimeCategory.UNREPORTED: 8.5, TimeCategory.USEFUL: 1.0}
    observations = [rank(0, FIRST, now=TimeCategory.USEFUL), rank(1, late, now=TimeCategory.USEFUL)]
    found = books(observations, num_slots=2, held_s=10.0)
    assert found == {"starting": 4.0, "useful": 12.0, "recomputed": 2.0, "checkpointing": 2.0}


def test_nothing_is_known_of_a_script_none_of_whose_ranks_reports() -> None:
    observations = [
        rank(0, {TimeCategory.STARTING: 0.5}, age_s=9.5),
        rank(1, {TimeCategory.STARTING: 0.5}, alive=False),
    ]
    found = books(observations, num_slots=2, held_s=10.0, otherwise=TimeCategory.UNREPORTED)
    assert found == {"starting": 1.0, "unreported": 19.0}


def test_what_a_process_books_after_all_is_not_counted_twice() -> None:
    ledger = SlotTimeLedger()
    ledger.hold(1, now=0.0)
    ledger.hold(1, now=5.0)
    ledger.account([], TimeCategory.STARTING)
    ledger.hold(1, now=6.0)
    found = ledger.account(
        [rank(0, {TimeCategory.UNREPORTED: 1.0}, now=TimeCategory.USEFUL, age_s=4.0)],
        TimeCategory.IDLE,
    )
    assert {name: s for name, s in found.items() if s} == {"starting": 2.0, "useful": 4.0}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_seen_the_categories_add_up_to_what_was_held(seed: int) -> None:
    draw = random.Random(seed)
    ledger, now = SlotTimeLedger(), 0.0
    num_ranks = draw.randint(1, 4)
    began = [draw.uniform(0.0, 2.0) for _ in range(num_ranks)]
    ledger.hold(num_ranks, now)
    while now < 60.0:
        now += draw.uniform(0.1, 10.0)
        ledger.hold(num_ranks, now)
        observations = []
        for number in range(num_ranks):
            lived = max(0.0, now - began[number])
            cuts = sorted(draw.uniform(0.0, lived) for _ in range(3))
            uses = {TimeCategory.STARTING: cuts[0], TimeCategory.UNREPORTED: cuts[1] - cuts[0]}
            uses[draw.choice(TIME_CATEGORIES[:2])] = cuts[2] - cuts[1]
            use = draw.choice(
                [TimeCategory.UNREPORTED, TimeCategory.USEFUL, TimeCategory.CHECKPOINTING]
            )
            phase = draw.choice([RankPhase.COMPUTE, RankPhase.FINISH])
            alive, age_s = draw.random() < 0.7, lived - cuts[2]
            observations.append(rank(number, uses, now=use, age_s=age_s, alive=alive, phase=phase))
        seen = draw.sample(observations, draw.randint(0, num_ranks))
        found = ledger.account(
            seen, draw.choice([TimeCategory.STARTING, TimeCategory.IDLE, TimeCategory.UNREPORTED])
        )
        assert min(found.values()) >= 0.0
        assert sum(found.values()) == pytest.approx(ledger.held_s)
