"""The decisions about a group, given only the observations and the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dray.drills import DrillKind
from ray_workers.shared.commands import Drill, Grant
from ray_workers.shared.contracts import Cause
from ray_workers.shared.heartbeat import RankObservation, RankPhase
from ray_workers.supervision.rules.group_policy import (
    Action,
    AddWorkers,
    Confirm,
    End,
    EndHang,
    Gather,
    GroupMemory,
    GroupObservation,
    GroupPolicy,
    Inject,
)
from ray_workers.supervision.rules.hang_detector import PATIENCE
from ray_workers.supervision.rules.recovery_rules import RecoveryState, Regrouping
from ray_workers.supervision.rules.timings import Timings
from tests.unit.workers.supervision.observed import observation
from tests.wire import traits

TIMINGS = Timings()
STEP_S = TIMINGS.hang_s[RankPhase.COMPUTE]
PLAIN = traits({})


def policy_of(*, is_elastic: bool = False, **fields: Any) -> GroupPolicy:
    return GroupPolicy(TIMINGS, replace(PLAIN, **fields), is_elastic)


ELASTIC = policy_of(recovers_in_place=True)
SERVED = policy_of(recovers_in_place=True, state_holders=frozenset({1}))
FIXED = policy_of(recovers_in_place=False)
SCRIPT = policy_of(recovers_in_place=False, is_script=True)
REGROUPING = Regrouping((1,), began_at=0.0, furthest_step=10)
ANNOUNCED = RecoveryState(round=1, regrouping=REGROUPING, announced_at=0.0)
LACKING = RecoveryState(round=1, regrouping=REGROUPING, num_lacking=2, lacking_since=0.0)
GRANTS = (Grant(1, (), None), Grant(2, (), None))


def seen(*ranks: RankObservation, **fields: Any) -> GroupObservation:
    plain: dict[str, Any] = {
        "num_running": len(ranks),
        "num_placed": len(ranks),
        "recovery": RecoveryState(),
    }
    return GroupObservation(ranks, **{**plain, **fields})


def decide(
    group: GroupObservation, *, at: Sequence[float], policy: GroupPolicy = ELASTIC
) -> list[Action]:
    """The actions after the group was observed so at each of these times."""
    memory, actions = GroupMemory(), []
    for now in at:
        assert not actions, "decided before"
        actions, memory = policy.decide(group, memory, now)
    return actions


def stuck(age_s: float, **fields: Any) -> GroupObservation:
    """Rank 0 waits for rank 1."""
    waits = observation(0, RankPhase.EXCHANGE, age_s, collective=6)
    return seen(waits, observation(1, RankPhase.COMPUTE, age_s), **fields)


def culprits(actions: Sequence[Action]) -> list[int]:
    (action,) = actions
    assert isinstance(action, EndHang)
    return [rank.rank for rank in action.hang.culprits]


def test_a_rank_that_hangs_is_ended_once_it_was_observed_for_a_while() -> None:
    assert decide(stuck(STEP_S + 1), at=[7.0]) == [], "one observation proves nothing"
    assert decide(stuck(STEP_S + 1), at=[7.0, 7.0 + TIMINGS.sure_s - 0.1]) == []
    assert culprits(decide(stuck(STEP_S + 1), at=[7.0, 7.0 + TIMINGS.sure_s])) == [1]
    assert decide(stuck(STEP_S - 1), at=[7.0, 9.0]) == []


def test_a_rank_may_take_longer_where_a_false_alarm_costs_more() -> None:
    for age_s, ends in ((STEP_S * PATIENCE - 0.1, False), (STEP_S * PATIENCE + 0.1, True)):
        alone = seen(observation(0, age_s=age_s))
        assert bool(decide(alone, at=[0.0, 9.0], policy=FIXED)) is ends


def test_a_rank_may_take_longer_on_a_slow_machine() -> None:
    for slowness, ends in ((5.0, True), (5.2, False)):
        group = stuck(5.1 * STEP_S, slowness=slowness)
        assert bool(decide(group, at=[0.0, 9.0])) is ends


@pytest.mark.parametrize("policy", [ELASTIC, FIXED])
def test_a_rank_that_is_stopped_when_the_others_are_through_is_ended(policy: GroupPolicy) -> None:
    stopped = observation(1, RankPhase.FINISH, TIMINGS.stopped_hang_s + 1, state="T")
    last = seen(stopped, num_placed=2, num_through=1)
    assert culprits(decide(last, at=[0.0, TIMINGS.sure_s], policy=policy)) == [1]
    lost = seen(stopped, num_placed=2)
    assert decide(lost, at=[0.0, TIMINGS.sure_s], policy=policy) == [], "recovery's to judge"


def test_a_rank_that_does_not_come_to_its_end_when_the_others_are_through_is_ended() -> None:
    for age_s, ends in ((-1.0, False), (1.0, True)):
        late = observation(1, RankPhase.FINISH, PATIENCE * TIMINGS.hang_s[RankPhase.FINISH] + age_s)
        last = seen(late, num_placed=2, num_through=1)
        assert bool(decide(last, at=[0.0, TIMINGS.sure_s])) is ends


def test_a_slow_worker_of_parameter_servers_is_not_ended_and_a_stopped_one_is() -> None:
    age_s = 100.0 * STEP_S
    assert decide(stuck(age_s), at=[0.0, 9.0], policy=SERVED) == []
    late = stuck(age_s, recovery=ANNOUNCED)
    times = [TIMINGS.cut_off_s, TIMINGS.cut_off_s + TIMINGS.sure_s]
    assert decide(late, at=times, policy=SERVED) == []
    assert culprits(decide(late, at=times)) == [0, 1]
    times = [0.0, TIMINGS.stopped_hang_s + 0.1]
    for recovery in (RecoveryState(), ANNOUNCED):
        stopped = seen(observation(0, state="T"), observation(1), recovery=recovery)
        assert culprits(decide(stopped, at=times, policy=SERVED)) == [0]


@pytest.mark.parametrize("at_own_pace", [True, False])
def test_a_rank_that_takes_few_shares_does_not_hang(at_own_pace: bool) -> None:
    """With ad_psgd, a share takes this rank as long as fifteen steps take the others."""
    share_s, step_s = 20.0, 20.0 / 15
    policy, memory = policy_of(recovers_in_place=True, at_own_pace=at_own_pace), GroupMemory()
    ended = []
    for now in map(float, range(1, 200)):
        computes_since = now // share_s * share_s
        slow = observation(1, age_s=now - computes_since, step=int(computes_since / step_s))
        fast = observation(0, RankPhase.UPDATE, step=int(now / step_s))
        actions, memory = policy.decide(seen(fast, slow), memory, now)
        ended += actions
    assert bool(ended) is not at_own_pace
    lasting = seen(fast, replace(slow, age_s=11 * share_s))
    again, memory = policy.decide(lasting, memory, now)
    assert again + policy.decide(lasting, memory, now + TIMINGS.sure_s)[0], "one that hangs does"


def script(state: str, **fields: Any) -> GroupObservation:
    """A script of two ranks that never reported; rank 1 is in this state."""
    ranks = [observation(0, age_s=10_000.0, step=0)]
    ranks.append(observation(1, age_s=10_000.0, step=0, state=state))
    return seen(*ranks, **fields)


def test_a_running_script_is_not_judged_because_it_reports_no_phases() -> None:
    assert decide(script("S"), at=[0.0, 9.0, 1000.0], policy=SCRIPT) == []


ELASTIC_SCRIPT = policy_of(recovers_in_place=True, is_script=True, is_elastic=True)


def test_an_elastic_script_that_is_not_prepared_ends_once_it_has_reported_a_step() -> None:
    (end,) = decide(seen(observation(0), observation(1)), at=[0.0], policy=ELASTIC_SCRIPT)
    assert isinstance(end, End)
    assert end.outcome.cause is Cause.CANNOT_RUN
    assert "dray.train.prepare()" in end.outcome.message
    is_starting = seen(observation(0, first_at=0.0, step=0))
    assert decide(is_starting, at=[0.0], policy=ELASTIC_SCRIPT) == []
    is_prepared = seen(observation(0, is_prepared=True))
    assert decide(is_prepared, at=[0.0], policy=ELASTIC_SCRIPT) == []
    assert decide(seen(observation(0)), at=[0.0], policy=SCRIPT) == []


def test_a_prepared_script_that_recovers_may_be_as_slow_as_its_steps_are() -> None:
    """Rank 0 computes a step in the old round; its steps take a minute each."""
    memory = GroupMemory()
    for step in range(3):
        ranks = [observation(rank, step=step, is_prepared=True) for rank in (0, 1)]
        actions, memory = ELASTIC_SCRIPT.decide(seen(*ranks), memory, 60.0 * step)
        assert actions == []
    late = [observation(0, age_s=599.0, step=2, is_prepared=True)]
    recovery = RecoveryState(round=1, regrouping=REGROUPING, announced_at=120.0)
    for now in (130.0, 140.0):
        group = seen(*late, num_running=2, num_placed=2, recovery=recovery)
        actions, memory = ELASTIC_SCRIPT.decide(group, memory, now)
        assert actions == []


def test_a_stopped_process_of_a_script_is_ended_after_a_while() -> None:
    late = 7.1 + TIMINGS.stopped_hang_s
    assert decide(script("T"), at=[7.0, late - 0.2], policy=SCRIPT) == []
    (action,) = actions = decide(script("T"), at=[7.0, late], policy=SCRIPT)
    assert culprits(actions) == [1]
    assert isinstance(action, EndHang)
    assert action.hang.waited_s == pytest.approx(late - 7.0), "not since its last report"
    another_has_ended = script("T", num_placed=3)
    assert culprits(decide(another_has_ended, at=[7.0, late], policy=SCRIPT)) == [1]
    being_ended = script("T", is_ending_hang=True)
    assert decide(being_ended, at=[7.0, late], policy=SCRIPT) == []


def test_a_script_that_is_stopped_now_and_then_goes_on() -> None:
    memory = GroupMemory()
    for now, state in ((0.0, "T"), (4.0, "S"), (8.0, "T"), (12.0, "T")):
        actions, memory = SCRIPT.decide(script(state), memory, now)
        assert actions == []


@pytest.mark.parametrize("fields", [{"is_ending_hang": True}, {"num_placed": 3, "num_running": 3}])
def test_no_rank_is_blamed_while_another_is_missing(fields: dict[str, Any]) -> None:
    """The rank was just killed, or is silent with its node."""
    assert decide(stuck(10_000.0, **fields), at=[0.0, 9.0]) == []


# Forming the first group.


def forming(**fields: Any) -> GroupObservation:
    """A first group whose rank 0 has connected to the others."""
    phases = (RankPhase.JOINING, RankPhase.FORMING)
    return seen(*(observation(r, p, first_at=0.0) for r, p in enumerate(phases)), **fields)


@pytest.mark.parametrize("policy", [ELASTIC, FIXED])
def test_a_first_group_that_can_not_connect_ends_the_attempt(policy: GroupPolicy) -> None:
    late = 7.1 + TIMINGS.whole_limit_s
    assert decide(forming(), at=[7.0, late - 0.2], policy=policy) == []
    (end,) = decide(forming(), at=[7.0, late], policy=policy)
    assert isinstance(end, End)
    assert end.outcome.cause is Cause.WORKER_LOST
    assert end.outcome.message == (
        "the ranks did not connect within 150 s (rank 0: joining; rank 1: forming)"
    )


def test_ranks_that_read_their_data_or_form_a_later_round_are_not_judged_by_that() -> None:
    assert decide(joining(RecoveryState()), at=[0.0, 1e6]) == []
    late = TIMINGS.whole_limit_s
    recovers = replace(ANNOUNCED, announced_at=late)
    assert decide(forming(recovery=recovers), at=[0.0, 2 * late]) == []


def test_a_first_group_that_connected_is_judged_no_longer() -> None:
    _, memory = ELASTIC.decide(forming(), GroupMemory(), 7.0)
    assert memory.forming_since == 7.0
    assert ELASTIC.decide(joining(RecoveryState()), memory, 8.0)[1].forming_since is None


# Recovery.


def recovered(**fields: Any) -> GroupObservation:
    group = [observation(rank, round_number=1, **fields) for rank in (0, 1)]
    return seen(*group, recovery=ANNOUNCED)


def test_a_group_has_recovered_once_every_rank_has_taken_a_step_in_the_new_round() -> None:
    assert decide(recovered(), at=[1.0]) == [Confirm()]
    assert decide(recovered(first_at=0.0, phase=RankPhase.FINISH), at=[1.0]) == [Confirm()]
    assert decide(recovered(first_at=0.0), at=[1.0]) == []
    old = seen(observation(0), observation(1, round_number=1), recovery=ANNOUNCED)
    assert decide(old, at=[1.0]) == []
    missing = seen(observation(0, round_number=1), num_placed=2, recovery=ANNOUNCED)
    assert decide(missing, at=[1.0]) == []


def test_a_group_whose_ranks_have_not_compared_their_copies_has_not_recovered() -> None:
    assert decide(recovered(is_verified=False), at=[1.0]) == []
    finishes = recovered(is_verified=False, first_at=0.0, phase=RankPhase.FINISH)
    assert decide(finishes, at=[1.0]) == []


def with_servers(newcomer: RankObservation, **fields: Any) -> GroupObservation:
    """Rank 0 was not lost, and is in a long step of the first round."""
    return seen(observation(0, age_s=1e6), newcomer, recovery=ANNOUNCED, **fields)


def test_with_servers_a_newcomer_that_has_taken_a_step_is_a_recovery() -> None:
    """The others never notice, and may have finished in the meantime."""
    trains = with_servers(observation(1, round_number=1))
    assert decide(trains, at=[1.0], policy=SERVED) == [Confirm()]
    alone = seen(observation(1, round_number=1), num_placed=2, num_through=1, recovery=ANNOUNCED)
    assert decide(alone, at=[1.0], policy=SERVED) == [Confirm()]
    over = with_servers(observation(1, RankPhase.FINISH, round_number=1, first_at=0.0))
    assert decide(over, at=[1.0], policy=SERVED) == [Confirm()]
    for other in (
        with_servers(observation(1, round_number=1, first_at=0.0)),
        with_servers(observation(1)),
        with_servers(observation(1, RankPhase.FINISH, first_at=0.0)),  # it came too late
        seen(observation(0), num_placed=2, recovery=ANNOUNCED),
    ):
        assert decide(other, at=[1.0], policy=SERVED) == []


def test_with_servers_a_newcomer_may_take_long_for_its_step_but_not_to_join() -> None:
    late = TIMINGS.whole_limit_s + 0.1
    waits = with_servers(observation(1, RankPhase.UPDATE, round_number=1, first_at=0.0))
    assert decide(waits, at=[late], policy=SERVED) == []
    comes = with_servers(observation(1, RankPhase.JOINING, first_at=0.0))
    (end,) = decide(comes, at=[late], policy=SERVED)
    assert isinstance(end, End)


def joining(recovery: RecoveryState, **fields: Any) -> GroupObservation:
    joins = [observation(rank, RankPhase.JOINING, first_at=0.0) for rank in (0, 1)]
    return seen(*joins, recovery=recovery, **fields)


def test_a_recovery_that_takes_too_long_ends_the_attempt() -> None:
    assert decide(joining(ANNOUNCED), at=[TIMINGS.whole_limit_s]) == []
    (end,) = decide(joining(ANNOUNCED), at=[TIMINGS.whole_limit_s + 0.1])
    assert isinstance(end, End)
    assert end.outcome.cause is Cause.WORKER_LOST
    assert end.outcome.message == (
        "the group was still incomplete after 150 s (rank 0: joining; rank 1: joining)"
    )
    waits_for_a_replacement = RecoveryState(round=1, regrouping=REGROUPING)
    assert decide(joining(waits_for_a_replacement), at=[1e6]) == []


def test_a_group_that_lacks_workers_waits_for_slots_for_a_while() -> None:
    waits = seen(observation(0, RankPhase.STANDBY), recovery=LACKING)
    assert decide(waits, at=[0.0, TIMINGS.standby_limit_s]) == []
    (end,) = decide(waits, at=[TIMINGS.standby_limit_s + 0.1])
    assert isinstance(end, End)
    assert end.outcome.message == "no slots became available within 30 s to replace 2 lost workers"


def test_workers_are_added_in_granted_slots_one_grant_after_the_other() -> None:
    late = TIMINGS.standby_limit_s + 0.1
    came = RecoveryState(1, REGROUPING, num_lacking=2, lacking_since=0.0, grants=GRANTS)
    assert decide(joining(came), at=[late]) == [AddWorkers(GRANTS[0])]
    for grants in (GRANTS[1:], ()):
        taking = replace(came, grants=grants, is_adding_workers=True)
        assert decide(joining(taking), at=[late]) == []


def standing_by(**fields: Any) -> GroupObservation:
    return seen(observation(0, RankPhase.STANDBY), observation(1, RankPhase.JOINING), **fields)


@pytest.mark.parametrize("recovery", [RecoveryState(), ANNOUNCED])
def test_ranks_that_lost_each_other_are_gathered(recovery: RecoveryState) -> None:
    """This also applies if a round could not be formed."""
    group = standing_by(recovery=recovery)
    assert decide(group, at=[5.0, 5.0 + TIMINGS.stray_s]) == []
    assert decide(group, at=[5.0, 5.1 + TIMINGS.stray_s]) == [Gather()]


def test_ranks_may_wait_while_another_is_replaced_or_the_group_leaves() -> None:
    for fields in ({"num_placed": 3}, {"recovery": LACKING}, {"is_leaving": True}):
        assert decide(standing_by(**fields), at=[5.0, 15.0]) == []
    assert decide(standing_by(), at=[5.0, 15.0], policy=FIXED) == []


def test_the_wait_of_strays_begins_anew_when_they_are_gathered_or_go_on() -> None:
    _, memory = ELASTIC.decide(standing_by(), GroupMemory(), 5.0)
    assert memory.stray_since == 5.0
    assert ELASTIC.decide(standing_by(), memory, 7.0)[1].stray_since is None
    assert ELASTIC.decide(stuck(0.1), memory, 7.0)[1].stray_since is None


def test_a_rank_that_did_not_notice_that_its_connection_broke_is_ended() -> None:
    def group(age_s: float) -> GroupObservation:
        newcomer = observation(1, RankPhase.JOINING, 10.0, round_number=1)
        return seen(observation(0, RankPhase.EXCHANGE, age_s), newcomer, recovery=ANNOUNCED)

    late = TIMINGS.cut_off_s
    assert decide(group(100.0), at=[0.0, late - 0.1]) == [], "it may not be cut off yet"
    assert decide(group(3.0), at=[late, 2 * late]) == [], "it may still be computing"
    assert culprits(decide(group(100.0), at=[late, late + TIMINGS.sure_s])) == [0]


# Drills.


def drill(name: str, at_step: int | None) -> Drill:
    return Drill(name, DrillKind.KILL, 0, at_step)


def test_faults_are_injected_at_their_step() -> None:
    waiting = (drill("now", None), drill("later", 11), drill("due", 10))
    done = [observation(0, step=9), observation(1, step=10)]
    injected = [Inject(waiting[0], 10), Inject(waiting[2], 10)]
    assert decide(seen(*done, drills=waiting), at=[0.0]) == injected
    assert decide(seen(*done, drills=waiting), at=[0.0], policy=SCRIPT) == injected


def test_no_fault_is_injected_into_a_group_that_recovers() -> None:
    assert decide(joining(ANNOUNCED, drills=[drill("now", None)]), at=[1.0]) == []
    again = seen(observation(0, round_number=1), recovery=ANNOUNCED, drills=[drill("now", None)])
    assert decide(again, at=[1.0]) == [Confirm(), Inject(drill("now", None), 10)]
