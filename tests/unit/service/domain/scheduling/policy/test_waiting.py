"""Jobs that can't use slots because they wait for other jobs, or because their array is full."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dray.spec.ordering import Condition
from dray.views import JobState
from service.domain.scheduling.policy import (
    Decision,
    Request,
    Snapshot,
    Start,
    Wait,
    WaitingJob,
    plan,
)
from service.domain.scheduling.policy.round import Round
from service.domain.scheduling.rules.dependencies import ArrayLimit, Dependency, Prospect, prospect
from tests.unit.service.domain.scheduling.policy.test_policy import NOW, job, node, started

FIRST = Dependency("job-1", on="success", is_now="RUNNING")


def decide(
    *jobs: WaitingJob, cpus: float = 8.0, running: int = 0, connected: bool = True
) -> list[Decision]:
    nodes = (node("n", CPU=cpus),)
    running_of_arrays = {"array-1": running} if running else {}
    return plan(Snapshot(jobs, nodes, connected, running_of_arrays=running_of_arrays), NOW)


def of_array(name: str, max_running: int, seq: int, array_id: str = "array-1") -> WaitingJob:
    return replace(job(name, seq=seq), array=ArrayLimit(array_id, max_running))


def test_a_job_that_waits_for_others_takes_and_reserves_nothing() -> None:
    waiting = replace(job("a", 8, seq=1), after=(FIRST,))
    decisions = decide(waiting, job("b", 8, seq=2))
    assert started(decisions) == ["b"]
    (wait, _) = decisions
    assert isinstance(wait, Wait)
    assert (wait.reason.code, wait.blocked_by) == ("waiting_for_jobs", ("job-1",))
    assert wait.reason.message == "waits for the success of job-1 (RUNNING)"


def test_a_job_that_waits_for_others_is_not_yet_found_impossible() -> None:
    (wait,) = decide(replace(job("a", 9), after=(FIRST,)))
    assert isinstance(wait, Wait)


def test_a_job_that_waits_for_others_says_so_though_there_is_no_cluster() -> None:
    waiting = replace(job("a", seq=1), after=(FIRST,))
    first, second = decide(waiting, job("b", seq=2), connected=False)
    assert isinstance(first, Wait)
    assert isinstance(second, Wait)
    assert (first.reason.code, first.position) == ("waiting_for_jobs", 1)
    assert (second.reason.code, second.position) == ("cluster_unavailable", 2)


def test_an_array_starts_as_many_jobs_as_it_may_run() -> None:
    jobs = [of_array(name, 3, seq) for seq, name in enumerate("abcde")]
    decisions = decide(*jobs, job("other", seq=9), running=1)
    assert started(decisions) == ["a", "b", "other"]
    for decision in decisions[2:5]:
        assert isinstance(decision, Wait)
        assert decision.reason.code == "array_limit"
        assert decision.reason.message == "3 jobs of array-1 run; at most 3 can run at once"
        assert decision.blocked_by == ()


def test_the_limit_of_an_array_counts_no_other_jobs() -> None:
    jobs = [of_array("a", 1, 1), of_array("b", 1, 2, "array-2"), job("c", seq=3)]
    assert started(decide(*jobs)) == ["a", "b", "c"]
    assert started(decide(*jobs, running=1)) == ["b", "c"]


def test_a_job_of_a_full_array_reserves_nothing() -> None:
    large = replace(of_array("a", 1, 1), request=job("a", 8).request)
    assert started(decide(large, job("b", 8, seq=2), running=1)) == ["b"]


def test_a_job_that_can_not_start_uses_up_nothing_of_the_limit() -> None:
    large = replace(of_array("a", 1, 1), request=job("a", CPU=8.0).request)
    nodes = (node("n", 4.0, CPU=8.0), node("m", CPU=2.0))
    decisions = plan(Snapshot((large, of_array("b", 1, 2)), nodes, True), NOW)
    assert not isinstance(decisions[0], Start)
    assert started(decisions) == ["b"]


Q, R, S, F, C = (
    JobState.QUEUED,
    JobState.RUNNING,
    JobState.SUCCEEDED,
    JobState.FAILED,
    JobState.CANCELLED,
)


@pytest.mark.parametrize(
    ("states", "on", "then"),
    [
        ({Q}, "success", Prospect.OPEN),
        ({JobState.CANCELLING}, "success", Prospect.OPEN),
        ({S}, "success", Prospect.SATISFIED),
        ({F}, "success", Prospect.NEVER),
        ({C}, "success", Prospect.NEVER),
        ({C}, "end", Prospect.SATISFIED),
        ({S, R}, "success", Prospect.OPEN),
        ({F, R}, "success", Prospect.NEVER),
        ({F, R}, "end", Prospect.OPEN),
        ({F, S}, "end", Prospect.SATISFIED),
        ({F}, "failure", Prospect.SATISFIED),
        ({C}, "failure", Prospect.SATISFIED),
        ({S}, "failure", Prospect.NEVER),
        ({S, R}, "failure", Prospect.OPEN),
        ({F, R}, "failure", Prospect.OPEN),
        ({F, S}, "failure", Prospect.SATISFIED),
    ],
)
def test_how_a_dependency_stands(states: set[JobState], on: Condition, then: Prospect) -> None:
    assert prospect(states, on) is then


def test_a_job_that_can_not_be_planned_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = Round.decide

    def fail_for_b(self: Round, job: WaitingJob, *given: Any) -> Decision:
        if job.job_id == "b":
            raise AssertionError("on purpose")
        return decided(self, job, *given)

    monkeypatch.setattr(Round, "decide", fail_for_b)
    failed: list[tuple[str, str]] = []
    decisions = plan(
        Snapshot((job("a"), job("b", seq=2), job("c", seq=3)), (node("n", CPU=8.0),), True),
        NOW,
        on_error=lambda job_id, error: failed.append((job_id, str(error))),
    )
    assert started(decisions) == ["a", "c"]
    assert failed == [("b", "on purpose")]
    (waits,) = [one for one in decisions if isinstance(one, Wait)]
    assert waits.reason.code == "not_planned"
    assert waits.reason.message == (
        "can't be planned because of an internal error (AssertionError); see the service's log. "
        "Planning is retried in each scheduling round"
    )


class Broken(Request):
    @property
    def least(self) -> int:
        raise ArithmeticError("on purpose")


def test_a_request_that_raises_an_error_stops_no_other() -> None:
    broken = replace(job("b", seq=2), request=Broken(1, {"CPU": 2.0}))
    jobs = (job("a"), broken, job("c", seq=3))
    decisions = plan(Snapshot(jobs, (node("n", CPU=8.0),), True), NOW)
    assert started(decisions) == ["a", "c"]
    (waits,) = [one for one in decisions if isinstance(one, Wait)]
    assert (waits.reason.code, waits.position) == ("not_planned", None)


def test_a_job_waits_for_an_agent_that_starts_and_not_for_a_refused_node() -> None:
    there = node("n", CPU=8.0)
    for nodes, message in (
        ([replace(there, accepted=False, is_starting=True)], "dray's agent is starting on 1 node"),
        ([replace(there, accepted=False)], "dray refuses every node of the cluster"),
        ([], "the cluster has no nodes"),
    ):
        (wait,) = plan(Snapshot((job("a"),), tuple(nodes), True), NOW)
        assert isinstance(wait, Wait)
        assert (wait.reason.code, wait.reason.message) == (
            "no_nodes",
            f"waits for a node: {message}",
        )
