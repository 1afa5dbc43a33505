"""Who is to blame when a group stands still."""

from __future__ import annotations

import pytest

from ray_workers.shared.heartbeat import (
    TIME_CATEGORIES,
    RankObservation,
    RankPhase,
    RankStatus,
    TimeCategory,
)
from ray_workers.supervision.hang_detector import (
    FIRST_STEP_LEAST_S,
    LEAST_S,
    PATIENCE,
    STOPPED_S,
    SURE_S,
    Hang,
    HangDetector,
    Suspicion,
)


def observation(
    rank: int,
    phase: RankPhase,
    age_s: float,
    *,
    step: int = 10,
    collective: int = 5,
    state: str = "S",
    generation: int = 0,
    resumed_step: int = 0,
    since: float = 0.0,
) -> RankObservation:
    look = RankStatus(
        step=step,
        phase=phase,
        collective=collective,
        since=since,
        generation=generation,
        resumed_step=resumed_step,
        first_at=1.0,
        pid=1,
        use=TimeCategory.USEFUL,
        uses=dict.fromkeys(TIME_CATEGORIES, 0.0),
    )
    return RankObservation(rank, 0, look, age_s, state)


LONG = 10.0


def culprits(*observations: RankObservation) -> list[int] | None:
    hang = HangDetector().look(observations, now=100.0)
    return None if hang is None else [one.rank for one in hang.culprits]


def test_the_rank_that_the_others_wait_for_is_to_blame() -> None:
    waiting = [observation(rank, RankPhase.EXCHANGE, LONG, collective=6) for rank in (0, 2)]
    assert culprits(*waiting, observation(1, RankPhase.COMPUTE, LONG)) == [1]
    assert culprits(*waiting, observation(1, RankPhase.UPDATE, LONG, step=9)) == [1]


def test_nobody_is_to_blame_before_it_has_been_too_long() -> None:
    waiting = observation(0, RankPhase.EXCHANGE, LONG, collective=6)
    assert culprits(waiting, observation(1, RankPhase.COMPUTE, LEAST_S[RankPhase.COMPUTE])) is None
    assert culprits(waiting, observation(1, RankPhase.DATA, LONG)) is None
    assert culprits(waiting, observation(1, RankPhase.DATA, LEAST_S[RankPhase.DATA] + 1)) == [1]


def test_who_saves_or_evaluates_keeps_the_others_waiting_with_good_reason() -> None:
    waiting = observation(1, RankPhase.EXCHANGE, LONG, collective=6)
    assert culprits(observation(0, RankPhase.SAVE, LONG), waiting) is None
    assert culprits(observation(0, RankPhase.SAVE, LEAST_S[RankPhase.SAVE] + 1), waiting) == [0]


def test_where_all_stand_at_the_same_place_it_is_the_one_that_is_stopped() -> None:
    same = [observation(rank, RankPhase.EXCHANGE, LONG) for rank in (0, 1)]
    assert culprits(*same, observation(2, RankPhase.EXCHANGE, LONG, state="T")) == [2]


def test_where_all_stand_at_the_same_place_and_nobody_is_stopped_it_may_just_take_long() -> None:
    """Ending that costs the way back to the checkpoint, so it is waited for ten times as long."""
    for phase in (RankPhase.EXCHANGE, RankPhase.EVALUATE):
        long = LEAST_S[phase] * PATIENCE
        assert culprits(*(observation(rank, phase, long - 0.1) for rank in (0, 1))) is None
        assert culprits(*(observation(rank, phase, long + 0.1) for rank in (0, 1))) == []


def test_a_stopped_rank_is_found_whatever_it_was_at() -> None:
    joining = observation(0, RankPhase.JOINING, 60.0)
    assert culprits(joining, observation(1, RankPhase.JOINING, STOPPED_S + 1, state="T")) == [1]
    assert culprits(joining, observation(1, RankPhase.JOINING, STOPPED_S - 1, state="T")) is None


@pytest.mark.parametrize("phase", [RankPhase.JOINING, RankPhase.STAND_BY])
def test_a_group_that_is_not_whole_does_not_hang(phase: RankPhase) -> None:
    assert (
        culprits(observation(0, RankPhase.EXCHANGE, 1000.0), observation(1, phase, 1000.0)) is None
    )


