"""Pure rules for drills and for the ledger."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from dray.views import DrillKind, DrillState
from ray_workers.shared.heartbeat import TimeCategory
from service.domain.attempts import drills, ledger
from service.domain.attempts.drills import Running

JOB = Running(world_size=2, step=10, total_steps=100, has_steps=True)
SCRIPT = Running(2, 0, None, has_steps=False, why_not_in_place="only it knows its state")
SINGLE = Running(1, 0, None, has_steps=True, why_not_in_place="no other rank holds its state")
USEFUL = {TimeCategory.USEFUL.value: 8.0, TimeCategory.STARTING.value: 2.0}


@pytest.mark.parametrize(("state", "told"), [*product(DrillState, repeat=2)])
def test_a_drill_only_goes_on_and_its_end_stays(state: DrillState, told: DrillState) -> None:
    order = [DrillState.WAITING, DrillState.STRUCK]
    if state.is_over:
        assert not drills.is_news(state, told)
    elif told.is_over:
        assert drills.is_news(state, told)
    else:
        assert drills.is_news(state, told) == (order.index(told) > order.index(state))


@pytest.mark.parametrize(
    ("kind", "rank", "at_step", "job", "pointer", "said"),
    [
        (DrillKind.KILL, 2, None, JOB, "/rank", "ranks 0 to 1"),
        (DrillKind.STALL, 9, 50, JOB, "/rank", "no rank 9"),
        (DrillKind.KILL, 1, None, SINGLE, "/rank", "only rank 0"),
        (DrillKind.KILL, 0, 50, SCRIPT, "/at_step", "has not reported a step yet"),
        (DrillKind.KILL, 0, 10, JOB, "/at_step", "already completed 10 steps"),
        (DrillKind.KILL, 0, 0, JOB, "/at_step", "already completed 10 steps"),
        (DrillKind.KILL, 0, 100, JOB, "/at_step", "ends after step 100"),
        (DrillKind.PREEMPT, 0, 3, JOB, "/at_step", "already completed"),
        (DrillKind.PREEMPT, 1, None, JOB, "/rank", "the whole job"),
    ],
)
def test_a_drill_that_makes_no_sense_is_refused_with_its_field(
    kind: DrillKind, rank: int, at_step: int | None, job: Running, pointer: str, said: str
) -> None:
    refusal = drills.refusal(kind, rank, at_step, job)
    assert refusal is not None
    assert refusal.pointer == pointer
    assert said in refusal.message


@pytest.mark.parametrize(
    ("kind", "rank", "at_step", "job"),
    [
        (DrillKind.KILL, 1, None, JOB),
        (DrillKind.STALL, 0, None, SCRIPT),
        (DrillKind.KILL, 1, 11, JOB),
        (DrillKind.STALL, 0, 99, JOB),
        (DrillKind.PREEMPT, 0, 50, JOB),
        (DrillKind.KILL, 1, None, SCRIPT),
        (DrillKind.KILL, 0, 5, SINGLE),
        (DrillKind.STALL, 0, 5, SINGLE),
        (DrillKind.PREEMPT, 0, None, SCRIPT),
    ],
)
def test_a_drill_that_makes_sense_is_not(
    kind: DrillKind, rank: int, at_step: int | None, job: Running
) -> None:
    assert drills.refusal(kind, rank, at_step, job) is None


def test_a_preemption_and_what_is_not_mended_in_place_end_the_attempt_on_purpose() -> None:
    assert drills.ends_attempt(DrillKind.PREEMPT, JOB)
    assert drills.ends_attempt(DrillKind.KILL, SCRIPT)
    assert drills.ends_attempt(DrillKind.KILL, SINGLE)
    assert drills.ends_attempt(DrillKind.STALL, SINGLE)
    assert not drills.ends_attempt(DrillKind.KILL, JOB)


def test_a_recovery_is_a_sentence() -> None:
    assert drills.outcome_sentence(0.414, 0) == "recovered in 0.41 s, 0 steps lost"
    assert drills.outcome_sentence(12.0, 1) == "recovered in 12.00 s, 1 step lost"
    assert drills.outcome_sentence(None, None) == "recovered"


@pytest.mark.parametrize(
    "said",
    [
        {"usefull": 1.0},
        {"useful": -0.1},
        {"useful": float("nan")},
        {"useful": float("inf")},
        {"useful": 1e300},
        {"useful": True},
        {"useful": "1"},
        {"useful": None},
    ],
)
def test_what_is_no_ledger_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"category|number|seconds"):
        ledger.checked(said)


def test_a_ledger_has_every_class_and_they_add_up_to_what_was_held() -> None:
    whole = ledger.checked({"useful": 8, "starting": 2.0})
    assert set(whole) == {slot_class.value for slot_class in TimeCategory}
    assert ledger.total(whole) == 10.0
    assert ledger.useful_share(whole) == 0.8
    assert ledger.useful_share({}) is None


def test_nobody_can_say_what_a_script_was_of_use_that_reported_no_step() -> None:
    unknown = ledger.checked({"starting": 0.5, "unreported": 9.0, "checkpointing": 0.5})
    assert ledger.useful_share(unknown) is None
    assert ledger.useful_share(unknown | {"useful": 10.0}) == 0.5
    assert ledger.useful_share(unknown | {"recomputed": 10.0}) == 0.0


def test_the_sum_over_attempts_takes_the_newest_word_of_each() -> None:
    job: dict[str, float] = {}
    said: dict[int, dict[str, float]] = {1: {}, 2: {}}
    for attempt, useful, idle in ((1, 5.0, 1.0), (1, 4.0, 3.0), (2, 2.0, 0.0), (1, 6.0, 3.0)):
        new = {TimeCategory.USEFUL.value: useful, TimeCategory.IDLE.value: idle}
        job = ledger.replaced(job, said[attempt], new)
        said[attempt] = new
        held = sum(ledger.total(one) for one in said.values())
        assert ledger.total(job) == pytest.approx(held)
    assert job[TimeCategory.USEFUL] == 8.0


def test_counters_never_go_down() -> None:
    assert ledger.growth({"useful": 5.0, "idle": 1.0}, {"useful": 4.0, "idle": 3.0}) == {
        "idle": 2.0
    }
    assert ledger.growth({}, USEFUL) == USEFUL
    assert ledger.growth(USEFUL, USEFUL) == {}


def test_what_nobody_accounts_for_is_idle() -> None:
    whole = ledger.unaccounted(USEFUL, 5.0)
    assert whole[TimeCategory.IDLE] == 5.0
    assert ledger.total(whole) == ledger.total(USEFUL) + 5.0
    assert ledger.total(ledger.unaccounted(USEFUL, -1.0)) == ledger.total(USEFUL)
