"""Which losses recover in place, and which are not."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from dray.spec import JobSpec
from ray_workers.shared.contracts import Cause, Frame, FrameKind
from ray_workers.shared.heartbeat import RankObservation, RankPhase, RankStatus, TimeCategory
from ray_workers.supervision import recovery_rules
from ray_workers.supervision.failure_attribution import RankExit
from ray_workers.supervision.recovery_rules import MOST_WITHOUT_A_STEP

RECIPE: dict[str, Any] = {"recipe": "image_classification"}
SCRIPT: dict[str, Any] = {"script": {"entrypoint": "train.py"}}


def error(rank: int, cause: Cause) -> Frame:
    return Frame(rank, 0, FrameKind.ERROR, 0.0, {"cause": cause, "message": "m"})


def refused(
    *lost: RankExit, errors: dict[int, Frame] | None = None, survivors: int = 1, mended: int = 0
) -> str | None:
    return recovery_rules.refused(lost, errors or {}, num_holders=survivors, without_a_step=mended)


def why_never(changes: dict[str, Any], *, workers: int = 2, gpus: bool = False) -> str | None:
    document = JobSpec.model_validate({"resources": {"num_workers": 2}} | changes)
    return recovery_rules.why_never(document, num_workers=workers, has_gpus=gpus)


def test_a_group_that_holds_one_state_together_is_mended() -> None:
    assert why_never(RECIPE) is None


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        (SCRIPT, {}, "only it knows its state"),
        (SCRIPT, {"workers": 1}, "only it knows its state"),
        (RECIPE, {"workers": 1}, "nobody else holds its state"),
        (RECIPE, {"gpus": True}, "half a step on"),
        (RECIPE | {"parallel": {"shard": 2}}, {}, "each has parts that nobody else has"),
        (RECIPE | {"sync": {"every": 4}}, {}, "each has its own state"),
    ],
)
def test_each_kind_that_is_never_mended_is_told_why(
    changes: dict[str, Any], kind: dict[str, Any], said: str
) -> None:
    why = why_never(changes, **kind)
    assert why is not None
    assert said in why


@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGTERM, None])
def test_a_rank_that_was_killed_or_vanished_is_replaced(code: int | None) -> None:
    assert refused(RankExit(1, code)) is None


def test_a_rank_that_lost_the_others_is_replaced() -> None:
    assert refused(RankExit(1, 1), errors={1: error(1, Cause.WORKER_LOST)}) is None


def test_an_error_of_ones_own_would_come_again() -> None:
    reason = refused(RankExit(1, 1), errors={1: error(1, Cause.USER_ERROR)})
    assert reason == "rank 1 ended by an error of its own"
    assert refused(RankExit(1, 3)) == "rank 1 exited with code 3"
    both = [RankExit(0, -signal.SIGKILL), RankExit(1, 1)]
    assert refused(*both, errors={1: error(1, Cause.BAD_DATA)}) is not None


def test_without_a_survivor_there_is_no_state_left() -> None:
    reason = refused(RankExit(0, -9), RankExit(1, -9), survivors=0)
    assert reason == "nobody is left who holds the state"


def observation(seat: int, incarnation: int, step: int) -> RankObservation:
    page = RankStatus(
        step=step,
        phase=RankPhase.STAND_BY,
        collective=0,
        since=0.0,
        generation=incarnation,
        resumed_step=0,
        first_at=0.0,
        pid=1,
        use=TimeCategory.RECOVERING,
        uses={},
    )
    return RankObservation(seat, incarnation, page, 0.0, "S")


def test_a_replacement_holds_no_state_until_it_is_in_the_group() -> None:
    dead, survivor, replacement = observation(1, 0, 40), observation(0, 0, 41), observation(1, 1, 0)
    observations = [dead, survivor, replacement]
    assert holders(observations, {(0, 0), (1, 1)}) == 1
    assert holders(observations, {(1, 1)}) == 0, "it would begin anew, without step 41"
    assert holders([dead, survivor, observation(1, 1, 41)], {(1, 1)}) == 1


def test_what_a_lost_node_had_done_is_not_forgotten() -> None:
    assert holders([observation(1, 1, 0)], {(1, 1)}, furthest_step=41) == 0


def test_before_the_first_step_nobody_has_a_state_to_lose() -> None:
    assert holders([observation(0, 0, 0), observation(1, 0, 0)], {(1, 0)}) == 1
    assert holders([], {(1, 0)}) == 1


def holders(
    observations: list[RankObservation], running: set[tuple[int, int]], furthest_step: int = 0
) -> int:
    return recovery_rules.num_holders(observations, running, furthest_step=furthest_step)


def test_a_group_that_breaks_before_every_step_is_not_mended_for_ever() -> None:
    assert refused(RankExit(0, -9), mended=MOST_WITHOUT_A_STEP - 1) is None
    reason = refused(RankExit(0, -9), mended=MOST_WITHOUT_A_STEP)
    assert reason is not None
    assert "without a step in between" in reason


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "the worker of rank 3 vanished"),
        (1, "rank 3 lost the others"),
        (-9, "rank 3 was killed by SIGKILL"),
        (-11, "rank 3 was killed by SIGSEGV"),
        (-99, "rank 3 was killed by signal 99"),
    ],
)
def test_how_it_ended_is_said_in_a_few_words(code: int | None, words: str) -> None:
    assert recovery_rules.how(RankExit(3, code)) == words


def test_where_memory_was_short_a_kill_says_so() -> None:
    said = recovery_rules.how(RankExit(3, -9, memory_kills=1))
    assert said.startswith(
        "rank 3 was killed by SIGKILL (meanwhile the kernel of its node ended 1 "
    )
    assert recovery_rules.how(RankExit(3, -11, memory_kills=1)) == "rank 3 was killed by SIGSEGV"
