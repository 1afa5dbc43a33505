"""Rules that need no database: states, retries, lineage, series, cursors, and documents."""

from __future__ import annotations

import base64
import math
import random
import zlib
from datetime import UTC, datetime, timedelta
from itertools import product

import pytest

from dray.views import JobState
from ray_workers.shared.contracts import Cause
from service.domain import cursors, documents, ids, states
from service.domain.attempts.lineage import NO_END, last_steps
from service.domain.attempts.retries import Budgets, GiveUp, Retry, RetryBudget, decide
from service.domain.cursors import decode_cursor, encode_cursor
from service.domain.errors import BadCursor
from service.domain.series import downsample, pack, summarise, unpack
from service.domain.states import TRANSITIONS, IllegalTransition, Trigger, transition

BUDGETS = Budgets(max_user_retries=2, max_infra_retries=3)


@pytest.mark.parametrize(("state", "trigger"), list(product(JobState, Trigger)))
def test_every_pair_is_a_move_of_the_table_or_refused(state: JobState, trigger: Trigger) -> None:
    rule = TRANSITIONS.get((state, trigger))
    if rule is None:
        with pytest.raises(IllegalTransition):
            transition(state, trigger)
        return
    assert transition(state, trigger) == rule.to
    assert rule.codes
    for code in rule.codes:
        assert transition(state, trigger, code) == rule.to
    with pytest.raises(IllegalTransition, match="a reason of another move"):
        transition(state, trigger, "a reason of another move")


def test_terminal_states_absorb() -> None:
    assert not [state for state, _ in TRANSITIONS if state.is_terminal]


def test_every_state_is_reached_and_every_live_one_can_end() -> None:
    reached = {JobState.QUEUED} | {rule.to for rule in TRANSITIONS.values()}
    assert reached == set(JobState)
    ends = {state for state in JobState if state.is_terminal}
    while True:
        more = {state for (state, _), rule in TRANSITIONS.items() if rule.to in ends} - ends
        if not more:
            break
        ends |= more
    assert ends == set(JobState)


@pytest.mark.parametrize("state", [s for s in JobState if not s.is_terminal])
def test_every_live_state_can_be_cancelled_or_is_being(state: JobState) -> None:
    if state is not JobState.CANCELLING:
        assert transition(state, Trigger.CANCEL) in (JobState.CANCELLING, JobState.CANCELLED)


FAULTS = [cause for cause in Cause if cause not in (Cause.SUCCEEDED, Cause.STOPPED)]


@pytest.mark.parametrize("cause", [Cause.SUCCEEDED, Cause.STOPPED])
def test_an_attempt_without_a_fault_has_no_successor(cause: Cause) -> None:
    with pytest.raises(ValueError, match="is not retried"):
        decide(cause, BUDGETS)


def test_every_cause_of_an_attempts_end_has_a_rule() -> None:
    for fault in FAULTS:
        decision = decide(fault, BUDGETS)
        codes = states.RETRY_CODES if isinstance(decision, Retry) else states.GIVE_UP_CODES
        assert (fault if isinstance(decision, Retry) else decision.code) in codes


@pytest.mark.parametrize("fault", [Cause.BAD_DATA, Cause.CANNOT_RUN, Cause.RUNTIME_EXCEEDED])
def test_what_another_attempt_would_not_mend_is_not_tried_again(fault: Cause) -> None:
    assert isinstance(decide(fault, BUDGETS), GiveUp)


@pytest.mark.parametrize(
    ("fault", "budget", "retries"),
    [
        (Cause.USER_ERROR, RetryBudget.USER, 2),
        (Cause.WORKER_LOST, RetryBudget.INFRA, 3),
        (Cause.DATA_UNREACHABLE, RetryBudget.INFRA, 3),
        (Cause.SUPERVISOR_LOST, RetryBudget.INFRA, 3),
        (Cause.INFRASTRUCTURE, RetryBudget.INFRA, 3),
    ],
)
def test_a_budget_allows_exactly_its_number_of_retries(
    fault: Cause, budget: RetryBudget, retries: int
) -> None:
    for failures in range(retries + 1):
        spent = Budgets(2, 3, user_failures=failures, infra_failures=failures)
        decision = decide(fault, spent)
        assert decision.budget is budget
        assert isinstance(decision, Retry) == (failures < retries)