def test_two_generations_at_once_are_no_group() -> None:
    old, new = (
        observation(0, RankPhase.EXCHANGE, LONG),
        observation(1, RankPhase.COMPUTE, LONG, generation=1),
    )
    assert culprits(old, new) is None


def test_the_first_step_of_a_group_may_take_longer() -> None:
    first = [observation(rank, RankPhase.COMPUTE, LONG, step=7, resumed_step=7) for rank in (0, 1)]
    assert culprits(*first) is None
    waits_already = observation(2, RankPhase.EXCHANGE, LONG, step=7, resumed_step=7)
    assert culprits(*first, waits_already) is None
    long = FIRST_STEP_LEAST_S + 1
    stuck = observation(0, RankPhase.COMPUTE, long, step=7, resumed_step=7)
    waits = observation(1, RankPhase.EXCHANGE, long, step=7, resumed_step=7)
    assert culprits(stuck, waits) == [0]


def test_who_has_updated_by_itself_is_behind_those_who_wait_to_agree() -> None:
    """With `sync.every` ranks agree on their weights after an update of their own."""
    waiting = observation(0, RankPhase.EXCHANGE, LONG, collective=6)
    assert culprits(waiting, observation(1, RankPhase.UPDATE, LONG, collective=5)) == [1]


def test_the_patient_watchdog_waits_for_longer_but_not_for_who_is_stopped() -> None:
    patient = HangDetector(patience=10.0)
    stuck = observation(0, RankPhase.COMPUTE, LONG)
    assert patient.limit_s(stuck) == 10 * LEAST_S[RankPhase.COMPUTE]
    assert patient.look([stuck], now=100.0) is None
    hang = patient.look([observation(0, RankPhase.COMPUTE, LONG, state="T")], now=100.0)
    assert hang is not None
    assert hang.limit_s == STOPPED_S


def test_a_single_rank_can_hang_too() -> None:
    assert culprits(observation(0, RankPhase.COMPUTE, LONG)) is None
    assert culprits(observation(0, RankPhase.COMPUTE, LONG * PATIENCE)) == [0]
    assert culprits(observation(0, RankPhase.COMPUTE, LONG, state="t")) == [0]


def test_the_limit_follows_the_jobs_own_steps() -> None:
    """A step of 2 s takes the limit to 20 s; a hundred quick ones later it is back."""
    hang_detector = HangDetector()
    stuck = observation(0, RankPhase.COMPUTE, LONG)
    for number in range(5):
        going_on = observation(0, RankPhase.COMPUTE, 0.1, step=number)
        assert hang_detector.look([going_on], now=2.0 * number) is None
    assert hang_detector.limit_s(stuck) == pytest.approx(20.0)
    for number in range(5, 130):
        hang_detector.look(
            [observation(0, RankPhase.COMPUTE, 0.1, step=number)], now=8.0 + 0.1 * number
        )
    assert hang_detector.limit_s(stuck) == LEAST_S[RankPhase.COMPUTE]
    waits = observation(1, RankPhase.EXCHANGE, LONG, step=129, collective=6)
    hang = hang_detector.look([observation(0, RankPhase.COMPUTE, LONG, step=129), waits], now=50.0)
    assert hang is not None
    assert (hang.waited_s, hang.limit_s) == (LONG, LEAST_S[RankPhase.COMPUTE])


def test_who_stands_still_is_to_blame_once_it_was_watched_for_a_while() -> None:
    waits, stuck = observation(0, RankPhase.EXCHANGE, LONG), observation(1, RankPhase.COMPUTE, LONG)
    hang, suspicion = Hang((stuck,), LONG, 4.0), Suspicion()
    assert not suspicion.proves(hang, [waits, stuck], now=100.0)
    assert not suspicion.proves(hang, [waits, stuck], now=100.0 + SURE_S / 2)
    assert suspicion.proves(hang, [waits, stuck], now=100.0 + SURE_S)


@pytest.mark.parametrize("of_all", [True, False])
def test_who_goes_on_meanwhile_is_not_to_blame(of_all: bool) -> None:
    """As after the whole machine was stopped."""
    suspicion = Suspicion()
    for number in range(9):
        going_on = [
            observation(rank, RankPhase.COMPUTE, LONG, since=float(number)) for rank in (0, 1)
        ]
        hang = Hang(() if of_all else (going_on[1],), LONG, 4.0)
        assert not suspicion.proves(hang, going_on, now=100.0 + number * SURE_S)
