"""Which rank is to blame when a group hangs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_workers.shared.heartbeat import RankObservation, RankPhase
from ray_workers.supervision.rules.hang_detector import (
    PATIENCE,
    REMEMBERED,
    Hang,
    HangLimits,
    StepTimes,
    Suspicion,
    find_hang,
    find_left_behind,
    hang_report,
)
from ray_workers.supervision.rules.timings import Timings
from tests.unit.workers.supervision.observed import observation

TIMINGS = Timings()
LEAST_S = TIMINGS.hang_s
STOPPED_S = TIMINGS.stopped_hang_s
LIMITS = HangLimits(TIMINGS)
LONG = 10.0


def culprits(*observations: RankObservation) -> list[int] | None:
    hang = find_hang(observations, LIMITS)
    return None if hang is None else [one.rank for one in hang.culprits]


def test_the_rank_that_the_others_wait_for_is_to_blame() -> None:
    waiting = [observation(rank, RankPhase.EXCHANGE, LONG, collective=6) for rank in (0, 2)]
    assert culprits(*waiting, observation(1, RankPhase.COMPUTE, LONG)) == [1]
    assert culprits(*waiting, observation(1, RankPhase.UPDATE, LONG, step=9)) == [1]


def test_no_rank_is_to_blame_before_the_limit() -> None:
    waiting = observation(0, RankPhase.EXCHANGE, LONG, collective=6)
    assert culprits(waiting, observation(1, RankPhase.COMPUTE, LEAST_S[RankPhase.COMPUTE])) is None
    assert culprits(waiting, observation(1, RankPhase.DATA, LONG)) is None
    assert culprits(waiting, observation(1, RankPhase.DATA, LEAST_S[RankPhase.DATA] + 1)) == [1]


def test_a_rank_that_saves_or_evaluates_keeps_the_others_waiting_with_good_reason() -> None:
    waiting = observation(1, RankPhase.EXCHANGE, LONG, collective=6)
    assert culprits(observation(0, RankPhase.SAVE, LONG), waiting) is None
    assert culprits(observation(0, RankPhase.SAVE, LEAST_S[RankPhase.SAVE] + 1), waiting) == [0]


def test_the_stopped_rank_causes_the_hang_where_all_ranks_are_at_the_same_point() -> None:
    same = [observation(rank, RankPhase.EXCHANGE, LONG) for rank in (0, 1)]
    assert culprits(*same, observation(2, RankPhase.EXCHANGE, LONG, state="T")) == [2]


def test_if_all_are_at_the_same_point_and_none_is_stopped_it_may_just_take_long() -> None:
    """Ending that costs the way back to the checkpoint, so it is waited for ten times as long."""
    for phase in (RankPhase.EXCHANGE, RankPhase.EVALUATE):
        long = LEAST_S[phase] * PATIENCE
        assert culprits(*(observation(rank, phase, long - 0.1) for rank in (0, 1))) is None
        assert culprits(*(observation(rank, phase, long + 0.1) for rank in (0, 1))) == []


def test_a_stopped_rank_is_found_whatever_it_was_at() -> None:
    joining = observation(0, RankPhase.JOINING, 60.0)
    assert culprits(joining, observation(1, RankPhase.JOINING, STOPPED_S + 1, state="T")) == [1]
    assert culprits(joining, observation(1, RankPhase.JOINING, STOPPED_S - 1, state="T")) is None


@pytest.mark.parametrize("phase", [RankPhase.JOINING, RankPhase.STANDBY])
def test_a_group_that_is_not_whole_does_not_hang(phase: RankPhase) -> None:
    assert (
        culprits(observation(0, RankPhase.EXCHANGE, 1000.0), observation(1, phase, 1000.0)) is None
    )


def test_two_rounds_at_once_are_no_group() -> None:
    old, new = (
        observation(0, RankPhase.EXCHANGE, LONG),
        observation(1, RankPhase.COMPUTE, LONG, round_number=1),
    )
    assert culprits(old, new) is None


def test_the_first_step_of_a_group_may_take_longer() -> None:
    first = [observation(rank, RankPhase.COMPUTE, LONG, step=7, resumed_step=7) for rank in (0, 1)]
    assert culprits(*first) is None
    waits_already = observation(2, RankPhase.EXCHANGE, LONG, step=7, resumed_step=7)
    assert culprits(*first, waits_already) is None
    long = TIMINGS.first_step_hang_s + 1
    stuck = observation(0, RankPhase.COMPUTE, long, step=7, resumed_step=7)
    waits = observation(1, RankPhase.EXCHANGE, long, step=7, resumed_step=7)
    assert culprits(stuck, waits) == [0]


def test_a_rank_that_has_updated_by_itself_is_behind_those_that_wait_to_agree() -> None:
    """With `sync.every`, ranks agree on their weights after their own updates."""
    waiting = observation(0, RankPhase.EXCHANGE, LONG, collective=6)
    assert culprits(waiting, observation(1, RankPhase.UPDATE, LONG, collective=5)) == [1]


def test_with_patience_a_rank_may_take_longer_but_not_one_that_is_stopped() -> None:
    patient = HangLimits(TIMINGS, patience=10.0)
    stuck = observation(0, RankPhase.COMPUTE, LONG)
    assert patient.limit_s(stuck) == 10 * LEAST_S[RankPhase.COMPUTE]
    assert find_hang([stuck], patient) is None
    hang = find_hang([replace(stuck, state="T")], patient)
    assert hang is not None
    assert hang.limit_s == STOPPED_S


def test_a_single_rank_can_hang_too() -> None:
    assert culprits(observation(0, RankPhase.COMPUTE, LONG)) is None
    assert culprits(observation(0, RankPhase.COMPUTE, LONG * PATIENCE)) == [0]
    assert culprits(observation(0, RankPhase.COMPUTE, LONG, state="t")) == [0]


def test_the_limit_follows_the_jobs_own_steps() -> None:
    """A step of 2 s takes the limit to 20 s; a hundred quick ones later it is back."""
    times, now = StepTimes(), 0.0
    stuck = observation(0, RankPhase.COMPUTE, LONG)
    for step in range(5):
        times, now = times.after([observation(0, step=step)], now), now + 2.0
    assert replace(LIMITS, slowest_step_s=times.slowest_s).limit_s(stuck) == pytest.approx(20.0)
    now -= 2.0
    for step in range(5, 5 + REMEMBERED):
        now += 0.1
        times = times.after([observation(0, step=step)], now)
    assert times.slowest_s == pytest.approx(0.1)
    limits = replace(LIMITS, slowest_step_s=times.slowest_s)
    waits = observation(1, RankPhase.EXCHANGE, LONG, collective=6)
    hang = find_hang([stuck, waits], limits)
    assert hang is not None
    assert (hang.waited_s, hang.limit_s) == (LONG, LEAST_S[RankPhase.COMPUTE])


def test_the_time_of_a_step_is_not_learned_across_rounds() -> None:
    """The limit does not include a time in which a rank joined or waited for a position."""
    known = StepTimes().after([observation(0, step=4)], 0.0)
    assert known.after([observation(0, step=5)], 3.0).slowest_s == 3.0
    assert known.after([observation(0, step=5, round_number=1)], 3.0).slowest_s == 0.0
    broken = known.after([observation(0, RankPhase.STANDBY, step=4)], 1.0)
    assert broken.after([observation(0, step=5)], 3.0).slowest_s == 0.0


def test_a_rank_that_hangs_in_an_older_round_is_left_behind() -> None:
    newer = observation(1, RankPhase.EXCHANGE, 1000.0, round_number=1)
    joins = observation(2, RankPhase.JOINING, 1000.0)
    behind = observation(0, RankPhase.EXCHANGE, LONG)
    assert find_left_behind([behind, newer, joins], 1, LIMITS) == Hang(
        (behind,), LONG, LEAST_S[RankPhase.EXCHANGE]
    )
    assert find_left_behind([replace(behind, age_s=1.0), newer, joins], 1, LIMITS) is None


def test_a_rank_that_connects_to_a_dead_one_is_left_behind() -> None:
    """It has no connection that could be cut; the others wait for it at the store."""
    stuck = observation(0, RankPhase.FORMING, TIMINGS.forming_hang_s + 0.1)
    waits = observation(1, RankPhase.JOINING, LONG)
    hang = find_left_behind([stuck, waits], 2, LIMITS)
    assert hang == Hang((stuck,), stuck.age_s, TIMINGS.forming_hang_s)
    slow = HangLimits(TIMINGS, slowness=2.0)
    assert find_left_behind([stuck, waits], 2, slow) is None
    assert find_left_behind([replace(stuck, age_s=1.0), waits], 2, LIMITS) is None
    assert find_left_behind([stuck, replace(stuck, rank=1)], 2, LIMITS) is None  # all connect


@pytest.mark.parametrize("of_all", [True, False])
def test_a_rank_that_goes_on_meanwhile_is_not_suspected_for_longer(of_all: bool) -> None:
    """Simulates ranks whose whole machine was stopped."""

    def suspect(suspicion: Suspicion, began_at: float, now: float) -> Suspicion:
        group = [observation(rank, age_s=LONG, since=began_at) for rank in (0, 1)]
        hang = Hang(() if of_all else (group[1],), LONG, 4.0)
        return suspicion.after(hang, group, now)

    suspicion = suspect(Suspicion(), 0.0, now=100.0)
    assert suspect(suspicion, 0.0, now=101.0).since == 100.0
    assert suspect(suspicion, 1.0, now=101.0).since == 101.0


STACK = 'Thread 0x1 (most recent call first):\n  File "loop.py", line 1 in _step\n'


def test_a_bundle_names_the_culprits_and_the_phase_of_every_rank() -> None:
    waits = observation(0, RankPhase.EXCHANGE, 6.5, collective=6)
    stuck = observation(1, RankPhase.DATA, 7.0, step=9)
    bundle = hang_report(Hang((stuck,), 6.5, 4.0), [waits, stuck], {0: STACK}).body()
    assert bundle == {
        "culprits": [1],
        "step": 9,
        "phase": "data",
        "waited_s": 6.5,
        "limit_s": 4.0,
        "ranks": [
            {
                "rank": 0,
                "step": 10,
                "phase": "exchange",
                "collective": 6,
                "since_s": 6.5,
                "stack": STACK,
            },
            {
                "rank": 1,
                "step": 9,
                "phase": "data",
                "collective": 5,
                "since_s": 7.0,
                "stack": "",
            },
        ],
    }


def test_a_bundle_without_a_culprit_names_the_common_phase() -> None:
    everyone = [observation(rank, RankPhase.UPDATE, 41.0) for rank in (0, 1)]
    bundle = hang_report(Hang((), 41.0, 60.0), everyone, {}).body()
    assert (bundle["culprits"], bundle["step"], bundle["phase"]) == ([], 10, "update")