def test_one_budget_does_not_pay_for_the_other() -> None:
    assert isinstance(decide(Cause.USER_ERROR, Budgets(1, 0, infra_failures=9)), Retry)
    assert isinstance(decide(Cause.WORKER_LOST, Budgets(0, 1, user_failures=9)), Retry)


@pytest.mark.parametrize("fault", [Cause.SLOTS_UNAVAILABLE, Cause.NODE_LOST, Cause.PREEMPTED])
def test_what_nobody_is_to_blame_for_is_free_and_never_gives_up(fault: Cause) -> None:
    for before in (0, 1, 5, 10**6):
        decision = decide(fault, Budgets(0, 0, free_requeues=before))
        assert isinstance(decision, Retry)
        assert decision.budget is RetryBudget.FREE
        assert 0 < decision.delay_s <= 15


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_drill_broke_is_free_and_what_it_did_not_is_charged_as_ever(fault: Cause) -> None:
    decision = decide(fault, Budgets(0, 0), by_drill=True)
    if fault in (Cause.USER_ERROR, Cause.WORKER_LOST, Cause.CORRUPTED):
        assert isinstance(decision, Retry)
        assert decision.budget is RetryBudget.FREE
    else:
        assert decision == decide(fault, Budgets(0, 0))


@pytest.mark.parametrize("fault", FAULTS)
def test_what_an_overloaded_machine_broke_is_free_and_tried_ever_later(fault: Cause) -> None:
    delays = []
    for before in (0, 1, 2, 10**6):
        decision = decide(fault, Budgets(0, 0, free_requeues=before), by_overload=True)
        if fault not in (Cause.WORKER_LOST, Cause.INFRASTRUCTURE, Cause.SUPERVISOR_LOST):
            assert decision == decide(fault, Budgets(0, 0, free_requeues=before))
            return
        assert isinstance(decision, Retry)
        assert decision.budget is RetryBudget.FREE
        delays.append(decision.delay_s)
    assert delays == [2, 4, 8, 60]


def test_delays_double_up_to_a_minute() -> None:
    delays = [
        decision.delay_s
        for failures in range(9)
        if isinstance(decision := decide(Cause.WORKER_LOST, Budgets(0, 99, 0, failures)), Retry)
    ]
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_without_running_time_left_nothing_is_tried_again() -> None:
    decision = decide(Cause.NODE_LOST, Budgets(9, 9, runtime_left_s=0.0))
    assert isinstance(decision, GiveUp)
    assert decision.code == Cause.RUNTIME_EXCEEDED


@pytest.mark.parametrize(
    ("starts", "ends"),
    [
        ({1: 0}, {1: NO_END}),
        ({1: 0, 2: 50}, {1: 50, 2: NO_END}),
        ({1: 0, 2: 50, 3: 30}, {1: 30, 2: 30, 3: NO_END}),
        ({1: 0, 2: None, 3: 70}, {1: 70, 2: 70, 3: NO_END}),
        ({1: 0, 2: None}, {1: NO_END, 2: NO_END}),
    ],
)
def test_an_attempt_counts_up_to_where_a_later_one_began(
    starts: dict[int, int | None], ends: dict[int, int]
) -> None:
    assert last_steps(starts) == ends


def test_packed_points_come_back_exactly() -> None:
    steps = [0, 1, 5, 2**53]
    values = [-0.0, 5e-324, math.inf, 0.1]
    assert unpack(pack(steps, values)) == (steps, values)
    (nan,) = unpack(pack([1], [math.nan]))[1]
    assert math.isnan(nan)
    assert math.copysign(1, unpack(pack([1], [-0.0]))[1][0]) == -1


