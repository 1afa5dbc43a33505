"""Which rank is to blame when a group ends."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from dray.ranks import role_names
from ray_workers.shared.contracts import STORAGE_EXIT_CODE, Cause, Frame, FrameKind, Outcome
from ray_workers.supervision.rules.failure_attribution import (
    RankExit,
    all_lost_a_peer,
    judge,
    with_role,
)


def error_of(rank: int, cause: Cause, message: str) -> dict[int, Frame]:
    body = {"cause": str(cause), "type": "E", "message": message, "traceback": ""}
    return {rank: Frame(rank, 0, FrameKind.ERROR, 0.0, body)}


def exits(*codes: int | None) -> list[RankExit]:
    return [RankExit.of(rank, code) for rank, code in enumerate(codes)]


def test_a_group_whose_ranks_all_end_well_succeeded() -> None:
    outcome = judge(exits(0, 0), {})
    assert (outcome.cause, outcome.rank, outcome.exit_code) == (Cause.SUCCEEDED, None, None)


def test_a_group_of_which_no_rank_has_ended_has_no_outcome() -> None:
    with pytest.raises(ValueError, match="no rank has ended"):
        judge([], {})


def test_the_rank_with_a_reason_of_its_own_is_named_before_those_that_lost_it() -> None:
    errors = (
        error_of(0, Cause.WORKER_LOST, "peer is gone")
        | error_of(1, Cause.USER_ERROR, "the sky is red")
        | error_of(2, Cause.WORKER_LOST, "peer is gone")
    )
    outcome = judge(exits(1, 1, 1), errors)
    assert (outcome.cause, outcome.rank) == (Cause.USER_ERROR, 1)
    assert outcome.message == "the sky is red"


def test_a_rank_that_died_without_an_error_is_named_before_those_that_lost_it() -> None:
    errors = error_of(0, Cause.WORKER_LOST, "peer is gone") | error_of(
        2, Cause.WORKER_LOST, "peer is gone"
    )
    outcome = judge(exits(1, -9, 1), errors)
    assert (outcome.cause, outcome.rank, outcome.exit_code) == (Cause.WORKER_LOST, 1, -9)
    assert outcome.message == "the process of rank 1 was killed by signal 9"


def test_a_kill_with_low_memory_names_what_to_do() -> None:
    outcome = judge([replace(RankExit.of(0, -9), memory_kills=2)], {})
    assert "killed 2 processes because of low memory)" in outcome.message


def test_of_reasons_at_unknown_times_one_with_an_error_is_named() -> None:
    outcome = judge(exits(3, 1), error_of(1, Cause.USER_ERROR, "the sky is red"))
    assert (outcome.rank, outcome.message) == (1, "the sky is red")


def failing(rank: int, at: float, *, reported_at: float | None = None) -> dict[int, Frame]:
    """A rank's own error, reported at `reported_at`."""
    body = {"cause": "user_error", "type": "E", "message": f"E of {rank}", "traceback": ""}
    frame_at = at if reported_at is None else reported_at
    return {rank: Frame(rank, 0, FrameKind.ERROR, frame_at, {**body, "raised_at": at})}


@pytest.mark.parametrize("first", [0, 1, 2])
def test_of_several_errors_the_one_that_was_raised_first_is_named(first: int) -> None:
    errors = {}
    for rank in range(3):
        # The traceback of the first takes so long that its report comes last.
        at, reported_at = (100.0, 160.0) if rank == first else (101.0 + rank, 102.0 + rank)
        errors |= failing(rank, at, reported_at=reported_at)
    outcome = judge(exits(1, 1, 1), errors, is_script=True)
    assert (outcome.rank, outcome.message) == (first, f"E of {first}")


def test_a_killed_rank_is_named_before_those_that_hide_its_loss_behind_errors_of_their_own() -> (
    None
):
    killed = replace(RankExit.of(1, -9), ended_at=100.1)
    echo = replace(RankExit.of(0, 1), ended_at=100.3)
    outcome = judge([echo, killed], failing(0, 100.0), is_script=True)
    assert (outcome.rank, outcome.exit_code, outcome.cause) == (1, -9, Cause.WORKER_LOST)
    killed = replace(killed, ended_at=109.0)
    assert judge([echo, killed], failing(0, 100.0), is_script=True).rank == 0


@pytest.mark.parametrize("claimed", [1e30, -5.0, float("nan"), "soon", None])
def test_no_rank_can_claim_another_time_than_a_past_one(claimed: object) -> None:
    errors = failing(0, 100.0) | failing(1, 99.0)
    errors[0].body["raised_at"] = claimed  # type: ignore[index]
    assert judge(exits(1, 1), errors).rank == 1


