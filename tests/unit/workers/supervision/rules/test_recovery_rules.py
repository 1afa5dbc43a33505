"""Which losses recover in place, and which do not."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from ray_workers.shared.contracts import Cause, Frame, FrameKind
from ray_workers.shared.heartbeat import RankObservation
from ray_workers.shared.slices import Slice
from ray_workers.shared.supervisor_frames import LossKind
from ray_workers.supervision.rules import recovery_rules
from ray_workers.supervision.rules.failure_attribution import RankExit
from ray_workers.supervision.rules.recovery_rules import (
    MOST_WITHOUT_A_STEP,
    RecoveryState,
    Regrouping,
)
from ray_workers.training.core.device_faults import DeviceLostError
from ray_workers.training.core.errors import CopiesDifferError, KeeperLostError, PartsLostError
from ray_workers.training.scripts.prepared_script import BatchLostError, ScriptDiffersError
from tests.unit.workers.supervision.observed import observation
from tests.wire import traits

RECIPE: dict[str, Any] = {"recipe": "image_classification"}


def error(rank: int, cause: Cause, *, type_: str = "E") -> Frame:
    body = {"cause": cause, "type": type_, "message": "m"}
    return Frame(rank, 0, FrameKind.ERROR, 0.0, body)


def refused(
    *lost: RankExit,
    errors: dict[int, Frame] | None = None,
    survivors: int = 1,
    without_a_step: int = 0,
) -> str | None:
    return recovery_rules.refused(
        lost, errors or {}, num_holders=survivors, without_a_step=without_a_step
    )


def test_a_script_is_prepared_once_a_running_process_of_it_shows_that() -> None:
    seen = [observation(0, is_prepared=True), observation(1)]
    assert recovery_rules.are_prepared(seen, {(0, 0), (1, 0)})
    assert not recovery_rules.are_prepared(seen, {(1, 0)})
    assert not recovery_rules.are_prepared([], {(0, 0)})


@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGTERM, None])
def test_a_rank_that_was_killed_or_vanished_is_replaced(code: int | None) -> None:
    assert refused(RankExit.of(1, code)) is None


def test_a_rank_that_lost_the_others_is_replaced() -> None:
    assert refused(RankExit.of(1, 1), errors={1: error(1, Cause.WORKER_LOST)}) is None


def test_a_group_whose_state_is_lost_is_not_recovered_while_its_other_ranks_are_ending() -> None:
    kinds = {PartsLostError}
    while more := {each for kind in kinds for each in kind.__subclasses__()} - kinds:
        kinds |= more
    assert {BatchLostError, ScriptDiffersError, CopiesDifferError, KeeperLostError} < kinds
    for kind in kinds:
        lost = error(1, Cause.WORKER_LOST, type_=kind.__qualname__)
        reason = refused(RankExit.of(1, 1), errors={1: lost})
        assert (
            reason
            == "rank 1 reported that training can't continue from the state that the ranks hold"
        )


def test_an_error_of_ones_own_would_come_again() -> None:
    reason = refused(RankExit.of(1, 1), errors={1: error(1, Cause.USER_ERROR)})
    assert reason == "rank 1 raised an error that was not caused by a lost worker"
    assert refused(RankExit.of(1, 3)) == "rank 1 exited with code 3"
    both = [RankExit.of(0, -signal.SIGKILL), RankExit.of(1, 1)]
    assert refused(*both, errors={1: error(1, Cause.BAD_DATA)}) is not None


def test_a_server_that_is_lost_takes_its_part_of_the_weights_along() -> None:
    killed = [RankExit.of(1, -signal.SIGKILL), RankExit.of(3, -signal.SIGKILL)]
    limits: dict[str, Any] = {"num_holders": 2, "without_a_step": 0, "servers": {2, 3}}
    assert recovery_rules.refused(killed[:1], {}, **limits) is None
    reason = recovery_rules.refused(killed, {}, **limits)
    assert reason == "rank 3 is a parameter server, and no other rank holds its part of the state"


def test_a_server_with_a_replica_is_replaced_unless_the_replica_is_lost_too() -> None:
    sync = {"kind": "parameter_server", "servers": 3, "shards_kept_by": "replica"}
    replicas = traits({**RECIPE, "resources": {"num_workers": 6}, "sync": sync}).replicas
    assert replicas == {3: 4, 4: 5, 5: 3}
    limits: dict[str, Any] = {"num_holders": 2, "without_a_step": 0, "servers": {3, 4, 5}}
    limits |= {"replicas": replicas}
    first, second = RankExit.of(5, -signal.SIGKILL), RankExit.of(3, -signal.SIGKILL)
    worker = RankExit.of(0, -signal.SIGKILL)
    assert recovery_rules.refused([first, worker], {}, **limits) is None
    reason = "rank 5 is a parameter server, and rank 3, which holds its replica, was also lost"
    assert recovery_rules.refused([first, second], {}, **limits) == reason
    assert recovery_rules.refused([second], {}, **limits, recovering=[5]) == reason
    assert recovery_rules.refused([second], {}, **limits, recovering=[0]) is None


def test_without_a_survivor_there_is_no_state_left() -> None:
    reason = refused(RankExit.of(0, -9), RankExit.of(1, -9), survivors=0)
    assert reason == "no running rank holds the training state"


def process(index: int, incarnation: int, step: int) -> RankObservation:
    return observation(index, incarnation=incarnation, step=step)


def test_a_replacement_holds_no_state_until_it_is_in_the_group() -> None:
    dead, survivor, replacement = process(1, 0, 40), process(0, 0, 41), process(1, 1, 0)
    observations = [dead, survivor, replacement]
    assert holders(observations, {(0, 0), (1, 1)}) == 1
    assert holders(observations, {(1, 1)}) == 0, "it would begin anew, without step 41"
    assert holders([dead, survivor, process(1, 1, 41)], {(1, 1)}) == 1


def test_what_a_lost_node_had_done_is_not_forgotten() -> None:
    assert holders([process(1, 1, 0)], {(1, 1)}, furthest_step=41) == 0


def test_before_the_first_step_no_rank_has_a_state_to_lose() -> None:
    assert holders([process(0, 0, 0), process(1, 0, 0)], {(1, 0)}) == 1
    assert holders([], {(1, 0)}) == 1


def holders(
    observations: list[RankObservation], running: set[tuple[int, int]], furthest_step: int = 0
) -> int:
    return recovery_rules.num_holders(observations, running, furthest_step=furthest_step)


def test_a_group_that_breaks_before_every_step_does_not_recover_for_ever() -> None:
    assert refused(RankExit.of(0, -9), without_a_step=MOST_WITHOUT_A_STEP - 1) is None
    reason = refused(RankExit.of(0, -9), without_a_step=MOST_WITHOUT_A_STEP)
    assert reason is not None
    assert "without completing a step" in reason


def test_ranks_that_are_lost_on_the_way_are_recovered_with_those_before() -> None:
    first = RecoveryState(announced_at=3.0).begin([2], began_at=100.0, furthest_step=41)
    assert (first.round, first.announced_at) == (1, None)
    assert first.regrouping == Regrouping((2,), 100.0, 41)
    again = first.begin([1], began_at=120.0, furthest_step=7)
    assert (again.round, again.regrouping) == (2, Regrouping((1, 2), 100.0, 41))


def test_the_wait_for_slots_begins_when_the_first_worker_is_lacking() -> None:
    lacks = RecoveryState().lack(1, now=5.0).lack(2, now=9.0)
    assert (lacks.num_lacking, lacks.lacking_since) == (2, 5.0)
    assert lacks.lack(0, now=10.0) == RecoveryState()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "the worker of rank 3 vanished"),
        (1, "rank 3 lost its connections"),
        (-9, "rank 3 was killed by SIGKILL"),
        (-11, "rank 3 was killed by SIGSEGV"),
        (-99, "rank 3 was killed by signal 99"),
    ],
)
def test_the_end_of_a_rank_is_described(code: int | None, words: str) -> None:
    assert recovery_rules.how(RankExit.of(3, code)) == words
    named = words.replace("rank 3", "rank 3 (ps 0)")
    assert recovery_rules.how(RankExit.of(3, code), ["", "", "", "ps 0"]) == named


def test_a_rank_that_can_not_use_its_gpu_is_replaced_and_the_report_states_why() -> None:
    lost = DeviceLostError(RuntimeError("CUDA error: unspecified launch failure\nmore"))
    frame = error(1, Cause.WORKER_LOST, type_=type(lost).__name__)
    frame.body["message"] = str(lost)
    end, errors = RankExit.of(1, 1), {1: frame}
    assert refused(end, errors=errors) is None
    report = recovery_rules.loss_report([end], LossKind.KILLED, 1, traits({}), "", errors)
    assert report.message == (
        "rank 1 exited: a process can't use its GPU after this error: CUDA error: unspecified "
        "launch failure; the other ranks keep their state"
    )


def test_a_kill_with_low_memory_is_described() -> None:
    text = recovery_rules.how(replace(RankExit.of(3, -9), memory_kills=1))
    assert text.startswith(
        "rank 3 was killed by SIGKILL (while it ran, the kernel of its node killed 1 "
    )
    assert (
        recovery_rules.how(replace(RankExit.of(3, -11), memory_kills=1))
        == "rank 3 was killed by SIGSEGV"
    )


def test_slices_go_as_a_whole_and_the_least_size_stays() -> None:
    held = [Slice("a", 2), Slice("b", 1), Slice("a", 1), Slice("b", 1)]
    assert recovery_rules.recalled(held, [Slice("b", 1)], 1) == [3]
    assert recovery_rules.recalled(held, [Slice("b", 1), Slice("b", 1)], 1) == [3, 1]
    assert recovery_rules.recalled(held, [Slice("a", 2), Slice("a", 1)], 3) == [2]
    assert recovery_rules.recalled(held, [Slice("b", 2), Slice("c", 1)], 1) == []