def test_a_summary_keeps_extremes_and_the_first_nan() -> None:
    summary = summarise([1, 2, 3, 4, 5], [1.0, math.nan, 9.0, -math.inf, math.nan])
    assert (summary.low, summary.high) == ((4, -math.inf), (3, 9.0))
    assert summary.nan_step == 2
    assert [step for step, _ in summary.points()] == [1, 2, 3, 4, 5]
    lone = summarise([7], [math.nan])
    assert (lone.low, lone.high) == (None, None)
    assert [step for step, _ in lone.points()] == [7]


@pytest.mark.parametrize("max_points", [1, 2, 3, 4, 7, 100, 999])
@pytest.mark.parametrize("with_nan", [False, True])
def test_downsampling_keeps_to_its_limit_the_ends_and_the_order(
    max_points: int, with_nan: bool
) -> None:
    chance = random.Random(max_points)
    values = [chance.random() for _ in range(1000)]
    if with_nan:
        values[500] = math.nan
    steps = [3 * i for i in range(1000)]
    kept, theirs = downsample(steps, values, max_points)
    assert len(kept) <= max_points
    assert kept == sorted(set(kept))
    assert kept[-1] == steps[-1]
    assert max_points == 1 or kept[0] == steps[0]
    by_step = dict(zip(steps, values, strict=True))
    assert all(by_step[k] == v or (v != v and with_nan) for k, v in zip(kept, theirs, strict=True))


def test_downsampling_keeps_every_spike() -> None:
    values = [0.0] * 10_000
    values[1234], values[7777], values[4321] = 1e9, -1e9, math.nan
    _, kept = downsample(list(range(10_000)), values, 50)
    assert {1e9, -1e9} <= set(kept)
    assert any(math.isnan(value) for value in kept)


def test_few_points_are_left_as_they_are() -> None:
    assert downsample([1, 2], [3.0, 4.0], 2) == ([1, 2], [3.0, 4.0])
    assert downsample([], [], 5) == ([], [])


def test_a_cursor_returns_its_position_in_its_own_listing_only() -> None:
    cursor = encode_cursor("here", [[1, 2, 3]])
    assert decode_cursor("here", cursor) == [[1, 2, 3]]
    with pytest.raises(BadCursor):
        decode_cursor("there", cursor)


def test_a_cursor_that_unpacks_without_end_is_refused() -> None:
    bomb = encode_cursor("here", "0" * (4 << 20))
    assert len(bomb) < 64 * 1024
    with pytest.raises(BadCursor):
        decode_cursor("here", bomb)


def test_a_cursor_nested_without_end_is_refused() -> None:
    packed = zlib.compress(b"[" * 500_000)
    cursor = base64.urlsafe_b64encode(cursors._check("here", packed) + packed).decode().rstrip("=")
    with pytest.raises(BadCursor):
        decode_cursor("here", cursor)


def test_documents_are_brought_up_one_version_at_a_time() -> None:
    upcasts = {1: lambda d: {**d, "b": d["a"] + 1}, 2: lambda d: {**d, "c": d["b"] + 1}}
    stored = {"version": 1, "a": 1}
    read = documents.upcast(stored, upcasts=upcasts, target=3)
    assert read == {"version": 3, "a": 1, "b": 2, "c": 3}
    assert stored == {"version": 1, "a": 1}


def test_a_document_of_a_newer_program_is_refused() -> None:
    with pytest.raises(ValueError, match="use a newer release"):
        documents.upcast({"version": 99})


def test_ids_are_of_one_length_and_differ() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    made = [ids.new_job_id(now) for _ in range(100)]
    assert len(set(made)) == 100
    assert {len(job_id) for job_id in made} == {30}
    assert all(job_id < ids.new_job_id(now + timedelta(seconds=1)) for job_id in made)