def test_a_rank_of_a_script_that_ends_well_before_the_others_is_why_they_fail() -> None:
    left = replace(RankExit.of(1, 0), ended_at=100.0)
    errors = error_of(0, Cause.WORKER_LOST, "Connection closed by peer")
    errors[0] = replace(errors[0], time=100.2)
    outcome = judge([RankExit.of(0, 1), left], errors, is_script=True)
    assert (outcome.cause, outcome.rank, outcome.exit_code) == (Cause.USER_ERROR, 1, 0)
    assert outcome.message == (
        "rank 1 exited with code 0 while other ranks were running, and rank 0 lost its connection: "
        "Connection closed by peer"
    )
    assert judge([RankExit.of(0, 1), left], errors).cause is Cause.WORKER_LOST, "of a recipe"
    later = replace(left, ended_at=107.0)
    assert judge([RankExit.of(0, 1), later], errors, is_script=True).rank == 0


def test_failures_are_secondary_only_if_all_ranks_lost_a_peer() -> None:
    echo = error_of(0, Cause.WORKER_LOST, "peer is gone")
    assert all_lost_a_peer(exits(1), echo)
    assert not all_lost_a_peer(exits(1, -9), echo)
    assert not all_lost_a_peer(exits(1, 1), echo | error_of(1, Cause.USER_ERROR, "the sky is red"))


def test_where_all_lost_someone_the_first_is_named() -> None:
    errors = error_of(0, Cause.WORKER_LOST, "peer 1") | error_of(1, Cause.WORKER_LOST, "peer 0")
    outcome = judge(exits(1, 1), errors)
    assert (outcome.cause, outcome.rank, outcome.message) == (Cause.WORKER_LOST, 0, "peer 1")


@pytest.mark.parametrize("code", [STORAGE_EXIT_CODE, -signal.SIGBUS])
def test_a_rank_that_could_not_report_its_error_is_not_the_users_error(code: int) -> None:
    outcome = judge(exits(0, code), {})
    assert (outcome.cause, outcome.rank) == (Cause.INFRASTRUCTURE, 1)


def test_bad_data_stays_bad_data() -> None:
    outcome = judge(exits(1, 1), error_of(1, Cause.BAD_DATA, "a sample is torn"))
    assert (outcome.cause, outcome.rank) == (Cause.BAD_DATA, 1)


def test_a_vanished_worker_explains_whatever_else_failed() -> None:
    outcome = judge(exits(1, None), error_of(0, Cause.USER_ERROR, "a broken pipe"))
    assert (outcome.cause, outcome.rank, outcome.exit_code) == (Cause.WORKER_LOST, 1, None)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (3, Cause.USER_ERROR),
        (-9, Cause.WORKER_LOST),
        (-15, Cause.WORKER_LOST),
        (-1, Cause.WORKER_LOST),
        (-11, Cause.USER_ERROR),
        (-6, Cause.USER_ERROR),
    ],
)
def test_signals_from_outside_are_the_infrastructures_and_crashes_the_users(
    code: int, cause: Cause
) -> None:
    outcome = judge(exits(0, code), {})
    assert (outcome.cause, outcome.rank, outcome.exit_code) == (cause, 1, code)
    assert str(abs(code)) in outcome.message


def test_a_rank_that_nccls_watchdog_aborts_lost_its_peers() -> None:
    outcome = judge(exits(-6, -6), {}, under_nccl=True)
    assert (outcome.cause, outcome.rank) == (Cause.WORKER_LOST, 0)
    assert "NCCL's watchdog" in outcome.message
    assert judge(exits(-6, -11), {}, under_nccl=True).rank == 1
    assert judge(exits(-6, 3), {}, under_nccl=True).cause is Cause.USER_ERROR
    errors = error_of(1, Cause.USER_ERROR, "device-side assert triggered")
    outcome = judge(exits(-6, -6), errors, under_nccl=True)
    assert (outcome.cause, outcome.rank) == (Cause.USER_ERROR, 1)
    assert judge(exits(-11), {}, under_nccl=True).cause is Cause.USER_ERROR


def test_the_end_of_a_nodes_forkserver_is_nobodys() -> None:
    lost = replace(RankExit.of(1, None), lost_forkserver=True)
    outcome = judge([RankExit.of(0, 1), lost], error_of(0, Cause.WORKER_LOST, "peer is gone"))
    assert (outcome.cause, outcome.rank) == (Cause.NODE_LOST, 1)
    assert "forkserver" in outcome.message
    assert judge([RankExit.of(0, None)], {}).cause is Cause.WORKER_LOST


def test_the_end_of_an_attempt_names_the_role_of_the_rank_at_fault() -> None:
    roles = {"chief": {}, "worker": {"num_workers": 2}, "ps": {}}
    names = role_names({"script": {"roles": roles}})
    lost = Outcome.of(Cause.WORKER_LOST, "rank 3 vanished", rank=3)
    assert with_role(lost, names).message == "rank 3 vanished (rank 3 is ps 0)"
    assert with_role(lost, role_names({"script": {}})) == lost
    stopped = Outcome.of(Cause.STOPPED, "stopped as requested")
    assert with_role(stopped, names) == stopped
