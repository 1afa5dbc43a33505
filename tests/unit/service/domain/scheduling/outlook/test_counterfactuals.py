"""Counterfactuals: the policy's results for a job with one change."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from service.domain.scheduling import policy
from service.domain.scheduling.outlook.counterfactuals import (
    GIB,
    Change,
    Choices,
    Counterfactual,
    JobQuestions,
    OtherQueue,
    refuses_all,
    sooner,
)
from service.domain.scheduling.outlook.simulation import RESOLUTION
from service.domain.scheduling.policy import (
    Decision,
    Impossible,
    Node,
    Request,
    Snapshot,
    Start,
    Wait,
    WaitingJob,
    plan,
)
from service.domain.scheduling.rules.eviction import RunningJob
from service.domain.scheduling.rules.obstacles import Reason
from service.domain.scheduling.rules.queues import Queue
from tests.unit.service.domain.scheduling.outlook.test_outlook import (
    in_s,
    runs,
    situation,
    waits,
)
from tests.unit.service.domain.scheduling.snapshots import HOUR, NOW


def answers(
    job: WaitingJob, others: list[WaitingJob], running: list[RunningJob], **more: Any
) -> list[Counterfactual]:
    more.setdefault("resubmit", Multiples())
    queues = more.pop("queues", ())
    choices = Choices(
        **{key: more.pop(key) for key in list(more) if key in CHOICES},
        queues=tuple(OtherQueue(queue, job.ends_within_s) for queue in queues),
    )
    there = situation([job, *others], running, queues=queues, **more)
    questions = JobQuestions(there, job, NOW)
    decision = questions.decision
    if isinstance(decision, Start):
        return []
    assert isinstance(decision, Wait | Impossible)
    return questions.answers(choices, decision.reason)


CHOICES = ("resubmit", "max_priority")


class Multiples:
    """Documents that require the number of workers to be a multiple of a number, with a minimum."""

    def __init__(self, step: int = 1, least: int = 1) -> None:
        self.step, self.least = step, least

    def __call__(self, job: WaitingJob, change: Change) -> WaitingJob | None:
        request = job.request
        number = change.num_workers or request.num_workers
        if change.num_workers is not None and (number % self.step or number < self.least):
            return None
        if change.num_workers is not None:
            request = replace(request, num_workers=number, min_workers=None)
        if change.min_workers is not None:
            request = replace(request, min_workers=change.min_workers)
        if change.of_worker is not None:
            request = replace(request, bundle={**request.bundle, **dict([change.of_worker])})
        if change.anywhere:
            request = replace(request, required_level=None)
        return replace(job, request=request, seq=10**6, waited_s=0.0, place=0)


def told(found: list[Counterfactual]) -> list[str]:
    return [each.message for each in found]


def test_a_gang_could_start_now_with_as_many_workers_as_are_free() -> None:
    (found,) = answers(waits("a", 4), [], [runs("r", {"n": 1})], max_priority=50)
    assert (found.message, found.at, found.num_workers) == ("starts now with 3 workers", NOW, 3)


def test_fewer_workers_are_a_multiple_of_what_one_replica_needs() -> None:
    (found,) = answers(
        waits("a", 4), [], [runs("r", {"n": 1})], resubmit=Multiples(2), max_priority=50
    )
    assert found.num_workers == 2
    running = [runs("r", {"n": 1})]
    assert answers(waits("a", 4), [], running, resubmit=refuses_all, max_priority=50) == []


def test_a_size_that_the_document_may_not_have_is_not_suggested() -> None:
    running = [runs("r", {"n": 2})]
    resubmit = Multiples(least=3)
    assert answers(waits("a", 4), [], running, resubmit=resubmit, max_priority=50) == []


def test_a_job_that_a_limit_keeps_back_is_promised_no_start_by_its_priority() -> None:
    queues = (Queue("night", max_running=1),)
    running = [runs("r", {"n": 1}, None, queue="night")]
    others = [waits("b", queue="night", priority=51, seq=1)]
    assert answers(waits("a", queue="night"), others, running, queues=queues) == []


def test_what_is_no_sooner_than_the_expected_start_is_left_out() -> None:
    found = [Counterfactual("now", NOW), Counterfactual("later", NOW + timedelta(hours=1))]
    assert sooner(found, None) == found
    assert sooner(found, NOW + timedelta(hours=1)) == found[:1]
    assert sooner([*found, Counterfactual("never", None)], NOW) == [Counterfactual("never", None)]


def test_slots_that_a_job_ahead_has_reserved_are_not_promised() -> None:
    ahead = waits("ahead", 4, priority=90)
    assert answers(waits("a", 2), [ahead], [runs("r", {"n": 3})], max_priority=50) == []


def test_another_queue_whose_limit_leaves_room_is_named() -> None:
    night = Queue("night", max_running=0)
    queues = (night, Queue("batch"), Queue("full", max_running=0))
    found = answers(waits("a", queue="night"), [], [], queues=queues, max_priority=50)
    assert told(found) == ["starts now in queue 'batch'"]
    assert found[0].queue == "batch"


def test_a_higher_priority_has_others_make_room() -> None:
    job = waits("a", 4, left_s=9 * HOUR)
    found = answers(job, [], [runs("r", {"n": 4}, HOUR, yields=True)])
    assert told(found) == ["starts at priority 51 once job r has released slots"]
    assert found[0].priority == 51


def test_a_higher_priority_is_first_when_enough_jobs_have_ended() -> None:
    running = [
        runs("short", {"n": 2}, 600.0, priority=99),
        runs("long", {"n": 2}, 8400.0, priority=99),
    ]
    others = [waits("b", 4, priority=69, seq=1)]
    (found,) = answers(waits("a", 4, left_s=9 * HOUR), others, running)
    assert found.message == "starts earlier at priority 70"
    assert found.at == NOW + timedelta(hours=2, minutes=20)


def test_nobody_is_promised_a_priority_that_they_may_not_have() -> None:
    others = [waits("b", 4, priority=69, seq=1)]
    running = [runs("r", {"n": 4}, 600.0, held_s=0.0)]
    assert answers(waits("a", 4), others, running, max_priority=50) == []


def test_a_time_that_hangs_on_a_job_of_unknown_length_is_not_told() -> None:
    others = [waits("b", 4, priority=69, seq=1)]
    assert answers(waits("a", 4), others, [runs("r", {"n": 4}, None, priority=99)]) == []


def test_a_job_that_no_node_could_hold_never_starts_and_a_smaller_one_could() -> None:
    found = answers(waits("a", 9), [], [runs("r", {"n": 4})])
    assert told(found) == [
        "never on the current cluster: needs 9 workers of 1 GPU, but the whole cluster has room "
        "for 4 at once",
        "could start eventually with 4 workers",
    ]
    large = waits("a", 1)
    large = WaitingJob("a", 0, 50, 1, type(large.request)(1, {"GPU": 16.0}))
    assert told(answers(large, [], [])) == [
        "never on the current cluster: each worker needs 16 GPU, but the largest node has 4 GPU",
        "could start eventually with 4 GPU for each worker",
    ]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (Request(4, {"GPU": 1.0}, 4), "starts now with elastic.min_workers 3"),
        (Request(3, {"GPU": 2.0}), "starts now with 1 GPU for each worker"),
        (Request(3, {"GPU": 1.0, "CPU": 9.0}), "starts now with 2 CPU for each worker"),
        (
            Request(3, {"GPU": 1.0, "memory": 9.0 * GIB}),
            "starts now with 5 GiB of memory for each worker",
        ),
    ],
)
def test_less_of_what_is_scarce_is_suggested(request_: Request, expected: str) -> None:
    total = {"GPU": 4.0, "CPU": 9.0, "memory": 16.5 * GIB}
    free = {"GPU": 3.0, "CPU": 8.0, "memory": 16.5 * GIB}
    there = situation([], [runs("r", {"n": 1})])
    node = Node("n", total, free)
    there = replace(there, snapshot=replace(there.snapshot, nodes=(node,)))
    job = replace(waits("a"), request=request_)
    why = Reason("waiting_for_slots", "waits")
    found = JobQuestions(there, job, NOW).answers(Choices(Multiples(), max_priority=50), why)
    assert expected in told(found)
    assert all(each.at == NOW for each in found)


def test_a_job_that_was_not_submitted_is_expected_as_if_it_were() -> None:
    there = situation([waits("b", 4, left_s=600.0)], [runs("r", {"n": 4}, 600.0, held_s=0.0)])
    asked = JobQuestions(there, waits("a", 4, left_s=9 * HOUR), NOW)
    assert in_s({"a": asked.expected()}, "a") >= 1200.0
    assert in_s({"a": asked.expected()}, "a") <= 1200.0 * (1 + RESOLUTION)


def test_where_jobs_that_were_left_out_are_ahead_the_time_is_only_a_bound() -> None:
    queue = [waits(f"b{n}", 4, left_s=600.0, seq=n) for n in range(50)]
    there = situation(queue, [runs("r", {"n": 4}, 600.0, held_s=0.0)]).first_jobs()
    assert there.left_out == {"b19": 30}
    expected = JobQuestions(there, waits("a", 4, left_s=9 * HOUR), NOW).expected()
    assert expected.at is None
    assert expected.not_before is not None
    assert expected.why is not None
    assert expected.why.code == "beyond_forecast"
    short = JobQuestions(there, waits("a", 4, left_s=60.0), NOW).expected()
    assert in_s({"a": short}, "a") == 600.0


def test_few_plans_answer_however_many_jobs_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def counted(snapshot: Snapshot, now: datetime) -> list[Decision]:
        sizes.append(len(snapshot.queue))
        return plan(snapshot, now)

    monkeypatch.setattr(policy, "plan", counted)
    queue = [waits(f"b{n}", 1 + n % 4, seq=n) for n in range(2000)]
    there = situation(queue, [runs("r", {"n": 3})]).first_jobs()
    job = waits("a", 4, left_s=9 * HOUR)
    found = JobQuestions(there, job, NOW).answers(Choices(), Reason("waiting_for_slots", "waits"))
    assert told(found) == ["starts at priority 51 once job r has released slots"]
    assert len(sizes) <= 8
    assert max(sizes) < 40
